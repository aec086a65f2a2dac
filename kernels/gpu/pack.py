"""Weight matrices in the layouts that `kernels.gpu.device.linear` reads.

Owns: packing, whole, on the CPU, before the matrix goes to the device. Must not know: file formats, models.
Invariant: nothing is lost: an integer stays itself, a scale stays itself (float16 where that holds it, else float32), a
float goes to the narrowest type that holds all of them and the file's size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels.gpu.target import CHUNK, PANEL
from kernels.ops import Groups, StoredMatrix, require
from kernels.raw import check_parts

_ROWS_AT_A_TIME: Final = 64 * PANEL
_WORDS: Final = 16  # of a row in a chunk, each of 32 bits
_BITS: Final = {"int4": 4, "int8": 8}


@dataclass(frozen=True, slots=True)
class GpuMatrix:
    """kind: float, int8 or int4. n_filled: rows with those that fill the last panel up."""

    kind: str
    rows: int
    cols: int
    n_filled: int
    chunks: int
    w: Tensor
    scale: Tensor | None  # [panels, groups, PANEL]
    minimum: Tensor | None
    zero: int  # taken off the stored integers
    group: int  # columns of a scale; 0: the whole row
    groups: int

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.w, self.scale, self.minimum) if tensor is not None)


@dataclass(frozen=True, slots=True)
class StackedMatrix:
    """Matrices of different formats, one above the other."""

    parts: tuple[GpuMatrix, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def cols(self) -> int:
        return self.parts[0].cols

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class _Format:
    """What parts must share to be one matrix."""

    kind: str
    affine: bool
    zero: int
    group: int
    scale_type: torch.dtype
    float_type: torch.dtype


def pack(parts: Sequence[StoredMatrix], device: torch.device) -> GpuMatrix | StackedMatrix:
    """Raises ValueError as `Ops.pack`."""
    check_parts(parts)
    formats = [_format(part) for part in parts]
    packed: list[GpuMatrix] = []
    start = 0
    for stop in range(1, len(parts) + 1):
        if stop == len(parts) or formats[stop] != formats[start]:
            packed.append(_pack_alike(parts[start:stop], formats[start], device))
            start = stop
    return packed[0] if len(packed) == 1 else StackedMatrix(tuple(packed))


def _pack_alike(parts: Sequence[StoredMatrix], format: _Format, device: torch.device) -> GpuMatrix:
    rows, cols = sum(part.rows for part in parts), parts[0].cols
    chunk = chunk_columns(format.kind)
    filled, wide = _up(rows, PANEL), _up(cols, chunk)
    chunks = wide // chunk
    if format.kind == "float":
        w = torch.zeros(filled, wide, dtype=format.float_type)
        for first, part, blocks in _pieces(parts):
            w[first : first + blocks.shape[0], :cols] = part.dequantize(blocks).to(format.float_type)
        return GpuMatrix("float", rows, cols, filled, chunks, w.to(device), None, None, 0, 0, 0)
    groups = 1 if format.group == 0 else -(-wide // format.group)
    q = torch.full((filled, wide), format.zero, dtype=torch.uint8)
    scale = torch.zeros(filled, groups, dtype=format.scale_type)
    minimum = torch.zeros(filled, groups, dtype=format.scale_type) if format.affine else None
    for first, part, blocks in _pieces(parts):
        found, where = _unpack(part, blocks), slice(first, first + blocks.shape[0])
        signed = found.q.dtype == torch.int8
        q[where, :cols] = (found.q.to(torch.int16) + format.zero).to(torch.uint8) if signed else found.q
        scale[where, : found.scale.shape[1]] = found.scale.to(format.scale_type)
        if minimum is not None and found.minimum is not None:
            minimum[where, : found.scale.shape[1]] = found.minimum.to(format.scale_type)
    bits = _BITS[format.kind]
    slices = q.view(filled // PANEL, PANEL, chunks, 32 // bits, _WORDS).to(torch.int32)
    words = slices[..., 0, :]
    for i in range(1, 32 // bits):
        words = words | (slices[..., i, :] << (bits * i))
    w = words.transpose(1, 2).contiguous()
    return GpuMatrix(
        kind=format.kind,
        rows=rows,
        cols=cols,
        n_filled=filled,
        chunks=chunks,
        w=w.to(device),
        scale=_by_panel(scale, device),
        minimum=None if minimum is None else _by_panel(minimum, device),
        zero=format.zero,
        group=format.group,
        groups=groups,
    )


def chunk_columns(kind: str) -> int:
    """Columns that one step of a product takes."""
    return CHUNK if kind == "float" else _WORDS * 32 // _BITS[kind]


def _by_panel(values: Tensor, device: torch.device) -> Tensor:
    """[filled rows, groups] -> [panels, groups, PANEL]."""
    return values.view(-1, PANEL, values.shape[1]).transpose(1, 2).contiguous().to(device)


def _format(part: StoredMatrix) -> _Format:
    if part.unpack is None:
        return _Format("float", False, 0, 0, torch.float32, _float_type(part))
    first = _unpack(part, part.blocks[:1])
    count = first.scale.shape[1]
    group = 0 if count == 1 and part.cols not in (16, 32) else part.cols // count
    require(
        group in (0, 16, 32, 64, 128),
        f"{part.name}: groups of {group} columns are not supported; 16, 32, 64, 128 and whole rows are",
    )
    kind = "int4" if part.bits <= 4 else "int8"  # 5 and 6 bits take 8
    affine = first.minimum is not None
    zero = 0 if first.q.dtype == torch.uint8 else 8 if kind == "int4" else 128
    pieces = (_unpack(part, blocks) for _, _, blocks in _pieces([part]))
    short = all(_holds(torch.float16, each.scale) and _holds(torch.float16, each.minimum) for each in pieces)
    return _Format(kind, affine, zero, group, torch.float16 if short else torch.float32, torch.float32)


def _float_type(part: StoredMatrix) -> torch.dtype:
    if part.blocks.shape[1] > 2 * part.cols:
        return torch.float32
    for dtype in (torch.bfloat16, torch.float16):
        if all(_holds(dtype, part.dequantize(blocks)) for _, _, blocks in _pieces([part])):
            return dtype
    return torch.float32


def _pieces(parts: Sequence[StoredMatrix]) -> Iterator[tuple[int, StoredMatrix, Tensor]]:
    """(first row of the whole, part, blocks)."""
    before = 0
    for part in parts:
        for start in range(0, part.rows, _ROWS_AT_A_TIME):
            yield before + start, part, part.blocks[start : start + _ROWS_AT_A_TIME]
        before += part.rows


def _unpack(part: StoredMatrix, blocks: Tensor) -> Groups:
    if part.unpack is None:
        raise ValueError(f"{part.name} holds no integers")
    return part.unpack(blocks)


def _holds(dtype: torch.dtype, values: Tensor | None) -> bool:
    return values is None or bool(((values.to(dtype).to(torch.float32) == values) | values.isnan()).all())


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
