"""Decodes GGML's block formats.

Owns: the bit layout of each block format. Must not know: files, models, back ends.
Invariant: decoding is exact. A format's integers and scales come out as stored; `dequantize` multiplies and adds
them in float32 in the order of ggml's own reference, so that results agree bit for bit (NaN payloads aside).

A row is a sequence of blocks (`executor.loading.ggml_types.BLOCKS`). Every quantized format is one idea: `cols` small
integers, and per group of 16 or 32 of them a scale and, in the affine formats, a minimum.
Layouts: ggml's `ggml-common.h` and `ggml-quants.c`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor.loading.ggml_types import BLOCKS, GgmlType


@dataclass(frozen=True, slots=True)
class Groups:
    """Quantized rows, unpacked. w = scale * q, plus minimum where the format has one.

    q: [rows, cols], int8 (symmetric formats: Q4_0, Q5_0, Q8_0, Q6_K) or uint8 (affine: Q4_1, Q5_1, Q4_K, Q5_K).
    scale, minimum: float32 [rows, groups]; a group is cols // groups consecutive columns.

    scale * q never rounds: a scale has at most 18 significant bits (float16 times a 6-bit or 8-bit integer),
    q at most 7, and no format reaches 25 together. So w is rounded once, by the addition, with FMA or without.
    """

    q: Tensor
    scale: Tensor
    minimum: Tensor | None

    @property
    def group_size(self) -> int:
        return self.q.shape[1] // self.scale.shape[1]


def dequantize(raw: Tensor, type: GgmlType) -> Tensor:
    """raw: uint8 [rows, row_bytes], as in the file. Returns a new float32 [rows, cols].

    Raises ValueError if `raw` has another dtype or rank, or a row is no whole number of blocks.
    """
    _check(raw, type)
    if type in _FLOATS:
        return _FLOATS[type](raw.clone(memory_format=torch.contiguous_format))
    groups = unpack(raw, type)
    rows, cols = groups.q.shape
    weights = groups.q.view(rows, -1, groups.group_size).to(torch.float32)
    weights.mul_(groups.scale.unsqueeze(-1))
    if groups.minimum is not None:
        weights.add_(groups.minimum.unsqueeze(-1))
    return weights.view(rows, cols)


def unpack(raw: Tensor, type: GgmlType) -> Groups:
    """raw: uint8 [rows, row_bytes] of a quantized format. Raises ValueError as `dequantize`, or for a float type."""
    _check(raw, type)
    if type not in _QUANTIZED:
        raise ValueError(f"{type.name} is not a quantized format")
    blocks = raw.reshape(raw.shape[0], -1, BLOCKS[type].bytes)
    return _QUANTIZED[type](blocks)


def unpack_unsigned(raw: Tensor, type: GgmlType) -> tuple[Tensor, Tensor, Tensor]:
    """(q uint8 [rows, cols], scale float32 [rows, groups], minimum float32 [rows, groups]), w = scale * q + minimum.

    For every quantized format but Q8_0 (whose integers need their sign; use `unpack`). Symmetric formats get
    minimum = -offset * scale, which is exact, as is the sum, since offset is a power of two: w equals the
    dequantized value, except that a weight of minus zero becomes plus zero.
    """
    groups = unpack(raw, type)
    if groups.minimum is not None:
        return groups.q, groups.scale, groups.minimum
    if type not in _OFFSETS:
        raise ValueError(f"{type.name} has no unsigned form")
    offset = _OFFSETS[type]
    return (groups.q + offset).to(torch.uint8), groups.scale, groups.scale * -offset


def read_blocks(raw: memoryview, rows: int) -> Tensor:
    """Copy a tensor's bytes out of the file's mapping: uint8 [rows, row_bytes], in ordinary memory.

    Raises ValueError if the bytes do not divide into `rows`.
    """
    if rows < 1 or raw.nbytes % rows:
        raise ValueError(f"{raw.nbytes} bytes do not divide into {rows} rows")
    blocks = torch.empty(rows, raw.nbytes // rows, dtype=torch.uint8)
    np.copyto(blocks.numpy(), np.frombuffer(raw, dtype=np.uint8).reshape(rows, -1))
    return blocks


def _check(raw: Tensor, type: GgmlType) -> None:
    if raw.dtype != torch.uint8 or raw.dim() != 2:
        raise ValueError(f"expected uint8 [rows, row_bytes], got {raw.dtype} {list(raw.shape)}")
    block = BLOCKS[type]
    if raw.shape[1] % block.bytes:
        raise ValueError(f"rows of {raw.shape[1]} bytes are no whole number of {type.name} blocks ({block.bytes})")


# Below, `blocks` is uint8 [rows, blocks, block_bytes]; slices of its last axis are the fields of a block.


def _half(field: Tensor) -> Tensor:
    """[rows, blocks, 2] bytes -> float32 [rows, blocks]. The clone aligns the bytes for the view."""
    return field.clone(memory_format=torch.contiguous_format).view(torch.float16).squeeze(-1).float()


_LOW_HALVES = 0x0F0F0F0F0F0F0F0F


def _nibbles(field: Tensor, run: int) -> Tensor:
    """Each run of `run` bytes, a multiple of 8, holds 2 * run integers: its low halves, then its high halves."""
    runs = field.reshape(*field.shape[:-1], -1, 1, run).clone(memory_format=torch.contiguous_format)
    eights = runs.view(torch.int64)  # eight bytes at a time
    return torch.cat((eights & _LOW_HALVES, (eights >> 4) & _LOW_HALVES), dim=-2).view(torch.uint8).flatten(-3)


def _fifth_bits(field: Tensor) -> Tensor:
    """[rows, blocks, 4] -> [rows, blocks, 32]: bit i of the little-endian word, moved to bit 4, is of element i."""
    shift = torch.arange(8, dtype=torch.uint8, device=field.device)
    return (((field.unsqueeze(-1) >> shift) & 1) << 4).flatten(-2)


def _signed(q: Tensor, offset: int) -> Tensor:
    return q.to(torch.int8).sub_(offset).flatten(1)


def _q4_0(blocks: Tensor) -> Groups:
    return Groups(_signed(_nibbles(blocks[..., 2:], 16), 8), _half(blocks[..., :2]), None)


def _q4_1(blocks: Tensor) -> Groups:
    q = _nibbles(blocks[..., 4:], 16)
    return Groups(q.flatten(1), _half(blocks[..., :2]), _half(blocks[..., 2:4]))


def _q5_0(blocks: Tensor) -> Groups:
    q = _nibbles(blocks[..., 6:], 16) | _fifth_bits(blocks[..., 2:6])
    return Groups(_signed(q, 16), _half(blocks[..., :2]), None)


def _q5_1(blocks: Tensor) -> Groups:
    q = _nibbles(blocks[..., 8:], 16) | _fifth_bits(blocks[..., 4:8])
    return Groups(q.flatten(1), _half(blocks[..., :2]), _half(blocks[..., 2:4]))


def _q8_0(blocks: Tensor) -> Groups:
    q = blocks[..., 2:].clone(memory_format=torch.contiguous_format).view(torch.int8)
    return Groups(q.flatten(1), _half(blocks[..., :2]), None)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum of the 8 groups of each Q4_K or Q5_K super-block: float32 [rows, groups].

    Bytes 4..16 hold eight 6-bit scales and eight 6-bit minimums. Those of groups 0 to 3 are the low six bits of
    bytes 0..4 and 4..8; those of groups 4 to 7 take their low four bits from the two halves of bytes 8..12, and
    their high two bits from the top of bytes 0..4 and 4..8.
    """
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scale = torch.cat((first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)), dim=-1)
    minimum = torch.cat((second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)), dim=-1)
    return (
        (_half(blocks[..., 0:2]).unsqueeze(-1) * scale).flatten(1),
        (_half(blocks[..., 2:4]).unsqueeze(-1) * minimum).neg_().flatten(1),
    )


def _q4_k(blocks: Tensor) -> Groups:
    return Groups(_nibbles(blocks[..., 16:], 32).flatten(1), *_k_scales(blocks))


def _q5_k(blocks: Tensor) -> Groups:
    # Bit g of high byte j is the fifth bit of element j of group g.
    shift = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    high = (((blocks[..., None, 16:48] >> shift) & 1) << 4).flatten(-2)
    return Groups((_nibbles(blocks[..., 48:], 32) | high).flatten(1), *_k_scales(blocks))


def _q6_k(blocks: Tensor) -> Groups:
    # Each 32 high bytes serve 128 elements: bit pair g of byte j belongs to element 32 * g + j.
    shift = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    high = (blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> shift) & 3
    q = _nibbles(blocks[..., :128], 64) | (high << 4).flatten(-3)
    scale = blocks[..., 192:208].clone(memory_format=torch.contiguous_format).view(torch.int8)
    return Groups(_signed(q, 32), (_half(blocks[..., 208:]).unsqueeze(-1) * scale).flatten(1), None)


def _bf16(raw: Tensor) -> Tensor:
    return (raw.view(torch.int16).to(torch.int32) << 16).view(torch.float32)


_FLOATS: dict[GgmlType, Callable[[Tensor], Tensor]] = {
    GgmlType.F32: lambda raw: raw.view(torch.float32),
    GgmlType.F16: lambda raw: raw.view(torch.float16).float(),
    GgmlType.BF16: _bf16,
}
_QUANTIZED: dict[GgmlType, Callable[[Tensor], Groups]] = {
    GgmlType.Q4_0: _q4_0,
    GgmlType.Q4_1: _q4_1,
    GgmlType.Q5_0: _q5_0,
    GgmlType.Q5_1: _q5_1,
    GgmlType.Q8_0: _q8_0,
    GgmlType.Q4_K: _q4_k,
    GgmlType.Q5_K: _q5_k,
    GgmlType.Q6_K: _q6_k,
}
_OFFSETS = {GgmlType.Q4_0: 8, GgmlType.Q5_0: 16, GgmlType.Q6_K: 32}
