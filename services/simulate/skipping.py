"""A core that can go over steps in which nothing is decided, at once.

While every running sequence of a lane decodes, no one joins, ends or runs short of blocks, a step does one thing to
each of them: one token more. `quiet_steps` says for how many steps that holds, `skip` takes them together. What
`skip` leaves is what so many calls of `apply` and `plan` would have left, but for which free block went to whom; a
test compares whole runs. Everything else is inherited: it is the very core that serves.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Series
from dataclasses import dataclass, replace

from services.scheduler.core.binding import CHOICES, Binding, Choice
from services.scheduler.core.calls import (
    CoreConfig,
    Emission,
    InvariantError,
    LaneId,
    LaneSpec,
    SequenceKey,
)
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.lane import Lane
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

    def __init__(self, somebody_waits: Callable[[], bool], look: Callable[[LaneId], None]) -> None:
        super().__init__()
        self._somebody_waits = somebody_waits
        self._look = look

    def choice(self, lane: Lane, lanes: Mapping[LaneId, Lane], max_passes: int, now: int) -> Choice:
        if not self._somebody_waits():  # there is nothing to choose
            self.missed()
            return Choice(self, lane, [], max_passes, now)
        made = super().choice(lane, lanes, max_passes, now)
        for other in made._others:
            self._look(other.id)
        return made

    def missed(self) -> None:
        """A plan without a choice takes its turn at the lanes too."""
        if len(self._open) > CHOICES + 1:
            self._turn = (self._turn + CHOICES) % len(self._open)

    def replay(self, lane: LaneId, rows: int, times: Series[int]) -> None:
        """`applied` and `planned`, a token of so many rows, at each of the times."""
        pace = self._paces[lane]
        in_flight, observe, freed_at = pace.in_flight, pace.fit.observe, pace.freed_at
        for at in times:
            tokens, planned_at = in_flight.popleft()
            observe(tokens, at - max(planned_at, freed_at))
            in_flight.append((rows, at))
            freed_at = at
        pace.freed_at = freed_at
        pace.backlog = None  # to be counted anew


class SkippingCore(SchedulerCore):
    """look: called with a lane before another one's plan depends on its state; `skip` may be called then."""

    def __init__(self, config: CoreConfig, look: Callable[[LaneId], None]) -> None:
        super().__init__(config)
        self._binding: _LookingBinding = _LookingBinding(lambda: bool(self._waiting), look)
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

    def go_over(self) -> None:
        """An apply and a plan that `skip` will be told of: called when they would have happened."""
        self._binding.missed()

    def skip(self, lane_id: LaneId, times: Series[int]) -> list[SequenceKey]:
        """An apply and a plan at each of the times. Who got so many tokens each, in the order of the rows."""
        lane = self._lanes[lane_id]
        steps, last_at, rows = len(times), times[-1], len(lane.running)
        self._binding.replay(lane_id, rows, times)
        served: dict[str, int] = {}
        for sequence in lane.running:
            placement, tenant = sequence.placed(), sequence.submission.tenant
            placement.computed += steps
            placement.confirmed += steps
            placement.last_step += steps
            sequence.deliver(steps, last_at)
            served[tenant] = served.get(tenant, 0) + steps
            if not placement.reserved:
                lacking = lane.spec.blocks_for(placement.computed) - len(placement.blocks)
                if lacking:
                    lane.grow(placement, lacking)
        self._gate.served(served)
        lane.planned += steps
        for _ in range(steps):
            lane.applied += 1
            lane.pool.applied(lane.applied)  # nothing is fenced
        for _ in range(len(lane.in_flight)):
            step = lane.in_flight.popleft()
            ends = tuple((placement, end + steps) for placement, end in step.ends)
            lane.in_flight.append(replace(step, step_id=step.step_id + steps, ends=ends))
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
