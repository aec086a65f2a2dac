"""Packs stored matrices into the panels that the native linear reads (`native/panels.h`), once, when a model is loaded.

Owns: which format of panels a part gets. Must not know: the layout of a panel's bytes.
Invariant: lossless. Scales that float16 holds exactly stay float16, others are float32; floats take the narrowest of
the three types that holds all of a part's weights.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.library import INT, LONG, POINTER, Library
from kernels.cpu.memory import WeightMemory
from kernels.ops import Groups, StoredMatrix
from kernels.raw import check_parts

PANEL_ROWS: Final = 16
GROUP: Final = 32
ACTIVATIONS: Final = {"16bit": 2, "8bit": 1}  # planes of 8 bits each that matrices of integers read
_CHUNK_WEIGHTS: Final = 4 << 20  # decoded at a time


class Format(IntEnum):
    """As in native/panels.h."""

    NIBBLES_HALF = 0
    NIBBLES_AFFINE_HALF = 1
    NIBBLES_AFFINE = 2
    BYTES_HALF = 3
    BYTES_AFFINE_HALF = 4
    BYTES_AFFINE = 5
    BYTES_SIXTEENS = 6
    BYTES_ROWS = 7
    FLOATS = 8
    FLOATS_HALF = 9
    FLOATS_BRAIN = 10

    @property
    def integer(self) -> bool:
        return self < Format.FLOATS

    @property
    def halves(self) -> bool:
        """Scales are float16."""
        return self in (Format.NIBBLES_HALF, Format.NIBBLES_AFFINE_HALF, Format.BYTES_HALF, Format.BYTES_AFFINE_HALF)


# (4 bits, with minimums, columns of a scale) -> with scales of float16, of float32
_INTEGERS: Final[dict[tuple[bool, bool, int], tuple[Format | None, Format | None]]] = {
    (True, False, GROUP): (Format.NIBBLES_HALF, None),
    (True, True, GROUP): (Format.NIBBLES_AFFINE_HALF, Format.NIBBLES_AFFINE),
    (False, False, GROUP): (Format.BYTES_HALF, None),
    (False, True, GROUP): (Format.BYTES_AFFINE_HALF, Format.BYTES_AFFINE),
    (False, False, GROUP // 2): (None, Format.BYTES_SIXTEENS),
}
_FLOATS: Final = ((Format.FLOATS_BRAIN, torch.bfloat16), (Format.FLOATS_HALF, torch.float16))

_PANEL: Final = np.dtype(
    [("data", "<u8"), ("first_row", "<i4"), ("rows", "<i4"), ("format", "<i4"), ("reserved", "<i4")]
)


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("panels", POINTER),
        ("count", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("cols", ctypes.c_int32),
        ("planes", ctypes.c_int32),
        ("floats", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True, eq=False)
class PanelMatrix:
    """A packed matrix. `address` is of its native `Matrix`, valid as long as this object lives."""

    rows: int
    cols: int
    planes: int  # of the quantized activations that some panel reads; 0: none does
    gated: bool  # the upper half of the rows and the lower share no panel
    formats: tuple[Format, ...]  # of the parts
    data: tuple[Tensor, ...]  # uint8, the panels of each part
    panels: "np.ndarray[tuple[int], np.dtype[np.void]]"
    native: _Matrix

    @property
    def address(self) -> int:
        return ctypes.addressof(self.native)

    @property
    def nbytes(self) -> int:
        return sum(data.nbytes for data in self.data) + self.panels.nbytes


class Packer:
    def __init__(self, library: Library, planes: int) -> None:
        """planes: of 8 bits, 1 or 2, of the activations that matrices of integers read (`native/activations.h`)."""
        self._planes = planes
        self._memory = WeightMemory()
        self._panel_bytes = library.bind("tercet_panel_bytes", LONG, INT, INT)
        self._integers = library.bind(
            "tercet_pack_integers", None, INT, POINTER, POINTER, POINTER, INT, INT, INT, POINTER
        )
        self._floats = library.bind("tercet_pack_floats", None, INT, POINTER, INT, INT, POINTER)

    def pack(self, parts: Sequence[StoredMatrix]) -> PanelMatrix:
        """One matrix of the parts' rows, in order; each part begins a panel. Raises ValueError as `Ops.pack`."""
        check_parts(parts)
        cols = parts[0].cols
        packed = [self._part(part) for part in parts]
        count = sum(-(-part.rows // PANEL_ROWS) for part in parts)
        panels = np.zeros(count, dtype=_PANEL)
        at = first_row = 0
        for part, (format, data) in zip(parts, packed, strict=True):
            size = int(self._panel_bytes(format, cols))
            own = np.arange(-(-part.rows // PANEL_ROWS))
            entries = panels[at : at + len(own)]
            entries["data"] = data.data_ptr() + own * size
            entries["first_row"] = first_row + own * PANEL_ROWS
            entries["rows"] = np.minimum(part.rows - own * PANEL_ROWS, PANEL_ROWS)
            entries["format"] = format
            at += len(own)
            first_row += part.rows
        formats = tuple(format for format, _ in packed)
        planes = self._planes if any(format.integer for format in formats) else 0
        floats = not all(format.integer for format in formats)
        return PanelMatrix(
            rows=first_row,
            cols=cols,
            planes=planes,
            gated=count % 2 == 0 and first_row % 2 == 0 and int(panels["first_row"][count // 2]) == first_row // 2,
            formats=formats,
            data=tuple(data for _, data in packed),
            panels=panels,
            native=_Matrix(panels.ctypes.data, count, first_row, cols, planes, floats),
        )

    def _part(self, part: StoredMatrix) -> tuple[Format, Tensor]:
        if part.unpack is None:
            return self._float_part(part)
        narrow, wide = _integer_formats(part)
        packed = None if narrow is None else self._integer_part(part, narrow)
        if packed is None and wide is not None:
            packed = self._integer_part(part, wide)
        if packed is None:
            raise ValueError(f"{part.name} has scales that float16 does not hold")
        return packed

    def _integer_part(self, part: StoredMatrix, format: Format) -> tuple[Format, Tensor] | None:
        """None if a scale does not fit the format."""
        size = int(self._panel_bytes(format, part.cols))
        data = self._memory.take(-(-part.rows // PANEL_ROWS) * size)
        for start, blocks in _chunks(part):
            groups = _unpack(part, blocks)
            if format.halves and not (_holds(torch.float16, groups.scale) and _holds(torch.float16, groups.minimum)):
                return None
            q, scale = groups.q.contiguous(), groups.scale.contiguous()
            minimum = None if groups.minimum is None else groups.minimum.contiguous()
            self._integers(
                format,
                q.data_ptr(),
                scale.data_ptr(),
                None if minimum is None else minimum.data_ptr(),
                *q.shape,
                q.dtype == torch.int8,
                data[start // PANEL_ROWS * size :].data_ptr(),
            )
        return format, data

    def _float_part(self, part: StoredMatrix) -> tuple[Format, Tensor]:
        fits = {
            format: all(_holds(dtype, part.dequantize(blocks)) for _, blocks in _chunks(part))
            for format, dtype in _FLOATS
            if part.blocks.shape[1] <= part.cols * dtype.itemsize
        }
        format = next((format for format, fit in fits.items() if fit), Format.FLOATS)
        size = int(self._panel_bytes(format, part.cols))
        data = self._memory.take(-(-part.rows // PANEL_ROWS) * size)
        for start, blocks in _chunks(part):
            weights = part.dequantize(blocks)
            self._floats(format, weights.data_ptr(), *weights.shape, data[start // PANEL_ROWS * size :].data_ptr())
        return format, data


def _chunks(part: StoredMatrix) -> Iterator[tuple[int, Tensor]]:
    """(first row, blocks), whole panels but for the last."""
    step = max(1, _CHUNK_WEIGHTS // (part.cols * PANEL_ROWS)) * PANEL_ROWS
    for start in range(0, part.rows, step):
        yield start, part.blocks[start : start + step]


def _integer_formats(part: StoredMatrix) -> tuple[Format | None, Format | None]:
    first = _unpack(part, part.blocks[:1])
    if part.bits == 8 and first.minimum is None and first.scale.shape[1] == 1:
        return (Format.BYTES_HALF if part.cols == GROUP else None), Format.BYTES_ROWS
    kind = (part.bits == 4, first.minimum is not None, part.cols // first.scale.shape[1])
    if kind not in _INTEGERS:
        raise ValueError(f"{part.name}: no panels for {part.bits} bits in groups of {kind[2]}")
    return _INTEGERS[kind]


def _unpack(part: StoredMatrix, blocks: Tensor) -> Groups:
    if part.unpack is None:
        raise ValueError(f"{part.name} holds no integers")
    return part.unpack(blocks)


def _holds(dtype: torch.dtype, values: Tensor | None) -> bool:
    """Whether the type holds all values exactly."""
    return values is None or bool(((values.to(dtype).to(torch.float32) == values) | values.isnan()).all())
