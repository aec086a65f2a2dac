"""A core that can go over steps in which nothing is decided, at once.

While every running sequence of a lane decodes, no one joins, ends or runs short of blocks, a step does one thing to
each of them: one token more. `quiet_steps` says for how many steps that holds, `skip` takes them together. What
`skip` leaves is what so many calls of `apply` and `plan` would have left, but for which free block went to whom; a
test compares whole runs. Everything else is inherited: it is the very core that serves.
"""

from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Series
from dataclasses import dataclass
from operator import sub

from services.scheduler.core.binding import Binding
from services.scheduler.core.calls import (
    CoreConfig,
    Emission,
    InvariantError,
    LaneId,
    LaneSpec,
    SequenceKey,
)
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.lane import InFlight, Lane
from services.scheduler.core.policies.policy import Batching


@dataclass(frozen=True, slots=True)
class Quiet:
    """`steps` pairs of apply and plan decide nothing, as long as they happen before `before_ns`, and nobody waits where
    `joinable`."""

    steps: int
    before_ns: int | None
    joinable: bool


class _LookingBinding(Binding):
    """Says which lanes are about to be looked at, so that what they went over can be told first."""

    def __init__(self, look: Callable[[list[Lane]], None]) -> None:
        super().__init__()
        self._look = look

    def others(self, lane: Lane, lanes: Mapping[LaneId, Lane]) -> list[Lane]:
        made = super().others(lane, lanes)
        self._look(made)
        return made

    def replay(self, lane: LaneId, rows: int, times: Series[int]) -> None:
        """`applied` and `planned`, a token of so many rows, at each of the times; the steps in flight are alike."""
        pace = self._paces[lane]
        pace.fit.observe_each(rows, map(sub, times, (pace.freed_at, *times)))
        pace.freed_at = times[-1]
        for at in times[-len(pace.in_flight) :]:
            pace.in_flight.popleft()
            pace.in_flight.append((rows, at))
        pace.backlog = 0  # all decode


class SkippingCore(SchedulerCore):
    """look: called with lanes before another one's plan depends on their state; `glance` may be called then."""

    def __init__(self, config: CoreConfig, look: Callable[[list[Lane]], None]) -> None:
        super().__init__(config)
        self._binding: _LookingBinding = _LookingBinding(look)
        self._distinct: list[LaneSpec] = []

    def attach(self, lane: LaneId, spec: LaneSpec, now: int) -> list[Emission]:
        if spec not in self._distinct:
            self._distinct.append(spec)
        return super().attach(lane, spec, now)

    @property
    def waits_for_accounts(self) -> bool:
        """Whether who is next depends on tokens given out: then those of quiet steps are to be told in time."""
        return self._waiting.policy.by_tenant

    @property
    def refuses_late(self) -> bool:
        return self._waiting.policy.refuses_late

    def quiet_steps(self, lane_id: LaneId) -> Quiet | None:
        """None: the next step has something to decide. The lane has all its steps in flight."""
        lane = self._lanes[lane_id]
        policy = self._waiting.policy
        joinable = policy.preempts or (bool(lane.free_slots) and policy.batching is Batching.CONTINUOUS)
        if not lane.running or (joinable and self._waiting) or lane.pool.fenced:
            return None
        steps = min(sequence.bound - 1 - sequence.placed().computed for sequence in lane.running)
        growing = sum(not sequence.placed().reserved for sequence in lane.running)
        if growing:
            # Which blocks are leased changes with time: what is to be reclaimed is not known for many steps.
            blocks = lane.pool.free if lane.cache.leased else lane.cache.available
            steps = min(steps, blocks // growing * lane.spec.block_size)
        if steps < 1 or not self._uniform(lane):
            return None
        deadlines = [deadline for sequence in lane.running if (deadline := self._deadlines.get(sequence.key))]
        return Quiet(steps, min((when for when, _ in deadlines), default=None), joinable)

    def glance(self, lane_id: LaneId, times: Series[int], seen: int) -> None:
        """What others see of a lane that did an apply and a plan at each of the times: its pace, and what blocks are
        left. The first `seen` were glanced at before. `skip` is still to be told of all."""
        lane, steps = self._lanes[lane_id], len(times)
        self._binding.replay(lane_id, len(lane.running), times[seen:])
        size = lane.spec.block_size
        for sequence in lane.running:
            placement = sequence.placed()
            reach = placement.computed + steps
            if reach > len(placement.blocks) * size:
                lacking = lane.spec.blocks_for(reach) - len(placement.blocks)
                lane.grow(placement, lacking)

    def skip(self, lane_id: LaneId, times: Series[int], seen: int = 0) -> list[SequenceKey]:
        """An apply and a plan at each of the times, the first `seen` of which were glanced at. Who got so many tokens
        each, in the order of the rows."""
        if seen < len(times):
            self.glance(lane_id, times, seen)
        lane = self._lanes[lane_id]
        steps, last_at, rows = len(times), times[-1], len(lane.running)
        served: dict[str, int] = {}
        for sequence in lane.running:
            placement, submission = sequence.placed(), sequence.submission
            placement.computed += steps
            placement.confirmed += steps
            placement.last_step += steps
            sequence.deliver(steps, last_at)
            served[submission.tenant] = served.get(submission.tenant, 0) + steps
        self._gate.served(served)
        lane.planned += steps
        lane.applied += steps
        lane.pool._applied = lane.applied  # as so many calls of `applied` would: nothing is fenced
        lane.in_flight = deque(
            InFlight(
                step.step_id + steps,
                step.rows,
                tuple([(placement, end + steps) for placement, end in step.ends]),
                step.tokens,
            )
            for step in lane.in_flight
        )
        self._ledger.count(steps=steps, planned_tokens=rows * steps, sampled=rows * steps)
        return [sequence.key for sequence in lane.running]

    def _uniform(self, lane: Lane) -> bool:
        """Whether every step in flight is one token of each that runs, and nothing else."""
        rows, depth = len(lane.running), self._config.steps_in_flight
        if len(lane.in_flight) != depth or any(sequence.missing != 1 for sequence in lane.running):
            return False
        for step in lane.in_flight:
            if len(step.rows) != rows or step.tokens != rows:
                return False
            for placement, sequence in zip(step.rows, lane.running, strict=True):
                if placement is not sequence.placement:
                    return False
        if any(sequence.placed().pending != depth for sequence in lane.running):
            raise InvariantError(f"lane {lane.id}: draws pending are not the steps in flight")
        return True

    def _specs(self) -> list[LaneSpec]:
        """Equal lanes say the same about what fits; only a forecast of time needs each of them."""
        return super()._specs() if self.refuses_late else self._distinct
