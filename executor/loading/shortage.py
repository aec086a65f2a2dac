"""When memory runs out at the start: which line of the plan it was, and what to change.

Owns: the recognition of it, whoever refuses the memory. Must not know: where it is asked for, which device it is of.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from executor.cache import MemoryPlanError
from executor.sizing.plan import Line, MemoryTable

WEIGHTS: Final = "weights"
TEMPORARIES: Final = "temporaries"
POOL: Final = "KV pool"
_CPU_ALLOCATOR: Final = "DefaultCPUAllocator"


def start_table(weights: int, temporaries: int, pool: int) -> MemoryTable:
    """Bytes of what an executor allocates, in that order."""
    return MemoryTable(
        (
            Line(WEIGHTS, weights, "--weights with fewer bits, or a smaller model"),
            Line(TEMPORARIES, temporaries, "lower --max-batched-tokens, --max-sequences or --max-model-len"),
            Line(POOL, pool, "lower --kv-memory-mib or --total-blocks"),
        )
    )


def check_free(table: MemoryTable, free: int | None) -> None:
    """Raises MemoryPlanError naming the first line, in the order of allocation, that `free` bytes do not hold. None:
    nobody can say, and the allocations will."""
    if free is None:
        return
    taken = 0
    for line in table.lines:
        taken += line.bytes
        if taken > free:
            raise MemoryPlanError(table.shortage(free, at=line.name))


@contextmanager
def naming(table: MemoryTable, line: str) -> Iterator[None]:
    """Raises MemoryPlanError naming the line in place of whatever says that there is no memory; other errors pass."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        raise MemoryPlanError(table.shortage(at=line)) from error


def is_shortage(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or _CPU_ALLOCATOR in str(error)
