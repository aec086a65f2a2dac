"""The scheduler's engine and a real model in one process, step by step: what the benchmarks of batching stand on.

No network and no other process: so batches are formed alike in every run, and steps can be counted. As when serving, up
to two steps are planned ahead.
"""

import os
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, NoOpTracer

from executor.loading.load import load_runner
from executor.runner import Runner
from executor.step import SamplingParams
from services.callers import Caller
from services.catalogue import cache_directory, model_hash, resolve
from services.scheduler.core.calls import CoreConfig, LaneSpec, Limits
from services.scheduler.core.core import SchedulerCore
from services.scheduler.engine import Engine, EngineConfig
from services.scheduler.intake import Admission, CacheUse, ServedModel
from services.scheduler.live import FilledStep, LiveRequest
from services.scheduler.observer import Silent

LANE: Final = "lane"
BLOCK: Final = 16


def load(model: str, backend: str, threads: int | None, *, context: int, batched: int, sequences: int) -> Runner:
    """With a pool in which `sequences` of `context` tokens fit, warmed up."""
    path = resolve(model, cache_directory(os.environ)).path
    runner = load_runner(
        path,
        backend=backend,
        block_size=BLOCK,
        total_blocks=sequences * (context // BLOCK + 2),
        max_batched_tokens=batched,
        max_sequences=sequences,
        max_model_len=context,
        threads=threads,
        model_hash=model_hash(path),
    )
    runner.warm_up()
    return runner


@dataclass(slots=True)
class Asked:
    """submitted: seconds; steps: applied before it came. tokens: when each came, and with the how-manieth step."""

    live: LiveRequest
    submitted: float
    steps: int
    tokens: list[tuple[float, int]] = field(default_factory=list)

    def latency(self, count: int) -> float:
        """Seconds from its coming to its `count`-th token."""
        return self.tokens[count - 1][0] - self.submitted


class Lane:
    """A fresh scheduler over `runner`, whose pool is emptied."""

    def __init__(self, runner: Runner, core: CoreConfig) -> None:
        capacity = runner.capacity
        runner.reset()
        self._runner = runner
        self._engine = Engine(SchedulerCore(core), EngineConfig(stream_buffer_tokens=1 << 30), NoOpTracer(), Silent())
        self._engine.attach(
            LANE,
            LaneSpec(
                capacity.block_size,
                capacity.total_blocks,
                capacity.max_batched_tokens,
                capacity.max_sequences,
                capacity.max_model_len,
            ),
            ServedModel(capacity.vocab_size, capacity.max_model_len, (), runner.numerics),
        )
        self._in_flight: deque[FilledStep] = deque()
        self.asked: list[Asked] = []
        self.steps = 0
        self.tokens: list[int] = []  # computed, of each step

    def submit(self, prompt: Sequence[int], max_tokens: int) -> Asked:
        """Greedy; nothing ends it before `max_tokens`."""
        admission = Admission(
            Caller("bench", f"r{len(self.asked)}", 1, 0),
            tuple(prompt),
            SamplingParams(temperature=0.0),
            max_tokens,
            Limits(),
            Limits(),
            cache=CacheUse(bypass=True),
        )
        live = self._engine.submit(admission, INVALID_SPAN, Context())
        self.asked.append(Asked(live, time.monotonic(), self.steps))
        return self.asked[-1]

    def step(self) -> bool:
        """Plans what can be planned, and runs the first step in flight; False: there is nothing to do."""
        self.plan()
        if not self._in_flight:
            return False
        filled = self._in_flight.popleft()
        self._engine.apply(LANE, self._runner.run(filled.step))
        self.steps += 1
        self.tokens.append(filled.tokens)
        now = time.monotonic()
        for one in self.asked:
            one.tokens += [(now, self.steps)] * (one.live.output_tokens - len(one.tokens))
        return True

    def plan(self) -> None:
        while (filled := self._engine.plan(LANE)) is not None:
            self._in_flight.append(filled)

    def run(self) -> None:
        """To the end of all that was asked."""
        while self.step():
            pass


def prompt(length: int, seed: int, vocab_size: int) -> list[int]:
    """Ids from the upper part of the vocabulary: control tokens and single bytes come first in it."""
    source = random.Random(seed)
    return [source.randrange(vocab_size // 4, vocab_size) for _ in range(length)]
