"""Kernels are decorated for the interpreter or for the compiler, when they are imported: `interpreted` has a process of
its own, which `test_interpreter.py` starts."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted/*"]
