"""Parses a GGUF header: metadata, and the tensor table with every tensor's place checked.

Owns: the container format (versions 2 and 3, little endian). Must not know: files, what a key or a tensor means
to a model, how blocks decode.
Invariant: no count, length or offset is believed before it is compared with a limit and with the bytes that are
left, so a hostile file costs at most a small multiple of MAX_HEADER_BYTES and raises nothing but GgufError.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from executor.loading.ggml_types import BLOCKS, UNSERVED_TYPES, GgmlType

MetadataValue: TypeAlias = "str | int | float | bool | tuple[MetadataValue, ...]"

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MIN_ALIGNMENT = 8
MAX_ALIGNMENT = 1 << 20
MAX_HEADER_BYTES = 64 << 20
MAX_METADATA = 1 << 16
MAX_TENSORS = 1 << 16
MAX_ARRAY_ELEMENTS = 1 << 22  # of all arrays of a file together
MAX_ARRAY_DEPTH = 4
MAX_STRING_BYTES = 16 << 20
MAX_KEY_BYTES = 65_535
MAX_TENSOR_NAME_BYTES = 64
MAX_DIMS = 4
MAX_ELEMENTS = (1 << 63) - 1
# The shortest pair is a one-byte key with a one-byte value, the shortest tensor has a one-byte name, one dim.
MIN_PAIR_BYTES = 8 + 1 + 4 + 1
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8


class GgufError(ValueError):
    """The file is not a GGUF file that can be served; the message names the key or tensor and the limit."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor table.

    shape: row-major, outermost first (the file stores it innermost first); the last entry is a row's length.
    offset: bytes from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int
    nbytes: int

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.rows


@dataclass(frozen=True, slots=True)
class Header:
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, TensorInfo]


def parse_header(view: memoryview) -> Header:
    """`view` is the whole file. Raises GgufError, which does not know the file's name."""
    cursor = _Cursor(view)
    tensor_count, pair_count = _read_counts(cursor)
    metadata = _read_metadata(cursor, pair_count)
    tensors = _read_tensors(cursor, tensor_count, _alignment(metadata))
    return Header(metadata, tensors)


# Metadata value types of the file: number -> (struct code, bytes). Strings, bools and arrays have functions.
_NUMBERS = {
    0: ("B", 1),
    1: ("b", 1),
    2: ("H", 2),
    3: ("h", 2),
    4: ("I", 4),
    5: ("i", 4),
    6: ("f", 4),
    10: ("Q", 8),
    11: ("q", 8),
    12: ("d", 8),
}
_BOOL = 7
_STRING = 8
_ARRAY = 9
# The fewest bytes that one element of each array type takes.
_ELEMENT_BYTES = {number: width for number, (_, width) in _NUMBERS.items()} | {_BOOL: 1, _STRING: 8, _ARRAY: 12}

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class _Cursor:
    """A position in the header that never passes its end. `what` is the name that errors give to a field."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.size = len(view)
        self.limit = min(self.size, MAX_HEADER_BYTES)
        self.position = 0
        self.array_elements = 0

    def need(self, count: int, what: str) -> None:
        left = self.limit - self.position
        if count > left:
            if self.limit < self.size:
                raise GgufError(
                    f"{what}: needs {count} bytes at offset {self.position}, "
                    f"beyond the header limit of {MAX_HEADER_BYTES} bytes"
                )
            raise GgufError(f"{what}: needs {count} bytes at offset {self.position}, but the file ends after {left}")

    def u32(self, what: str) -> int:
        self.need(4, what)
        (value,) = _U32.unpack_from(self.view, self.position)
        self.position += 4
        return int(value)

    def u64(self, what: str) -> int:
        self.need(8, what)
        (value,) = _U64.unpack_from(self.view, self.position)
        self.position += 8
        return int(value)

    def string(self, what: str, maximum: int = MAX_STRING_BYTES) -> str:
        length = self.u64(f"{what} length")
        if length > maximum:
            raise GgufError(f"{what}: string of {length} bytes, the limit is {maximum}")
        self.need(length, what)
        end = self.position + length
        try:
            value = str(self.view[self.position : end], "utf-8")
        except UnicodeDecodeError as error:
            raise GgufError(f"{what}: not UTF-8 ({error.reason} at byte {error.start})") from None
        self.position = end
        return value

    def name(self, what: str, maximum: int) -> str:
        value = self.string(what, maximum)
        if not value:
            raise GgufError(f"{what}: empty name")
        return value


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    magic = bytes(cursor.view[: len(MAGIC)])
    if magic != MAGIC:
        raise GgufError(f"not a GGUF file: magic is {magic!r}, expected {MAGIC!r}")
    cursor.position = len(MAGIC)
    version = cursor.u32("version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        hint = " (a big-endian file)" if swapped in VERSIONS else ""
        raise GgufError(f"GGUF version {version} is not served{hint}, expected one of {VERSIONS}")
    tensor_count = cursor.u64("tensor count")
    pair_count = cursor.u64("metadata count")
    for what, count, maximum in (
        ("tensor count", tensor_count, MAX_TENSORS),
        ("metadata count", pair_count, MAX_METADATA),
    ):
        if count > maximum:
            raise GgufError(f"{what} {count} is beyond the limit of {maximum}")
    cursor.need(tensor_count * MIN_TENSOR_BYTES + pair_count * MIN_PAIR_BYTES, "tensor and metadata counts")
    return tensor_count, pair_count


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for index in range(count):
        key = cursor.name(f"metadata key {index}", MAX_KEY_BYTES)
        if key in metadata:
            raise GgufError(f"metadata key {_shorten(key)!r} appears twice")
        what = f"metadata key {_shorten(key)!r}"
        metadata[key] = _read_value(cursor, what, cursor.u32(f"{what} type"), depth=0)
    return metadata


def _shorten(key: str) -> str:
    return key if len(key) <= 100 else f"{key[:100]}..."


def _read_value(cursor: _Cursor, what: str, kind: int, depth: int) -> MetadataValue:
    if kind == _STRING:
        return cursor.string(what)
    if kind == _ARRAY:
        return _read_array(cursor, what, depth + 1)
    return _read_numbers(cursor, what, kind, 1)[0]


def _read_array(cursor: _Cursor, what: str, depth: int) -> tuple[MetadataValue, ...]:
    if depth > MAX_ARRAY_DEPTH:
        raise GgufError(f"{what}: arrays nested deeper than the limit of {MAX_ARRAY_DEPTH}")
    kind = cursor.u32(f"{what} element type")
    count = cursor.u64(f"{what} element count")
    if kind not in _ELEMENT_BYTES:
        raise GgufError(f"{what}: unknown element type {kind}")
    cursor.array_elements += count
    if cursor.array_elements > MAX_ARRAY_ELEMENTS:
        raise GgufError(f"{what}: array of {count} elements; all together may have {MAX_ARRAY_ELEMENTS}")
    cursor.need(count * _ELEMENT_BYTES[kind], f"{what} array of {count} elements")
    if kind == _STRING:
        return _read_strings(cursor, what, count)
    if kind == _ARRAY:
        return tuple(_read_array(cursor, f"{what}[{index}]", depth + 1) for index in range(count))
    return _read_numbers(cursor, what, kind, count)


def _read_numbers(cursor: _Cursor, what: str, kind: int, count: int) -> tuple[MetadataValue, ...]:
    if kind == _BOOL:
        cursor.need(count, what)
        data = bytes(cursor.view[cursor.position : cursor.position + count])
        if data and max(data) > 1:
            raise GgufError(f"{what}: bool with value {max(data)}, expected 0 or 1")
        cursor.position += count
        return tuple(map(bool, data))
    if kind not in _NUMBERS:
        raise GgufError(f"{what}: unknown value type {kind}")
    code, width = _NUMBERS[kind]
    cursor.need(count * width, what)
    values = struct.unpack_from(f"<{count}{code}", cursor.view, cursor.position)
    cursor.position += count * width
    return values


def _read_strings(cursor: _Cursor, what: str, count: int) -> tuple[str, ...]:
    # `_Cursor.string` written out: vocabularies and merge tables have 100,000 strings, and calls dominate.
    view, position, limit = cursor.view, cursor.position, cursor.limit
    unpack = _U64.unpack_from
    strings: list[str] = []
    append = strings.append
    try:
        for _ in range(count):
            start = position + 8
            if start > limit:
                break
            (length,) = unpack(view, position)
            position = start + length
            if length > MAX_STRING_BYTES or position > limit:
                position = start - 8
                break
            append(str(view[start:position], "utf-8"))
    except UnicodeDecodeError:
        position = start - 8
    cursor.position = position
    if len(strings) < count:
        cursor.string(f"{what}[{len(strings)}]")  # reads the offending string again, to raise its error
    return tuple(strings)


def _alignment(metadata: Mapping[str, MetadataValue]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int:
        raise GgufError(f"metadata key 'general.alignment' is of type {type(value).__name__}, expected int")
    if not MIN_ALIGNMENT <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise GgufError(
            f"metadata key 'general.alignment' is {value}, "
            f"expected a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}"
        )
    return value


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    entries: dict[str, TensorInfo] = {}
    for index in range(count):
        name = cursor.name(f"tensor {index} name", MAX_TENSOR_NAME_BYTES)
        if name in entries:
            raise GgufError(f"tensor {name!r} appears twice")
        entries[name] = _read_tensor(cursor, name, alignment)
    # Offsets in the file count from here, and where that is, is known only now.
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {
        name: TensorInfo(name, entry.shape, entry.type, data_start + entry.offset, entry.nbytes)
        for name, entry in entries.items()
    }
    _check_places(tensors, cursor.size)
    return tensors


def _read_tensor(cursor: _Cursor, name: str, alignment: int) -> TensorInfo:
    """One row of the table, its offset still counted from the start of the data."""
    what = f"tensor {name!r}"
    dims_count = cursor.u32(f"{what} dims count")
    if not 1 <= dims_count <= MAX_DIMS:
        raise GgufError(f"{what}: {dims_count} dims, expected 1 to {MAX_DIMS}")
    dims = tuple(cursor.u64(f"{what} dim {index}") for index in range(dims_count))
    type_number = cursor.u32(f"{what} type")
    offset = cursor.u64(f"{what} offset")
    if 0 in dims:
        raise GgufError(f"{what}: dims {dims} contain a zero")
    elements = prod(dims)
    if elements > MAX_ELEMENTS:
        raise GgufError(f"{what}: dims {dims} have {elements} elements, the limit is {MAX_ELEMENTS}")
    if type_number not in BLOCKS:
        label = UNSERVED_TYPES.get(type_number, "unknown")
        served = ", ".join(served.name for served in BLOCKS)
        raise GgufError(f"{what}: type {label} ({type_number}) is not served; served are {served}")
    type_ = GgmlType(type_number)
    block = BLOCKS[type_]
    if dims[0] % block.elements:
        raise GgufError(f"{what}: rows of {dims[0]} are no multiple of {type_.name}'s block {block.elements}")
    if offset % alignment:
        raise GgufError(f"{what}: offset {offset} is not aligned to {alignment}")
    return TensorInfo(name, dims[::-1], type_, offset, elements // block.elements * block.bytes)


def _check_places(tensors: Mapping[str, TensorInfo], size: int) -> None:
    end, before = 0, ""
    for info in sorted(tensors.values(), key=lambda info: info.offset):
        if info.offset + info.nbytes > size:
            raise GgufError(
                f"tensor {info.name!r}: ends at byte {info.offset + info.nbytes}, "
                f"but the file has {size} (is it truncated?)"
            )
        if info.offset < end:
            raise GgufError(f"tensor {info.name!r} overlaps tensor {before!r}")
        end, before = info.offset + info.nbytes, info.name
