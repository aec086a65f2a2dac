"""The layouts of GPTQ (arXiv:2210.17323) and AWQ (arXiv:2306.00978), which pack 4-bit weights by columns, as rows.

Owns: one repack function for each layout; both give rows of one form, which every back end packs on like any other.
Must not know: which back end, file formats. Invariant: no integer, scale or zero point changes.

A repacked row is cols / 2 bytes (column 2 k in the low half of byte k), then a float16 scale for each group, then a
byte with its zero point: w = scale * (q - zero). As `Groups` the minimum is -scale * zero, which float32 holds exactly;
where every zero point is 8, the format is symmetric and has none.
"""

from functools import partial
from typing import Final

import torch
from torch import Tensor

from executor.quant.ggml import Groups
from kernels.ops import StoredMatrix, require

_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)  # half byte i of a word is output column _AWQ_ORDER[i] of its eight
_MIDDLE: Final = 8
_GROUPS: Final = (32, 64, 128)


def gptq_matrix(name: str, qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None) -> StoredMatrix:
    """qweight int32 [cols / 8, rows], qzeros int32 [groups, rows / 8], scales float16 [groups, rows], g_idx [cols].

    Stored zero points are one less than meant, modulo 16. Raises ValueError for other shapes, 3 or 8 bits, and groups
    whose columns are not adjacent (desc_act).
    """
    cols, rows = qweight.shape[0] * 8, qweight.shape[1]
    group = _check(name, cols, rows, qweight, qzeros, scales)
    if g_idx is not None:
        adjacent = torch.arange(cols) // group
        require(
            g_idx.shape == (cols,) and bool((g_idx.cpu() == adjacent).all()),
            f"{name}: groups of columns that are not adjacent (desc_act) are not supported",
        )
    q = _halves(qweight.t().contiguous())
    zeros = (_halves(qzeros) + 1) & 15
    return _rows_of(name, q, zeros.t(), scales.t())


def awq_matrix(name: str, qweight: Tensor, qzeros: Tensor, scales: Tensor) -> StoredMatrix:
    """qweight int32 [cols, rows / 8], qzeros int32 [groups, rows / 8], scales float16 [groups, rows].

    Raises ValueError for other shapes.
    """
    cols, rows = qweight.shape[0], qweight.shape[1] * 8
    _check(name, cols, rows, qweight, qzeros, scales)
    return _rows_of(name, _awq(qweight).t(), _awq(qzeros).t(), scales.t())


def _check(name: str, cols: int, rows: int, qweight: Tensor, qzeros: Tensor, scales: Tensor) -> int:
    """Columns of a group."""
    require(qweight.dtype == qzeros.dtype == torch.int32, f"{name}: qweight and qzeros must be int32")
    require(scales.dtype == torch.float16 and scales.dim() == 2, f"{name}: scales must be float16 [groups, rows]")
    groups = scales.shape[0]
    require(
        scales.shape[1] == rows and qzeros.shape == (groups, rows // 8) and rows % 8 == 0,
        f"{name}: {list(qweight.shape)} words of 4-bit weights do not go with scales {list(scales.shape)} and zero "
        f"points {list(qzeros.shape)}",
    )
    group = cols // groups
    require(
        group * groups == cols and (groups == 1 or group in _GROUPS),
        f"{name}: {groups} groups of {cols} columns are not supported; groups of 32, 64, 128 and whole rows are",
    )
    return group


def _halves(words: Tensor) -> Tensor:
    """int32 [n, m] -> uint8 [n, 8 m], the lowest half byte first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8).flatten(1)


def _awq(words: Tensor) -> Tensor:
    places = torch.tensor(_AWQ_ORDER).argsort()
    return _halves(words).view(words.shape[0], -1, 8)[..., places].flatten(1)


def _rows_of(name: str, q: Tensor, zeros: Tensor, scales: Tensor) -> StoredMatrix:
    """q uint8 [rows, cols], zeros uint8 and scales float16 [rows, groups]."""
    cols, groups = q.shape[1], scales.shape[1]
    pairs = q.contiguous().view(q.shape[0], cols // 2, 2)
    halves = pairs[..., 0] | (pairs[..., 1] << 4)
    blocks = torch.cat((halves, scales.contiguous().view(torch.uint8), zeros.contiguous()), dim=1)
    symmetric = bool((zeros == _MIDDLE).all())
    unpack = partial(_unpack, cols=cols, groups=groups, symmetric=symmetric)
    return StoredMatrix(name, blocks, cols, 4, lambda some: _dequantize(unpack(some)), unpack)


def _unpack(blocks: Tensor, *, cols: int, groups: int, symmetric: bool) -> Groups:
    halves = blocks[:, : cols // 2]
    q = torch.stack((halves & 15, halves >> 4), dim=-1).flatten(1)
    bytes_of_scales = blocks[:, cols // 2 : cols // 2 + 2 * groups].clone(memory_format=torch.contiguous_format)
    scale = bytes_of_scales.view(torch.float16).float()
    if symmetric:
        return Groups(q.to(torch.int8) - _MIDDLE, scale, None)
    zeros = blocks[:, cols // 2 + 2 * groups :].float()
    return Groups(q, scale, -scale * zeros)


def _dequantize(groups: Groups) -> Tensor:
    """Exact: scale * q and the minimum have at most 15 significant bits, and their sum is scale * (q - zero)."""
    rows, cols = groups.q.shape
    split = groups.q.float().view(rows, groups.scale.shape[1], -1) * groups.scale.unsqueeze(-1)
    return (split if groups.minimum is None else split + groups.minimum.unsqueeze(-1)).view(rows, cols)
