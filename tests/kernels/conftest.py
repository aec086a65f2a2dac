import os
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from conftest import missing

from kernels.backends import BACKENDS, BackendSettings, load
from kernels.cpu.backend import CpuOps
from kernels.cpu.build import NoCompilerError, cpu_flags, runnable
from kernels.cpu.library import Library, Team, load_library
from kernels.ops import Ops

NATIVE = [f"cpu {isa.name}" for isa in runnable(cpu_flags())]


@pytest.fixture
def threads() -> int:
    return 1


@pytest.fixture(autouse=True)
def torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    yield
    torch.set_num_threads(before)


@cache
def library(isa: str) -> Library:
    return load_library(isa)


# Kernels are decorated either for Triton's interpreter or for the compiler: a process of its own runs these same tests
# for the back end gpu in the interpreter (`test_gpu_interpreted.py`).
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TESTED = ["gpu"] if INTERPRETED else [name for name in BACKENDS if name not in ("cpu", "gpu")] + NATIVE


@pytest.fixture(params=TESTED)
def ops(request: pytest.FixtureRequest, threads: int) -> Iterator[Ops]:
    """Every back end, `cpu` in every instruction set that this machine can run."""
    name, _, isa = request.param.partition(" ")
    if not isa:
        yield load(name, BackendSettings(threads=threads))
        return
    try:
        team = Team(library(isa), threads)
    except NoCompilerError as error:
        missing(str(error))
    yield CpuOps(library(isa), team, "16bit")
    team.close()
