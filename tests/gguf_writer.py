"""Writes small GGUF files for tests, valid ones and, field by field, invalid ones."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from executor.loading.ggml_types import BLOCKS, GgmlType

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}


@dataclass(frozen=True, slots=True)
class Typed:
    """A metadata value whose type in the file is chosen; of an array, `element` chooses its elements' type."""

    kind: int
    value: Any
    element: int | None = None


@dataclass(frozen=True, slots=True)
class Tensor:
    """shape is row-major. `offset`, `type` and `dims` are written as they are, so they can lie."""

    name: str
    shape: tuple[int, ...]
    type: int
    data: bytes
    offset: int | None = None


def zeros(name: str, shape: tuple[int, ...], type: GgmlType) -> Tensor:
    """A valid tensor of zero bytes."""
    count = 1
    for size in shape:
        count *= size
    block = BLOCKS[type]
    return Tensor(name, shape, int(type), bytes(count // block.elements * block.bytes))


def string(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def kind_of(value: Any) -> int:
    match value:
        case Typed():
            return value.kind
        case bool():
            return BOOL
        case str() | bytes():
            return STRING
        case float():
            return F32
        case int():
            return U32 if 0 <= value < 1 << 32 else I64 if value < 1 << 63 else U64
        case list() | tuple():
            return ARRAY
    raise TypeError(type(value).__name__)


def encode(value: Any, kind: int, element: int | None = None) -> bytes:
    """The value's bytes, without its type."""
    if isinstance(value, Typed):
        return encode(value.value, value.kind, value.element)
    if kind == STRING:
        return string(value)
    if kind == ARRAY:
        if element is None:
            element = kind_of(value[0]) if value else U32
        return struct.pack("<IQ", element, len(value)) + b"".join(encode(item, element) for item in value)
    return struct.pack(f"<{_CODES[kind]}", value)


def pair(key: str | bytes, value: Any) -> bytes:
    kind = kind_of(value)
    return string(key) + struct.pack("<I", kind) + encode(value, kind)


def tensor_row(tensor: Tensor, offset: int) -> bytes:
    dims = tensor.shape[::-1]
    return (
        string(tensor.name)
        + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        + struct.pack("<IQ", tensor.type, offset if tensor.offset is None else tensor.offset)
    )


def gguf_bytes(
    metadata: Mapping[str, Any] | Sequence[tuple[str, Any]] = (),
    tensors: Sequence[Tensor] = (),
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """A whole file. A sequence of pairs may name a key twice. `alignment` lays tensors out; it writes no key."""
    pairs = list(metadata.items()) if isinstance(metadata, Mapping) else list(metadata)
    data = b""
    rows = b""
    for tensor in tensors:
        rows += tensor_row(tensor, len(data))
        data += tensor.data + bytes(-len(tensor.data) % alignment)
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs))
    header += b"".join(pair(key, value) for key, value in pairs) + rows
    return header + bytes(-len(header) % alignment) + data
