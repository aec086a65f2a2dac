"""Opens GGUF files over mmap, with the standard library alone (the text edge reads metadata without torch).

Owns: the mapping, and typed access to metadata. Must not know: what a key or a tensor means to a model, how
blocks decode (`executor.quant.ggml`).
Invariant: a file that `open_gguf` accepts is whole. Every tensor's bytes lie inside the file, at an aligned
offset, have the length that its shape and type imply, and overlap no other tensor's; every string is UTF-8.
"""

import contextlib
import mmap
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self, TypeVar

from executor.loading.ggml_types import BLOCKS, Block, GgmlType
from executor.loading.gguf_header import MAGIC, GgufError, Header, MetadataValue, TensorInfo, parse_header

__all__ = [
    "BLOCKS",
    "Block",
    "GgmlType",
    "GgufError",
    "GgufFile",
    "MetadataValue",
    "TensorInfo",
    "find",
    "open_gguf",
    "require",
    "require_array",
]

Scalar = TypeVar("Scalar", str, int, float, bool)


class GgufFile:
    """An open file. Usable as a context manager; made by `open_gguf`."""

    def __init__(self, path: Path, mapping: mmap.mmap, header: Header) -> None:
        self.path = path
        self.size = len(mapping)
        self.metadata: Mapping[str, MetadataValue] = MappingProxyType(header.metadata)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(header.tensors)
        self._mapping = mapping
        self._view = memoryview(mapping)

    def raw(self, name: str) -> memoryview:
        """A read-only view of exactly the tensor's bytes, without a copy.

        Raises GgufError if the file has no such tensor, ValueError if it is closed.
        """
        info = self.tensors.get(name)
        if info is None:
            raise GgufError(f"{self.path}: tensor {name!r} is missing")
        return self._view[info.offset : info.offset + info.nbytes]

    def close(self) -> None:
        """Idempotent. Views that were handed out stay valid: the mapping goes when the last of them does."""
        self._view.release()
        with contextlib.suppress(BufferError):  # a view is still in use somewhere; its end unmaps the file
            self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_gguf(path: Path) -> GgufFile:
    """Map the file, read its header and check every tensor's place.

    Raises GgufError (naming the file and what is wrong in it), or OSError if it cannot be opened or mapped.
    """
    mapping = _map(path)
    try:
        with memoryview(mapping) as view:
            header = parse_header(view)
        return GgufFile(path, mapping, header)
    except GgufError as error:
        mapping.close()
        raise GgufError(f"{path}: {error}") from None
    except BaseException:
        mapping.close()
        raise


def require(metadata: Mapping[str, MetadataValue], key: str, kind: type[Scalar]) -> Scalar:
    """The value of `key`, which must be there and be exactly a `kind` (a bool is no int). Raises GgufError."""
    if key not in metadata:
        raise GgufError(f"metadata key {key!r} is missing")
    value = metadata[key]
    if type(value) is not kind:
        raise GgufError(f"metadata key {key!r} is of type {type(value).__name__}, expected {kind.__name__}")
    return value


def find(metadata: Mapping[str, MetadataValue], key: str, kind: type[Scalar]) -> Scalar | None:
    """Like `require`, but None if the key is absent. A value of another type still raises GgufError."""
    return require(metadata, key, kind) if key in metadata else None


def require_array(metadata: Mapping[str, MetadataValue], key: str, kind: type[Scalar]) -> tuple[Scalar, ...]:
    """The array at `key`, each of whose elements must be exactly a `kind`. Raises GgufError."""
    if key not in metadata:
        raise GgufError(f"metadata key {key!r} is missing")
    value = metadata[key]
    if not isinstance(value, tuple):
        raise GgufError(f"metadata key {key!r} is of type {type(value).__name__}, expected an array")
    elements: list[Scalar] = []
    for index, element in enumerate(value):
        if type(element) is not kind:
            raise GgufError(
                f"metadata key {key!r}[{index}] is of type {type(element).__name__}, expected {kind.__name__}"
            )
        elements.append(element)
    return tuple(elements)


def _map(path: Path) -> mmap.mmap:
    # O_NONBLOCK: opening a FIFO must not wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise GgufError(f"{path}: not a regular file")
        if status.st_size < len(MAGIC):
            raise GgufError(f"{path}: {status.st_size} bytes are too few for a GGUF file")
        return mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
