"""One lane: the pool, the slots, the running sequences and the steps in flight of one executor lease.

Knows nothing of the queue or of time. Invariants: a sequence runs here exactly while its placement names this lane;
`running` is sorted by rank, so the best protected is first and the next victim last; steps are applied in the order
they were planned.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Series
from dataclasses import dataclass
from heapq import heappop, heappush

from services.scheduler.core.calls import (
    BlockKey,
    CoreConfig,
    InvariantError,
    KvEvent,
    LaneId,
    LaneLoad,
    LaneSpec,
    OutOfStep,
    StepOutcome,
)
from services.scheduler.core.prefix import PrefixCache
from services.scheduler.core.sequence import Placement, Sequence


@dataclass(frozen=True, slots=True)
class InFlight:
    step_id: int
    rows: tuple[Placement, ...]  # of the slices that sample, in the order of the plan
    ends: tuple[tuple[Placement, int], ...]  # of all slices: where each ends
    tokens: int  # positions in all slices


class Lane:
    def __init__(
        self, lane_id: LaneId, spec: LaneSpec, config: CoreConfig, tell: Callable[[KvEvent], None] | None = None
    ) -> None:
        self.id = lane_id
        self.spec = spec
        quota = int(config.tenant_cache_share * spec.total_blocks)
        self.cache = PrefixCache(lane_id, spec, quota, tell, config.session_lease)
        self.pool = self.cache.pool
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
        self.cool_rank = 0  # but for what is strictly above this protection: that of the best victim
        self.batch = 0  # sequences that the batch began with, under a static policy
        self.tenants: dict[str, int] = {}  # of those that run; no zeros
        self.expected = 0  # blocks that those that run are expected never to hold more than, all together

    def keys(self, sequence: Sequence) -> Series[BlockKey]:
        """Of its full blocks, where they are of this lane's size."""
        return sequence.block_keys if sequence.submission.key_block_size == self.spec.block_size else ()

    def find(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the start of a waiting sequence already. At least its last known token is left to compute:
        without it there are no logits to draw from."""
        if sequence.scores:
            return []
        return self.cache.find(self.keys(sequence), (sequence.known - 1) // self.spec.block_size)

    def computing(self, sequence: Sequence, found: int) -> Sequence | None:
        """Who computes the next block that a waiting sequence would, behind `found` found ones."""
        keys = self.keys(sequence)
        if sequence.scores or found >= min(len(keys), (sequence.known - 1) // self.spec.block_size):
            return None
        holder = self.cache.promised(keys[found])
        return holder if isinstance(holder, Sequence) else None

    def place(
        self, sequence: Sequence, *, protection: int, expected: int, reserved: bool, found: Series[int] = ()
    ) -> Placement:
        """expected: blocks in the end. found: what `find` gave just now."""
        self.admissions += 1
        placement = Placement(
            sequence=sequence,
            lane=self.id,
            slot=heappop(self.free_slots),
            rank=(protection, self.admissions),
            settled=sequence.known,
            reserved=reserved,
            expected=expected + 1,  # its parts are rounded up each on its own
        )
        sequence.placement = placement
        insort(self.running, sequence, key=lambda other: other.placed().rank)
        tenant = sequence.submission.tenant
        self.tenants[tenant] = self.tenants.get(tenant, 0) + 1
        self.expected += placement.expected
        self.cache.hold(found)
        placement.blocks.extend(found)
        placement.published = len(found)
        sequence.start_from_cache(len(found) * self.spec.block_size)
        self.cache.promise(self.keys(sequence)[len(found) :], sequence)
        return placement

    def vacate(self, sequence: Sequence, *, ended: bool = False) -> None:
        """Takes slot and blocks back; the caller then clears the placement. A slot may be reused at once, though a
        step in flight still uses it: the executor takes steps in order and a new sequence replaces the slot.

        ended: it does not come back, and if it is a turn of a session, the next turn may.
        """
        placement = sequence.placed()
        del self.running[bisect_left(self.running, placement.rank, key=lambda other: other.placed().rank)]
        heappush(self.free_slots, placement.slot)
        self.expected -= placement.expected
        tenant = sequence.submission.tenant
        self.tenants[tenant] -= 1
        if not self.tenants[tenant]:
            del self.tenants[tenant]
        self.cache.break_promises(self.keys(sequence)[placement.published :], sequence)
        self.cache.release(placement.blocks, placement.last_step, session=ended and sequence.continues)

    def grow(self, placement: Placement, count: int) -> tuple[int, ...]:
        """So many blocks more, to be written."""
        blocks = self.cache.allocate(count)
        placement.blocks.extend(blocks)
        more = len(placement.blocks) + 1 - placement.expected
        if more > 0:  # it has outgrown what was expected
            placement.expected += more
            self.expected += more
        return blocks

    def publish(self, sequence: Sequence) -> None:
        """What is confirmed, and whose ids are known, can be found by others from now on."""
        placement, keys = sequence.placed(), self.keys(sequence)
        first, last = placement.published, min(placement.confirmed // self.spec.block_size, len(keys))
        if first < last:
            parent = keys[first - 1] if first else b""
            tenant = sequence.submission.tenant
            self.cache.publish(parent, keys[first:last], placement.blocks[first:last], tenant)
            placement.published = last

    def withdraw(self, sequence: Sequence) -> None:
        """It failed, so what it read may be the cause: nobody is to find that again."""
        self.cache.withdraw(sequence.placed().blocks)

    def busy(self, sequence: Sequence) -> bool:
        """Whether a step in flight references it."""
        return sequence.placed().last_step > self.applied

    def pop_step(self, outcome: StepOutcome) -> tuple[Placement, ...]:
        """The rows that `outcome` answers, in its order; the step is applied. Nothing changes where OutOfStep is
        raised."""
        if not self.in_flight:
            raise OutOfStep(f"lane {self.id}: results of step {outcome.step_id}, and none is in flight")
        step = self.in_flight[0]
        if outcome.step_id != step.step_id:
            raise OutOfStep(f"lane {self.id}: results of step {outcome.step_id}; step {step.step_id} is next")
        expected = [placement.slot for placement in step.rows]
        if [result.slot for result in outcome.outcomes] != expected:
            raise OutOfStep(f"lane {self.id}: step {step.step_id} sampled slots {expected}, others were answered")
        failed: list[Placement] = []
        for placement, result in zip(step.rows, outcome.outcomes, strict=True):
            if result.tokens != (not result.failed):
                raise OutOfStep(f"lane {self.id}: slot {result.slot} drew {result.tokens} tokens in one step")
            if result.failed:
                failed.append(placement)
        self.in_flight.popleft()
        self.applied = step.step_id
        self.cache.applied(step.step_id)
        block_size = self.spec.block_size
        for placement, end in step.ends:
            sequence = placement.sequence
            if sequence.placement is placement and not (failed and any(placement is other for other in failed)):
                placement.confirmed = end
                if sequence.block_keys and end >= (placement.published + 1) * block_size:
                    self.publish(sequence)
        return step.rows

    def load(self) -> LaneLoad:
        return LaneLoad(
            running=len(self.running),
            steps_in_flight=len(self.in_flight),
            blocks_total=self.pool.total,
            blocks_live=self.pool.live,
            blocks_fenced=self.pool.fenced,
            blocks_free=self.pool.free,
            blocks_cached=self.pool.cached,
            blocks_leased=self.cache.leased,
        )

    def check(self, config: CoreConfig) -> None:
        self.cache.check([sequence.placed().blocks for sequence in self.running])
        self.cache.check_promises(self.running)
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
            for placement in step.rows:
                draws[id(placement)] = draws.get(id(placement), 0) + 1
        tenants: dict[str, int] = {}
        for sequence in self.running:
            self._check_sequence(sequence, draws.get(id(sequence.placement), 0))
            tenants[sequence.submission.tenant] = tenants.get(sequence.submission.tenant, 0) + 1
        if tenants != self.tenants:
            raise InvariantError(f"lane {self.id}: tenants {self.tenants} are counted, {tenants} run")
        if self.expected != sum(sequence.placed().expected for sequence in self.running):
            raise InvariantError(f"lane {self.id}: {self.expected} blocks are expected, and the sum is another")

    def _check_sequence(self, sequence: Sequence, draws: int) -> None:
        placement, name = sequence.placed(), f"{sequence.key} on lane {self.id}"
        if placement.sequence is not sequence:
            raise InvariantError(f"{name}: its placement is of {placement.sequence.key}")
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
        if not placement.confirmed <= placement.computed:
            raise InvariantError(f"{name}: confirmed {placement.confirmed} of {placement.computed} computed")
        if placement.published * self.spec.block_size > placement.confirmed:
            raise InvariantError(f"{name}: {placement.published} blocks published, {placement.confirmed} confirmed")
        first_written = placement.computed // self.spec.block_size
        if any(self.cache.knows(block) or self.pool.holders(block) > 1 for block in placement.blocks[first_written:]):
            raise InvariantError(f"{name}: a block that others find or hold is about to be written")
        positions = sequence.bound - 1 if placement.reserved else placement.computed
        if len(placement.blocks) != self.spec.blocks_for(positions):
            raise InvariantError(f"{name}: {len(placement.blocks)} blocks for {positions} positions")
