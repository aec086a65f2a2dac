"""Runs a module as a child that ends when its parent does: `python -m services.child PARENT_PID MODULE ARGS...`.

A supervisor that is killed can't end its children; the kernel can (prctl PR_SET_PDEATHSIG, Linux). Elsewhere the module
just runs.
"""

import ctypes
import os
import runpy
import signal
import sys
from typing import Final

PR_SET_PDEATHSIG: Final = 1


def die_with(parent: int) -> None:
    """SIGTERM to this process when the thread that started it ends. If that has happened already, exit now."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(0)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    module = sys.argv[2]
    del sys.argv[:2]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
