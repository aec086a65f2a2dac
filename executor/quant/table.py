"""The quantization schemes by name. A scheme reads a file's tensors and packs them for a back end."""

from collections.abc import Callable

from executor.loading.gguf import GgufFile
from executor.quant.native import NativeScheme
from executor.quant.requantized import Bf16Scheme, Int8Scheme
from kernels.ops import Ops

SCHEMES: dict[str, Callable[[GgufFile, Ops], NativeScheme]] = {
    scheme.name: scheme for scheme in (NativeScheme, Int8Scheme, Bf16Scheme)
}
