"""The plan is held against what is free before it is carried out, and the line to change is named."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_model import write_tiny_model

from executor.cache import MemoryPlanError
from executor.loading import load
from executor.loading.shortage import check_free, start_table
from executor.runner import Runner
from executor.sizing.devices import GIB
from kernels.backends import BackendSettings
from kernels.gpu.backend import GpuOps
from kernels.gpu.launches import META
from kernels.gpu.target import Target
from kernels.ops import Ops
from kernels.vectorised.backend import VectorisedOps

TABLE = start_table(weights=3 * GIB, temporaries=GIB, pool=2 * GIB)


@pytest.mark.parametrize(
    ("free", "line", "change"),
    [
        (3 * GIB - 1, "weights", "--weights with fewer bits"),
        (4 * GIB - 1, "temporaries", "lower --max-batched-tokens"),
        (6 * GIB - 1, "KV pool", "lower --kv-memory-mib"),
    ],
)
def test_the_line_that_does_not_fit_is_named(free: int, line: str, change: str) -> None:
    with pytest.raises(MemoryPlanError, match=f"GiB are there, the plan takes 6.00 GiB .* is '{line}': {change}"):
        check_free(TABLE, free)


@pytest.mark.parametrize("free", [None, 6 * GIB])
def test_what_fits_and_what_nobody_knows_pass(free: int | None) -> None:
    check_free(TABLE, free)


class Measured(VectorisedOps):
    """free: what is free at each question, in order."""

    def __init__(self, free: list[int]) -> None:
        super().__init__()
        self.free = free

    def free_memory(self) -> int:
        return self.free.pop(0)


def load_with(monkeypatch: pytest.MonkeyPatch, path: Path, free: list[int]) -> Runner:
    def backend(_name: str, _settings: BackendSettings) -> Ops:
        return Measured(free)

    monkeypatch.setattr(load, "load_backend", backend)
    return load.load_runner(
        path, backend="cpu-torch", block_size=8, total_blocks=32, max_batched_tokens=64, max_sequences=4
    )


def test_it_is_asked_before_the_weights_and_again_behind_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_model(tmp_path / "m.gguf")
    runner = load_with(monkeypatch, path, [GIB, GIB])
    beside = runner.memory.temporary_bytes + runner.memory.pool_bytes
    load_with(monkeypatch, path, [GIB, beside])
    with pytest.raises(MemoryPlanError, match="the line to change is 'KV pool'"):
        load_with(monkeypatch, path, [GIB, beside - 1])
    read: list[object] = []
    monkeypatch.setitem(load.SCHEMES, "native", lambda *given: read.append(given))  # type: ignore[arg-type]
    with pytest.raises(MemoryPlanError, match="the line to change is 'weights'"):
        load_with(monkeypatch, path, [1000])
    assert read == []


def test_a_gpu_has_what_the_driver_says_and_what_torch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(value: object) -> Callable[[torch.device], object]:
        return lambda device: value if device.type == "cuda" else pytest.fail("asked of no GPU")

    monkeypatch.setattr(torch.cuda, "mem_get_info", answer((7 * GIB, 139 * GIB)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", answer(3 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", answer(2 * GIB))
    assert GpuOps(Target(torch.device("cuda", 0), 90, 132, torch.bfloat16)).free_memory() == 8 * GIB
    assert GpuOps(Target(META, 90, 132, torch.bfloat16)).free_memory() is None
