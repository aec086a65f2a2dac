"""A request's tokens depend on the request alone: neighbours, chunks, preemption and depth change nothing.

The real engine and core drive a real runner in one process, without sockets in between.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, NoOpTracer
from tiny_model import write_tiny_model

from executor.loading.load import load_runner
from executor.runner import Runner
from executor.step import SamplingParams
from services.callers import Caller
from services.scheduler.core.calls import CoreConfig, LaneSpec, Limits
from services.scheduler.core.core import SchedulerCore
from services.scheduler.engine import Engine, EngineConfig
from services.scheduler.intake import Admission, Begun, ServedModel
from services.scheduler.live import LiveAnswer, LiveRequest
from services.scheduler.observer import Silent

GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(
    temperature=0.9, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1, seed=1234
)


@dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    sampling: SamplingParams
    tokens: (
        int | None
    )  # None: to the end of the context. Admission can't count on that, so a small pool makes collisions
    n: int = 1


WHOLE = CoreConfig(prefill_chunk=4096)


@dataclass(frozen=True)
class Way:
    """How the same work is scheduled."""

    core: CoreConfig = WHOLE
    blocks: int = 4096
    context: int = 4096
    together: bool = True


ALONE = Way(together=False)
HOPEFUL = CoreConfig(prefill_chunk=16, watermark=0.0, default_output_estimate=1)  # admits what will not fit
WAYS = {
    "batch": Way(),
    "chunk 16": Way(CoreConfig(prefill_chunk=16)),
    "one step in flight": Way(CoreConfig(prefill_chunk=7, steps_in_flight=1)),
}


async def run(runner: Runner, jobs: Sequence[Job], way: Way) -> tuple[list[list[int]], int]:
    """Output ids of each job, and how often one of them was preempted."""
    groups = [jobs] if way.together else [[job] for job in jobs]
    outputs: list[list[int]] = []
    preemptions = 0
    for group in groups:
        done = await _run_together(runner, group, way)
        outputs += [answer.ids[len(live.admission.prompt_ids) :] for live, _ in done for answer in live.answers]
        preemptions += sum(times for _, times in done)
    return outputs, preemptions


class Counting(Silent):
    def __init__(self) -> None:
        self.preemptions: dict[str, int] = {}

    def preempted(self, answer: LiveAnswer, why: str) -> None:
        self.preemptions[answer.key] = self.preemptions.get(answer.key, 0) + 1


async def _run_together(runner: Runner, jobs: Sequence[Job], way: Way) -> list[tuple[LiveRequest, int]]:
    capacity = runner.capacity
    runner.reset()
    counting = Counting()
    engine = Engine(SchedulerCore(way.core), EngineConfig(), NoOpTracer(), counting)
    spec = LaneSpec(
        capacity.block_size,
        min(way.blocks, capacity.total_blocks),
        capacity.max_batched_tokens,
        capacity.max_sequences,
        min(way.context, capacity.max_model_len),
    )
    engine.attach("lane", spec, ServedModel(capacity.vocab_size, spec.max_model_len, (), "numerics"))
    lives = []
    for index, job in enumerate(jobs):
        caller = Caller("tenant", f"r{index}", 1, 0)
        answers = (Begun(),) * job.n
        admission = Admission(caller, job.prompt, job.sampling, job.tokens, Limits(), Limits(), answers)
        lives.append(engine.submit(admission, INVALID_SPAN, Context()))
    in_flight: deque[object] = deque()
    while engine.live_requests() or in_flight:
        filled = engine.plan("lane")
        if filled is not None:
            in_flight.append(filled.step)
        elif in_flight:
            engine.apply("lane", runner.run(in_flight.popleft()))  # type: ignore[arg-type]
        else:
            raise AssertionError("nothing is planned and nothing is in flight")
        await asyncio.sleep(0)
    return [(live, sum(counting.preemptions.get(answer.key, 0) for answer in live.answers)) for live in lives]


def jobs_of(prompts: Sequence[Sequence[int]], tokens: int | None) -> list[Job]:
    """Every second one greedy, the others drawn with penalties, each with a seed of its own."""
    return [
        Job(tuple(prompt), GREEDY if index % 2 else replace(DRAWN, seed=index), tokens)
        for index, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module", params=["reference", "cpu"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    path = write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    return load_runner(
        path, backend=request.param, block_size=4, total_blocks=512, max_batched_tokens=128, max_sequences=16
    )


@pytest.mark.parametrize("name", WAYS)
async def test_tokens_do_not_depend_on_the_schedule(tiny: Runner, name: str) -> None:
    jobs = jobs_of([[(7 * one + index) % 256 for one in range(11 + 9 * index)] for index in range(8)], 24)
    alone, _ = await run(tiny, jobs, ALONE)
    assert (await run(tiny, jobs, WAYS[name]))[0] == alone


@pytest.mark.parametrize("depth", [1, 2])
async def test_tokens_survive_preemption(tiny: Runner, depth: int) -> None:
    jobs = jobs_of([[(7 * one + index) % 256 for one in range(9 + 5 * index)] for index in range(8)], None)
    alone, _ = await run(tiny, jobs, replace(ALONE, context=64))
    way = Way(replace(HOPEFUL, steps_in_flight=depth), blocks=40, context=64)
    outputs, preemptions = await run(tiny, jobs, way)
    assert preemptions > 0
    assert outputs == alone


@pytest.mark.parametrize("blocks", [512, 40])
async def test_n_answers_are_n_single_ones_by_choice(tiny: Runner, blocks: int) -> None:
    prompt = tuple((7 * one) % 256 for one in range(23))
    single = [Job(prompt, replace(DRAWN, choice=index), None) for index in range(6)]
    alone, _ = await run(tiny, single, replace(ALONE, context=64))
    assert len({tuple(output) for output in alone}) == 6
    together, preemptions = await run(tiny, [Job(prompt, DRAWN, None, n=6)], Way(HOPEFUL, blocks=blocks, context=64))
    assert together == alone
    assert (preemptions > 0) == (blocks == 40)


@pytest.mark.model
@pytest.mark.timeout(300)
async def test_the_real_model_in_a_batch_in_chunks_and_preempted(default_model_path: Path) -> None:
    runner = load_runner(
        default_model_path,
        backend="reference",
        block_size=4,
        total_blocks=256,
        max_batched_tokens=128,
        max_sequences=8,
        max_model_len=128,
    )
    many = jobs_of([[(31 * one + 97 * index) % 40000 + 5 for one in range(17 + index % 2)] for index in range(8)], 2)
    alone, _ = await run(runner, many, ALONE)
    assert (await run(runner, many, WAYS["chunk 16"]))[0] == alone
    few = jobs_of([[(31 * one + 97 * index) % 40000 + 5 for one in range(9 + index)] for index in range(3)], None)
    alone, _ = await run(runner, few, replace(ALONE, context=16))
    outputs, preemptions = await run(runner, few, Way(HOPEFUL, blocks=10, context=16))
    assert preemptions > 0
    assert outputs == alone
