"""Engine, core and runners in one thread without sockets: what a test of the prefix cache needs of the chain.

A step reaches its runner when its result is taken, in order, so until then nothing of it is in the pages.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, NoOpTracer

from executor.step import Capacity, SamplingParams, Step, StepResult
from services.callers import Caller
from services.scheduler.core.calls import CoreConfig, LaneSpec, Limits, Usage
from services.scheduler.core.core import SchedulerCore
from services.scheduler.engine import Engine, EngineConfig
from services.scheduler.intake import Admission, Begun, CacheUse, ServedModel
from services.scheduler.live import LiveRequest
from services.scheduler.observer import Silent
from services.scheduler.outbox import Drawn, Ended
from services.scheduler.prefixes import PrefixConfig

GREEDY = SamplingParams(temperature=0.0)


class StepRunner(Protocol):
    @property
    def capacity(self) -> Capacity: ...

    def run(self, step: Step) -> StepResult: ...

    def reset(self) -> None: ...


def spec_of(capacity: Capacity) -> LaneSpec:
    return LaneSpec(
        capacity.block_size,
        capacity.total_blocks,
        capacity.max_batched_tokens,
        capacity.max_sequences,
        capacity.max_model_len,
    )


@dataclass
class Lane:
    runner: StepRunner
    in_flight: deque[Step] = field(default_factory=deque)
    planned_tokens: int = 0


class Driver:
    """cache: whether prefixes are cached. clock: what `now` says, moved by tests."""

    def __init__(self, core: CoreConfig = CoreConfig(), *, cache: bool = True) -> None:
        self.now = 0
        self.core = SchedulerCore(core)
        config = EngineConfig(prefix=PrefixConfig(enabled=cache))
        self.engine = Engine(self.core, config, NoOpTracer(), Silent(), lambda: self.now)
        self.lanes: dict[str, Lane] = {}
        self.requests: list[LiveRequest] = []

    def attach(self, lane: str, runner: StepRunner) -> None:
        runner.reset()
        self.lanes[lane] = Lane(runner)
        capacity = runner.capacity
        self.engine.attach(
            lane, spec_of(capacity), ServedModel(capacity.vocab_size, capacity.max_model_len, (), "numerics"), lane
        )

    def lose(self, lane: str) -> None:
        del self.lanes[lane]
        self.engine.lose(lane)

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int | None = 4,
        *,
        tenant: str = "tenant",
        cache: CacheUse = CacheUse(),
        sampling: SamplingParams = GREEDY,
        output: Sequence[int] = (),
        priority: int = 0,
    ) -> LiveRequest:
        caller = Caller(tenant, f"r{len(self.requests)}", 1, priority)
        admission = Admission(
            caller, tuple(prompt), sampling, max_tokens, Limits(), Limits(), (Begun(tuple(output)),), cache=cache
        )
        live = self.engine.submit(admission, INVALID_SPAN, Context())
        self.requests.append(live)
        return live

    def plan(self, lane: str) -> Step | None:
        filled = self.engine.plan(lane)
        if filled is None:
            return None
        self.lanes[lane].in_flight.append(filled.step)
        self.lanes[lane].planned_tokens += filled.tokens
        return filled.step

    def apply(self, lane: str) -> StepResult:
        at = self.lanes[lane]
        result = at.runner.run(at.in_flight.popleft())
        self.engine.apply(lane, result)
        return result

    def round(self) -> bool:
        """Every lane sends what it can and takes one result. False: there was nothing to do."""
        busy = False
        for lane, at in self.lanes.items():
            while self.plan(lane) is not None:
                self.core.check()
            if at.in_flight:
                busy = True
                self.apply(lane)
                self.core.check()
        return busy

    def drain(self, rounds: int = 500) -> None:
        for _ in range(rounds):
            if not self.round():
                break
        assert not self.engine.live_requests(), "requests that never end"
        for lane in self.core.load().lanes.values():
            assert (lane.blocks_live, lane.blocks_fenced) == (0, 0)
            assert lane.blocks_free + lane.blocks_cached == lane.blocks_total

    def answer(self, prompt: Sequence[int], max_tokens: int | None = 4, **rest: object) -> tuple[list[int], Usage]:
        """One request alone, to its end."""
        live = self.submit(prompt, max_tokens, **rest)  # type: ignore[arg-type]
        self.drain()
        return output_of(live), usage_of(live)

    @property
    def planned_tokens(self) -> int:
        return self.core.totals().planned_tokens


def output_of(live: LiveRequest) -> list[int]:
    return live.answers[0].ids[len(live.admission.prompt_ids) :]


def usage_of(live: LiveRequest) -> Usage:
    """Of a request that ended well."""
    while isinstance(event := live.outbox.take(), Drawn):
        pass
    assert isinstance(event, Ended), event
    return event.completed.finished.usage
