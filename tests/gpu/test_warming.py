"""After the warm-up no step needs code that is not there: counted with an H200's tiles, and nothing launched."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_model import TinySpec, write_tiny_model

from executor.loading import load
from executor.runner import Runner
from executor.step import NewSequence, SamplingParams, Slice, Step
from kernels.backends import BackendSettings
from kernels.gpu.backend import GpuOps
from kernels.gpu.launch import Launch
from kernels.gpu.target import Target
from kernels.gpu.variants import Variants
from kernels.ops import Ops

BLOCKS = 400
# Wide enough that few rows give the segments of a product to programs of their own.
SPEC = TinySpec(layers=1, hidden=1152, inner=1280, heads=18, kv_heads=2, context=2000)


def hollow(launch: Launch) -> None:
    """In place of a kernel: what the host reads is a number, all else is whatever lies there."""
    for name in ("token_ids", "highest", "top_ids"):
        if name in launch.arguments:
            launch.arguments[name].zero_()
    if "results" in launch.arguments:
        launch.arguments["results"].copy_(torch.tensor([0, 1, 0, 0]))  # no fault, and a mass


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, Variants]:
    variants = Variants(hollow)
    with pytest.MonkeyPatch.context() as patch:

        def backend(_name: str, _settings: BackendSettings) -> Ops:
            return GpuOps(Target(torch.device("cpu"), 90, 132, torch.bfloat16, variants))

        patch.setattr(load, "load_backend", backend)
        path = write_tiny_model(tmp_path_factory.mktemp("warm") / "m.gguf", SPEC)
        runner = load.load_runner(
            path, backend="gpu", block_size=16, total_blocks=BLOCKS, max_batched_tokens=256, max_sequences=96
        )
    runner.warm_up()
    return runner, variants


DRAWS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.3]),
    top_k=st.integers(0, 20),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 3),
    logit_bias=st.sampled_from([(), ((3, 1.0),)]),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.lists(st.integers(1, 120), min_size=1, max_size=90), past=st.integers(0, 100), draw=DRAWS)
def test_no_step_compiles(warm: tuple[Runner, Variants], counts: list[int], past: int, draw: SamplingParams) -> None:
    runner, variants = warm
    slices: list[Slice] = []
    left, block = 256, 0
    for slot, count in enumerate(counts):
        start = 0 if draw.prompt_logprobs is not None else 16 * past if slot == 0 else 0
        needed = -(-(start + count) // 16)
        if count > left or block + needed > BLOCKS:
            break
        new = NewSequence(draw, start + count, (1,) * start)
        slices.append(Slice(slot, start, count, (1,) * count, tuple(range(block, block + needed)), True, new))
        left, block = left - count, block + needed
    runner.run(Step(1, tuple(slices)))
    runner.reset()
    assert (variants.late, runner.late_kernels()) == ([], 0)


def test_what_is_not_warm_is_seen(warm: tuple[Runner, Variants], caplog: pytest.LogCaptureFixture) -> None:
    """The count is no idle one: a launch of another form is told."""
    _, variants = warm
    ops = GpuOps(Target(torch.device("cpu"), 90, 132, torch.bfloat16, variants))
    ops.silu_mul(torch.zeros(3, 10))
    assert (variants.late, ops.late()) == (["silu_mul_kernel"], 1)
    variants.late.clear()
    assert "silu_mul_kernel is compiled late" in caplog.text
