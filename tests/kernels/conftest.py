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

ISAS = [isa.name for isa in runnable(cpu_flags())]
NATIVE = [*(f"cpu {isa} 16bit" for isa in ISAS), f"cpu {ISAS[0]} 8bit"]


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
    name, *native = request.param.split()
    if not native:
        yield load(name, BackendSettings(threads=threads))
        return
    isa, activations = native
    try:
        team = Team(library(isa), threads)
    except NoCompilerError as error:
        missing(str(error))
    yield CpuOps(library(isa), team, activations)
    team.close()
