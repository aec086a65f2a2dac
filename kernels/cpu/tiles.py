"""Whether the system lets this process use AMX's tiles.

Owns: the request for them. Must not know: what is computed with tiles.
"""

import ctypes
import platform
import sys
from typing import Final

TILE_FLAGS: Final = frozenset(("amx_tile", "amx_int8"))  # as /proc/cpuinfo has them
_ARCH_PRCTL: Final = 158  # the system call's number on x86-64
_REQUEST_PERMISSION: Final = 0x1023
_TILE_DATA: Final = 18


def tiles_granted() -> bool:
    """Asks the kernel for the tiles, for all threads of this process and for good; False where it refuses."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    refused: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return refused == 0
