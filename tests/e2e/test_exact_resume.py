"""Real kernels: answers that lose their executor, and then their scheduler, are token for token what they were.

Seeded draws, penalties over prompt and output, min_tokens and stop ids: all know where the output begins.
"""

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, NoOpTracer
from tiny_model import write_tiny_model

from executor.loading.load import load_runner
from executor.runner import Runner
from executor.step import SamplingParams, Step
from services.callers import Caller
from services.scheduler.core.calls import CoreConfig, LaneSpec, Limits
from services.scheduler.core.core import SchedulerCore
from services.scheduler.engine import Engine, EngineConfig
from services.scheduler.intake import Admission, Begun, ServedModel
from services.scheduler.live import LiveRequest
from services.scheduler.observer import Silent

DRAWN = SamplingParams(
    temperature=0.9,
    top_p=0.95,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.1,
    min_tokens=12,
    stop_token_ids=tuple(range(0, 256, 8)),
)
COUNT = 30
Job = tuple[tuple[int, ...], SamplingParams]


@pytest.fixture(scope="module", params=["reference", "cpu"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    path = write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    return load_runner(
        path, backend=request.param, block_size=4, total_blocks=256, max_batched_tokens=96, max_sequences=16
    )


def jobs() -> list[Job]:
    prompts = [tuple((7 * one + index) % 256 for one in range(9 + 5 * index)) for index in range(6)]
    return [
        (prompt, replace(DRAWN, seed=index) if index % 2 else SamplingParams(temperature=0.0, min_tokens=12))
        for index, prompt in enumerate(prompts)
    ]


async def outputs(
    runner: Runner, work: Sequence[Job], begun: Sequence[Sequence[int]], *, losses: int = 0, until: int = 10**9
) -> list[list[int]]:
    """Output ids of each, `begun` included. losses: how often the executor goes, with its pool and what is in flight.
    until: tokens that are drawn before the scheduler dies."""
    capacity, chance = runner.capacity, random.Random(losses)
    engine = Engine(
        SchedulerCore(CoreConfig(prefill_chunk=16)), EngineConfig(losses_in_a_row=99), NoOpTracer(), Silent()
    )
    spec = LaneSpec(
        capacity.block_size,
        capacity.total_blocks,
        capacity.max_batched_tokens,
        capacity.max_sequences,
        capacity.max_model_len,
    )
    model = ServedModel(capacity.vocab_size, capacity.max_model_len, (), "numerics")
    runner.reset()
    engine.attach("lane0", spec, model)
    lives: list[LiveRequest] = []
    for number, ((prompt, sampling), output) in enumerate(zip(work, begun, strict=True)):
        caller = Caller("tenant", f"r{number}", 2, 0)
        admission = Admission(caller, prompt, sampling, COUNT, Limits(), Limits(), (Begun(tuple(output)),))
        lives.append(engine.submit(admission, INVALID_SPAN, Context()))
    left = sorted(chance.sample(range(2, 40), losses))
    in_flight: deque[Step] = deque()
    lane, steps = 0, 0
    while (engine.live_requests() or in_flight) and sum(live.output_tokens for live in lives) < until:
        filled = engine.plan(f"lane{lane}")
        if filled is not None:
            in_flight.append(filled.step)
        else:
            assert in_flight, "nothing is planned and nothing is in flight"
            engine.apply(f"lane{lane}", runner.run(in_flight.popleft()))
            steps += 1
        if left and steps >= left[0]:
            del left[0]
            engine.lose(f"lane{lane}")
            in_flight.clear()
            runner.reset()
            lane += 1
            engine.attach(f"lane{lane}", spec, model)
        await asyncio.sleep(0)
    return [live.answers[0].ids[len(live.admission.prompt_ids) :] for live in lives]


async def test_lost_executors_and_schedulers_change_no_token(tiny: Runner) -> None:
    work = jobs()
    whole = await outputs(tiny, work, [[]] * len(work))
    assert any(len(output) < COUNT for output in whole), "no answer ended by a stop id"
    assert await outputs(tiny, work, [[]] * len(work), losses=8) == whole
    begun: list[list[int]] = [[] for _ in work]
    for dies_after in (15, 60, 100):  # tokens of all, the resumed ones included
        begun = await outputs(tiny, work, begun, losses=2, until=dies_after)
        assert begun != whole
        assert all(output == full[: len(output)] for output, full in zip(begun, whole, strict=True))
    assert await outputs(tiny, work, begun) == whole
