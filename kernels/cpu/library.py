"""The built library and its team of threads, for ctypes.

Owns: loading, the team's life, and the memory that functions work in. Must not know: what a function computes; each
module of this folder binds those that it calls.
"""

import ctypes
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from kernels.cpu.build import AMX, InstructionSet, built_library, cache_directory, choose, cpu_flags, source_digest
from kernels.cpu.tiles import TILE_FLAGS

POINTER: Final = ctypes.c_void_p
INT: Final = ctypes.c_int
LONG: Final = ctypes.c_int64
FLOAT: Final = ctypes.c_float

Native = Any  # a function of the library


@dataclass(frozen=True, slots=True)
class Library:
    """A function of it releases the interpreter while it runs."""

    dll: ctypes.CDLL
    isa: InstructionSet
    digest: str  # of the sources

    def bind(self, name: str, result: Any, *arguments: Any) -> Native:
        function = getattr(self.dll, name)
        function.restype = result
        function.argtypes = arguments
        return function


def load_library(isa: str | None = None, cache: Path | None = None, compiler: str | None = None) -> Library:
    """isa: a name of `build.INSTRUCTION_SETS`, None for the best. Raises ValueError, BuildError, OSError."""
    flags = cpu_flags()
    library = _load(choose(isa, flags), cache, compiler)
    if library.isa is AMX and not library.bind("tercet_tiles_work", INT)():
        if isa is not None:
            raise ValueError(f"this machine grants tiles but cannot run {AMX.name!r}")
        library = _load(choose(None, flags - TILE_FLAGS), cache, compiler)
    return library


def _load(chosen: InstructionSet, cache: Path | None, compiler: str | None) -> Library:
    path = built_library(chosen, cache if cache is not None else cache_directory(os.environ), compiler)
    return Library(ctypes.CDLL(str(path)), chosen, source_digest())


class Team:
    """Threads that the library's functions work with: the one that calls, and helpers, which end with this object."""

    def __init__(self, library: Library, threads: int, cores: Sequence[int] = ()) -> None:
        """cores: to pin thread i to cores[i]; empty: the system places them. Raises OSError."""
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        make = library.bind("tercet_team_new", POINTER, INT, POINTER, INT)
        self.threads = threads
        self.handle: int = make(threads, (INT * len(cores))(*cores), len(cores))
        if not self.handle:
            raise OSError(f"{threads} threads cannot be made")
        delete = library.bind("tercet_team_delete", None, POINTER)
        self._end = weakref.finalize(self, delete, self.handle)

    def close(self) -> None:
        self._end()


class Workspace:
    """Memory that calls use one after the other. It grows to the largest of them and is kept."""

    ALIGNMENT: Final = 64

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def room(self, size: int) -> int:
        """The address of `size` bytes, aligned. What an earlier call was given is no longer its own."""
        if self._buffer.shape[0] < size + self.ALIGNMENT:
            self._buffer = torch.empty(size + self.ALIGNMENT, dtype=torch.uint8)
        return -(-self._buffer.data_ptr() // self.ALIGNMENT) * self.ALIGNMENT
