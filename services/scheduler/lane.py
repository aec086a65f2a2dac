"""One lane: the pool, the slots, the running sequences and the steps in flight of one executor lease.

Knows nothing of the queue or of time. Invariants: a sequence runs here exactly while its placement names this lane;
`running` is sorted by rank, so the best protected is first and the next victim last; steps are applied in the order
they were planned.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from services.scheduler.blocks import BlockPool
from services.scheduler.calls import (
    CoreConfig,
    InvariantError,
    LaneId,
    LaneLoad,
    LaneSpec,
    OutOfStep,
    SequenceOutcome,
    StepOutcome,
)
from services.scheduler.sequence import Placement, Sequence


@dataclass(frozen=True, slots=True)
class Row:
    """A sampling slice of a step in flight. The sequence may have ended since: then its placement is another."""

    sequence: Sequence
    placement: Placement

    @property
    def alive(self) -> bool:
        return self.sequence.placement is self.placement


@dataclass(frozen=True, slots=True)
class InFlight:
    step_id: int
    rows: tuple[Row, ...]  # of the slices that sample, in the order of the plan
    tokens: int  # positions in all slices


class Lane:
    def __init__(self, lane_id: LaneId, spec: LaneSpec, config: CoreConfig) -> None:
        self.id = lane_id
        self.spec = spec
        self.pool = BlockPool(spec.total_blocks)
        # Tokens of a step that decodes never take: so a prompt advances however many sequences decode.
        self.prefill_minimum = min(config.prefill_chunk, spec.max_batched_tokens // 4)
        slots = min(spec.max_sequences, max(1, spec.max_batched_tokens - self.prefill_minimum))
        self.slots = slots
        self.free_slots = list(range(slots))  # a heap: the lowest is used first
        self.running: list[Sequence] = []
        self.in_flight: deque[InFlight] = deque()
        self.planned = 0  # id of the last planned step
        self.applied = 0  # id of the last applied step
        self.admissions = 0
        self.cool_until = 0  # steps below this id admit nobody while others run

    def place(self, sequence: Sequence, *, reserved: bool) -> Placement:
        self.admissions += 1
        placement = Placement(
            lane=self.id,
            slot=heappop(self.free_slots),
            rank=(-sequence.submission.priority, self.admissions),
            settled=sequence.known,
            reserved=reserved,
        )
        sequence.placement = placement
        insort(self.running, sequence, key=lambda other: other.placed().rank)
        return placement

    def vacate(self, sequence: Sequence) -> None:
        """Takes slot and blocks back; the caller then clears the placement. A slot may be reused at once, though a
        step in flight still uses it: the executor takes steps in order and a new sequence replaces the slot."""
        placement = sequence.placed()
        self.running.remove(sequence)
        heappush(self.free_slots, placement.slot)
        self.pool.release(placement.blocks, placement.last_step)

    def busy(self, sequence: Sequence) -> bool:
        """Whether a step in flight references it."""
        return sequence.placed().last_step > self.applied

    def pop_step(self, outcome: StepOutcome) -> tuple[tuple[Row, SequenceOutcome], ...]:
        """The rows that `outcome` answers; the step is applied. Nothing changes where OutOfStep is raised."""
        if not self.in_flight:
            raise OutOfStep(f"lane {self.id}: results of step {outcome.step_id}, and none is in flight")
        step = self.in_flight[0]
        if outcome.step_id != step.step_id:
            raise OutOfStep(f"lane {self.id}: results of step {outcome.step_id}; step {step.step_id} is next")
        expected = [row.placement.slot for row in step.rows]
        if [result.slot for result in outcome.outcomes] != expected:
            raise OutOfStep(f"lane {self.id}: step {step.step_id} sampled slots {expected}, others were answered")
        for result in outcome.outcomes:
            if result.tokens != (0 if result.failed else 1):
                raise OutOfStep(f"lane {self.id}: slot {result.slot} drew {result.tokens} tokens in one step")
        self.in_flight.popleft()
        self.applied = step.step_id
        self.pool.applied(step.step_id)
        return tuple(zip(step.rows, outcome.outcomes, strict=True))

    def load(self) -> LaneLoad:
        return LaneLoad(
            running=len(self.running),
            steps_in_flight=len(self.in_flight),
            blocks_total=self.pool.total,
            blocks_live=self.pool.live,
            blocks_fenced=self.pool.fenced,
            blocks_free=self.pool.free,
        )

    def check(self, config: CoreConfig) -> None:
        self.pool.check(sequence.placed().blocks for sequence in self.running)
        used = [sequence.placed().slot for sequence in self.running]
        if sorted(used + self.free_slots) != list(range(self.slots)):
            raise InvariantError(f"lane {self.id}: slots {used} used and {self.free_slots} free of {self.slots}")
        ranks = [sequence.placed().rank for sequence in self.running]
        if ranks != sorted(ranks):
            raise InvariantError(f"lane {self.id}: running is out of rank order: {ranks}")
        if [step.step_id for step in self.in_flight] != list(range(self.applied + 1, self.planned + 1)):
            raise InvariantError(f"lane {self.id}: steps in flight do not reach from {self.applied} to {self.planned}")
        if len(self.in_flight) > config.steps_in_flight:
            raise InvariantError(f"lane {self.id}: {len(self.in_flight)} steps in flight")
        if any(step.tokens > self.spec.max_batched_tokens for step in self.in_flight):
            raise InvariantError(f"lane {self.id}: a step exceeds {self.spec.max_batched_tokens} tokens")
        draws: dict[int, int] = {}
        for step in self.in_flight:
            for row in step.rows:
                draws[id(row.placement)] = draws.get(id(row.placement), 0) + 1
        for sequence in self.running:
            self._check_sequence(sequence, draws.get(id(sequence.placement), 0))

    def _check_sequence(self, sequence: Sequence, draws: int) -> None:
        placement, name = sequence.placed(), f"{sequence.key} on lane {self.id}"
        if placement.lane != self.id:
            raise InvariantError(f"{name}: its placement names lane {placement.lane}")
        if not 0 <= placement.computed <= sequence.target:
            raise InvariantError(f"{name}: computed {placement.computed} of {sequence.target}")
        if sequence.length > sequence.bound:
            raise InvariantError(f"{name}: length {sequence.length} beyond its limit {sequence.bound}")
        if placement.pending != draws:
            raise InvariantError(f"{name}: {placement.pending} draws pending, {draws} in flight")
        if placement.pending and placement.computed < sequence.known:
            raise InvariantError(f"{name}: a draw is in flight with {placement.computed} of {sequence.known} computed")
        if placement.last_step > self.planned:
            raise InvariantError(f"{name}: step {placement.last_step} was never planned")
        positions = sequence.bound - 1 if placement.reserved else placement.computed
        if len(placement.blocks) != self.spec.blocks_for(positions):
            raise InvariantError(f"{name}: {len(placement.blocks)} blocks for {positions} positions")
