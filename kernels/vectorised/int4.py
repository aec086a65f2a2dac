"""Matrices of 4-bit integers, and of 8-bit ones as two 4-bit halves, in the layout of torch's int4 kernel.

Owns: packing, the product, and reading single rows back. Must not know: file formats.
Source of the kernel: `aten::_weight_int4pack_mm_for_cpu`, which takes bfloat16 activations and computes
w = (q - 8) * scale + zero with q in 0..15 and a bfloat16 scale and zero per 32 columns, sums in float32, and rounds
each result to bfloat16. Integers stay exact; rounding of scales is this back end's only loss in weights.
Invariant: the layout of a block of ROW_BLOCK rows depends on the width alone, and rows are filled up to whole blocks.

An 8-bit integer q in 0..255 is 16 * high + low, so a row of 8-bit weights times x is a row [high, low] of 4-bit
weights times [16 x, x], and 16 x is exact: one product, rounded once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops import Groups, StoredMatrix, require

ROW_BLOCK = 64
GROUP = 32  # columns that share a scale
_CHUNK_ROWS = 64 * ROW_BLOCK  # packed at a time: the packer wants int32


@dataclass(frozen=True, slots=True)
class Lookup:
    """What exact rows need beside the packed integers."""

    places: Tensor  # int32 [ROW_BLOCK, packed columns]: where in a block's nibbles each integer lies
    scale: Tensor  # float16 where that is exact, else float32; [rows, groups]
    minimum: Tensor | None  # likewise: w = scale * q + minimum, q unsigned; None: w = scale * (q - half the range)

    @property
    def nbytes(self) -> int:
        return self.places.nbytes + self.scale.nbytes + (self.minimum.nbytes if self.minimum is not None else 0)


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    rows: int
    cols: int
    wide: bool  # 8 bits: packed columns are the high halves, then the low ones
    packed: Tensor  # uint8 [rows filled up, packed columns / 2]
    scales_and_zeros: Tensor  # bfloat16 [packed columns / GROUP, rows filled up, 2]
    lookup: Lookup | None

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales_and_zeros.nbytes + (self.lookup.nbytes if self.lookup else 0)


def fits_int4(parts: Sequence[StoredMatrix]) -> bool:
    """Whether all parts hold 4-bit integers, or all 8-bit ones, in groups of 32."""
    return len({part.bits for part in parts}) == 1 and all(
        part.bits in (4, 8) and part.cols % GROUP == 0 and _group_size(part) == GROUP for part in parts
    )


def pack_int4(parts: Sequence[StoredMatrix], *, lookup: bool) -> Int4Matrix:
    """Raises ValueError if the parts do not fit (`fits_int4`)."""
    require(fits_int4(parts), f"{', '.join(part.name for part in parts)}: no 4-bit or 8-bit groups of {GROUP}")
    wide = parts[0].bits == 8
    cols = parts[0].cols
    rows = sum(part.rows for part in parts)
    filled = -(-rows // ROW_BLOCK) * ROW_BLOCK
    width = cols * (2 if wide else 1)
    packed = torch.empty(filled, width // 2, dtype=torch.uint8)
    scales_and_zeros = torch.zeros(width // GROUP, filled, 2, dtype=torch.bfloat16)
    scales, minimums = [], []
    for start in range(0, rows, _CHUNK_ROWS):
        stop = min(start + _CHUNK_ROWS, rows)
        q, scale, minimum = _unsigned(parts, start, stop)
        stop_filled = min(start + _CHUNK_ROWS, filled)
        halves = torch.zeros(stop_filled - start, width, dtype=torch.int32)
        # zero = minimum + 8 * scale makes up for the 8 that the kernel subtracts from each integer.
        if wide:
            halves[: stop - start, :cols] = q >> 4
            halves[: stop - start, cols:] = q & 15
            scale_columns = torch.cat((scale, scale), dim=1)
            zero_columns = torch.cat((torch.zeros_like(scale), minimum + 136 * scale), dim=1)
        else:
            halves[: stop - start] = q
            scale_columns, zero_columns = scale, minimum + 8 * scale
        packed[start:stop_filled] = _pack(halves)
        scales_and_zeros[:, start:stop, 0] = scale_columns.t()
        scales_and_zeros[:, start:stop, 1] = zero_columns.t()
        if lookup:
            scales.append(scale)
            minimums.append(minimum)
    if not lookup:
        return Int4Matrix(rows, cols, wide, packed, scales_and_zeros, None)
    affine = any(_unpack(part, 0, 1).minimum is not None for part in parts)
    rows_back = Lookup(_places(width), _half(torch.cat(scales)), _half(torch.cat(minimums)) if affine else None)
    return Int4Matrix(rows, cols, wide, packed, scales_and_zeros, rows_back)


def int4_linear(x: Tensor, weight: Int4Matrix) -> Tensor:
    """x float32 [T, cols], rounded to bfloat16 -> float32 [T, rows], holding bfloat16 values."""
    if x.shape[0] == 0:
        return torch.empty(0, weight.rows)
    narrow = x.to(torch.bfloat16).contiguous()
    if weight.wide:
        narrow = torch.cat((narrow * 16, narrow), dim=1)
    product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(narrow, weight.packed, GROUP, weight.scales_and_zeros)
    return product[:, : weight.rows].to(torch.float32)


def int4_rows(ids: Tensor, weight: Int4Matrix) -> Tensor:
    """float32 [n, cols], exactly the stored weights. ids int64 [n], each below rows."""
    lookup = weight.lookup
    if lookup is None:
        raise ValueError("the matrix was packed without lookup")
    places = lookup.places[ids % ROW_BLOCK].to(torch.int64)
    block_bytes = ROW_BLOCK * weight.packed.shape[1]
    stored = weight.packed.view(-1)[(ids // ROW_BLOCK * block_bytes).unsqueeze(1) + (places >> 1)]
    q = (stored >> ((places & 1) * 4).to(torch.uint8)) & 15
    if weight.wide:
        q = q[:, : weight.cols] * 16 + q[:, weight.cols :]
    grouped = q.view(ids.shape[0], -1, GROUP).to(torch.float32)
    scale = lookup.scale[ids].to(torch.float32).unsqueeze(-1)
    if lookup.minimum is None:
        weights = (grouped - (128 if weight.wide else 8)) * scale
    else:
        weights = grouped * scale + lookup.minimum[ids].to(torch.float32).unsqueeze(-1)
    return weights.view(ids.shape[0], weight.cols)


def _unsigned(parts: Sequence[StoredMatrix], start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [start, stop) of the parts together: q int32 from 0, scale, minimum."""
    pieces = []
    first = 0
    for part in parts:
        low, high = max(start - first, 0), min(stop - first, part.rows)
        if low < high:
            pieces.append(_part(part, low, high))
        first += part.rows
    q, scale, minimum = (torch.cat(tensors) for tensors in zip(*pieces, strict=True))
    return q, scale, minimum


def _part(part: StoredMatrix, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    groups = _unpack(part, start, stop)
    if groups.minimum is not None:
        return groups.q.to(torch.int32), groups.scale, groups.minimum
    offset = 1 << (part.bits - 1)
    return groups.q.to(torch.int32) + offset, groups.scale, groups.scale * -offset


def _unpack(part: StoredMatrix, start: int, stop: int) -> Groups:
    if part.unpack is None:
        raise ValueError(f"{part.name} holds no integers")
    return part.unpack(part.blocks[start:stop])


def _group_size(part: StoredMatrix) -> int:
    return part.cols // _unpack(part, 0, 1).scale.shape[1]


def _half(values: Tensor) -> Tensor:
    half = values.to(torch.float16)
    return half if torch.equal(half.to(torch.float32), values) else values


def _pack(q: Tensor) -> Tensor:
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
    return packed


def _places(width: int) -> Tensor:
    """Where the packer puts each integer of a block, found out by packing the integers' own numbers.

    The layout differs between instruction sets and is nowhere promised; asking it is the one way that holds.
    """
    numbers = torch.arange(ROW_BLOCK * width).view(ROW_BLOCK, width)
    found = torch.zeros(ROW_BLOCK * width, dtype=torch.int64)
    for shift in range(0, (ROW_BLOCK * width - 1).bit_length(), 4):
        stored = _pack(((numbers >> shift) & 15).to(torch.int32)).view(-1).to(torch.int64)
        found |= torch.stack((stored & 15, stored >> 4), dim=1).view(-1) << shift
    places = torch.empty_like(found)
    places[found] = torch.arange(found.shape[0])
    return places.view(ROW_BLOCK, width).to(torch.int32)
