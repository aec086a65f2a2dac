"""The quantization schemes by name. A scheme reads a file's tensors and packs them for a back end."""

from collections.abc import Callable

from executor.loading.gguf import GgufFile
from executor.quant.native import NativeScheme
from kernels.ops import Ops

SCHEMES: dict[str, Callable[[GgufFile, Ops], NativeScheme]] = {"native": NativeScheme}
