"""The scheme `native`: weights stay in memory as the file quantized them.

Owns: reading tensors of a GGUF file exactly once each, with their shapes checked. Must not know: what a tensor means.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from executor.loading.ggml_types import GgmlType
from executor.loading.gguf import GgufError, GgufFile
from executor.quant.ggml import dequantize, read_blocks, unpack
from kernels.ops import Ops, PackedMatrix, StoredMatrix

_BITS = {
    GgmlType.Q4_0: 4,
    GgmlType.Q4_1: 4,
    GgmlType.Q4_K: 4,
    GgmlType.Q5_0: 5,
    GgmlType.Q5_1: 5,
    GgmlType.Q5_K: 5,
    GgmlType.Q6_K: 6,
    GgmlType.Q8_0: 8,
}
_FLOATS = (GgmlType.F32, GgmlType.F16, GgmlType.BF16)


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the file as rows of a packed matrix."""

    name: str
    rows: int
    order: Tensor | None = None  # int64 [rows]: packed row i is the file's row order[i]; None: as in the file


class NativeScheme:
    name = "native"

    def __init__(self, file: GgufFile, ops: Ops) -> None:
        self._file = file
        self._ops = ops
        self._used: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._file.tensors

    def matrix(self, parts: Sequence[Part], cols: int, *, lookup: bool = False) -> PackedMatrix:
        """The parts' rows as one packed matrix. Raises GgufError naming a tensor that is missing or misshapen."""
        return self._ops.pack([self._stored(part, cols) for part in parts], lookup=lookup)

    def vector(self, name: str, size: int, order: Tensor | None = None) -> Tensor:
        """float32 [size]. Raises GgufError as `matrix`, and for a quantized format."""
        kind = self._take(name, (size,))
        if kind not in _FLOATS:
            raise GgufError(f"tensor {name!r} is {kind.name}; a vector must be F32, F16 or BF16")
        values = dequantize(read_blocks(self._file.raw(name), 1), kind)[0]
        return values if order is None else values[order]

    def finish(self) -> None:
        """Raises GgufError if the file has tensors that nobody asked for: the model would not be what it says."""
        unused = sorted(self._file.tensors.keys() - self._used)
        if unused:
            shown = ", ".join(repr(name) for name in unused[:5])
            raise GgufError(f"{len(unused)} tensors of the file are of no use to this architecture: {shown}")

    def _stored(self, part: Part, cols: int) -> StoredMatrix:
        kind = self._take(part.name, (part.rows, cols))
        blocks = read_blocks(self._file.raw(part.name), part.rows)
        if part.order is not None:
            blocks = blocks.index_select(0, part.order)
        return stored_matrix(part.name, blocks, kind, cols)

    def _take(self, name: str, shape: tuple[int, ...]) -> GgmlType:
        info = self._file.tensors.get(name)
        if info is None:
            raise GgufError(f"tensor {name!r} is missing")
        if tuple(info.shape) != shape:
            raise GgufError(f"tensor {name!r} has shape {list(info.shape)}, expected {list(shape)}")
        self._used.add(name)
        return info.type


def stored_matrix(name: str, blocks: Tensor, kind: GgmlType, cols: int) -> StoredMatrix:
    """blocks uint8 [rows, row_bytes] of a format, with its readers."""
    return StoredMatrix(
        name=name,
        blocks=blocks,
        cols=cols,
        bits=_BITS.get(kind, 0),
        dequantize=partial(dequantize, type=kind),
        unpack=partial(unpack, type=kind) if kind in _BITS else None,
    )


def unpermuted(heads: int, head_dim: int) -> Tensor:
    """The order that undoes what llama-family converters do to the rows of q and k.

    They interleave each head's two halves, so that rotation pairs are neighbours; here pairs are (i, i + D/2).
    Whole rows move, so this is exact for every format.
    """
    rows = torch.arange(heads * head_dim).view(heads, head_dim // 2, 2)
    return rows.transpose(1, 2).reshape(-1)
