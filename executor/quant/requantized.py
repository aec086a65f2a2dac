"""Schemes that change a file's weights when they are loaded: `int8`, one byte a weight, and `bf16`.

Owns: the rounding, and the form in memory of a matrix of `int8`. Must not know: files, back ends.
What a scheme makes is a `StoredMatrix` like one from a file, so every back end can multiply with it, and rows that are
looked up are the rounded ones.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from executor.loading.ggml_types import GgmlType
from executor.quant.ggml import Groups
from executor.quant.native import NativeScheme, Part, stored_matrix
from kernels.ops import StoredMatrix

_CHUNK_WEIGHTS = 4 << 20  # decoded at a time
_SCALE_BYTES = 4


class _Requantized(NativeScheme):
    round: Callable[[StoredMatrix], StoredMatrix]

    def _stored(self, part: Part, cols: int) -> StoredMatrix:
        return type(self).round(super()._stored(part, cols))


def to_int8(matrix: StoredMatrix) -> StoredMatrix:
    """Symmetric with a scale for each row: q = w / scale to the nearest, ties to even, scale = largest |w| / 127.

    Raises ValueError for a weight that is not finite.
    """

    def row_blocks(weights: Tensor) -> Tensor:
        if not weights.isfinite().all():
            raise ValueError(f"{matrix.name} has weights that are not finite")
        scale = weights.abs().amax(dim=1, keepdim=True) / 127
        q = (weights / torch.where(scale > 0, scale, 1)).round_().clamp_(-127, 127).to(torch.int8)
        return torch.cat((scale.view(torch.uint8), q.view(torch.uint8)), dim=1)

    return StoredMatrix(matrix.name, _by_chunks(matrix, row_blocks), matrix.cols, 8, _dequantize_int8, _unpack_int8)


def to_bf16(matrix: StoredMatrix) -> StoredMatrix:
    """Weights rounded to the nearest bfloat16, ties to even."""

    def row_blocks(weights: Tensor) -> Tensor:
        return weights.to(torch.bfloat16).view(torch.uint8)

    return stored_matrix(matrix.name, _by_chunks(matrix, row_blocks), GgmlType.BF16, matrix.cols)


class Int8Scheme(_Requantized):
    name = "int8"
    round = staticmethod(to_int8)


class Bf16Scheme(_Requantized):
    name = "bf16"
    round = staticmethod(to_bf16)


def _by_chunks(matrix: StoredMatrix, row_blocks: Callable[[Tensor], Tensor]) -> Tensor:
    step = max(1, _CHUNK_WEIGHTS // matrix.cols)
    starts = range(0, matrix.rows, step)
    return torch.cat([row_blocks(matrix.dequantize(matrix.blocks[start : start + step])) for start in starts])


def _unpack_int8(blocks: Tensor) -> Groups:
    """uint8 [n, 4 + cols]: a row's scale in float32, then its integers."""
    scale = blocks[:, :_SCALE_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return Groups(blocks[:, _SCALE_BYTES:].contiguous().view(torch.int8), scale, None)


def _dequantize_int8(blocks: Tensor) -> Tensor:
    groups = _unpack_int8(blocks)
    return groups.q.to(torch.float32).mul_(groups.scale)
