"""Builds one step of one lane.

Knows the lane, the queue and the deadlines, and changes the first two; nothing of users or totals. One idea: computed
chases the length, and a slice is what is missing, cut by the budget. There is no prefill mode and no decode mode.

Running sequences come first, by rank; each is sure of the token a decode needs, and prompts share the rest. When the
pool is short the sequences of the lowest rank make room: one that a step in flight still references is *benched* (no
slice in this step) and preempted only once its results are in, so no drawn token is ever without an owner, and a
sequence that ends meanwhile is never recomputed. A needy sequence with nobody below it just waits: the best
protected one has nobody above it, fits the pool alone, and so always gets its blocks in the end.
"""

from dataclasses import dataclass

from services.scheduler.admission import Demand, demand, fits, peak_blocks
from services.scheduler.calls import Admitted, CoreConfig, Plan, PlannedSlice, Preempted, SequenceKey
from services.scheduler.deadlines import Deadlines
from services.scheduler.lane import InFlight, Lane, Row
from services.scheduler.policy import WaitingQueue
from services.scheduler.sequence import Sequence

_LOOK_PAST = 64  # sequences at the head of the queue that this lane can't take before it stops looking


@dataclass(slots=True)
class _Grant:
    sequence: Sequence
    missing: int  # tokens, before this step
    count: int  # of them granted
    new_blocks: list[int]
    admitted: bool


class StepDraft:
    def __init__(self, lane: Lane, waiting: WaitingQueue, deadlines: Deadlines, config: CoreConfig, now: int) -> None:
        self._lane = lane
        self._waiting = waiting
        self._deadlines = deadlines
        first = deadlines.next()
        self._some_passed = first is not None and first <= now
        self._config = config
        self._now = now
        self._left = lane.spec.max_batched_tokens
        self._grants: dict[SequenceKey, _Grant] = {}  # in the order of the slices
        self._admitted: list[Admitted] = []
        self._preempted: list[Preempted] = []
        self._short = False  # somebody wants a block and waits

    def build(self) -> Plan | None:
        self._serve_running()
        if not self._preempted and not self._short and not self._cooling():
            self._admit()
        self._hand_out_rest()
        return self._commit() if self._grants else None

    def _serve_running(self) -> None:
        lane, waiting = self._lane, len(self._waiting)
        missing = {sequence.key: self._missing(sequence) for sequence in lane.running}
        decodes = sum(1 for count in missing.values() if count == 1)
        spare = self._left - decodes  # at least lane.prefill_minimum, by the number of slots
        held_back = min(lane.prefill_minimum, spare // 2) if waiting and lane.free_slots and not self._cooling() else 0
        spare -= held_back
        cap = self._cap(alone=len(lane.running) == 1 and not waiting)
        victims = [sequence for sequence in lane.running if not sequence.placed().reserved]  # the last goes first
        benched: set[SequenceKey] = set()
        coming = lane.pool.fenced  # blocks that steps in flight will set free; each is promised once
        for sequence in tuple(lane.running):
            if sequence.placement is None or sequence.key in benched:
                continue
            want = missing[sequence.key]
            want = want if want <= 1 else min(want, cap, spare)
            if want == 0:
                continue
            while self._room(sequence) == 0 and coming == 0:
                if not victims or victims[-1].placed().rank <= sequence.placed().rank:
                    break
                victim = victims.pop()
                if lane.busy(victim):
                    benched.add(victim.key)
                    coming += len(victim.placed().blocks)
                else:
                    self._preempt(victim)
            count = min(want, self._room(sequence))
            if count == 0:
                self._short = True
                coming = max(0, coming - 1)
                continue
            self._grant(sequence, missing[sequence.key], count)
            if missing[sequence.key] > 1:
                spare -= count

    def _admit(self) -> None:
        lane = self._lane
        growing: list[Demand] | None = None
        passed_over: list[Sequence] = []
        while self._left and lane.free_slots and len(passed_over) < _LOOK_PAST:
            sequence = self._waiting.first()
            if sequence is None:
                break
            if self._passed(sequence) or not fits(sequence, lane.spec):
                self._waiting.remove(sequence)
                passed_over.append(sequence)
                continue
            if growing is None:
                growing = [
                    demand(other, lane.spec, self._config) for other in lane.running if not other.placed().reserved
                ]
            reserved = sequence.preemptions >= self._config.preemption_cap > 0
            cap = self._cap(alone=not lane.running and len(self._waiting) + len(passed_over) == 1)
            count = min(sequence.missing, cap, self._left)
            own = demand(sequence, lane.spec, self._config)
            if not self._affordable(sequence, count, growing, own, reserved=reserved):
                break
            self._waiting.remove(sequence)
            lane.place(sequence, reserved=reserved)
            sequence.admitted = True
            if not reserved:
                growing.append(own)
            self._admitted.append(Admitted(sequence.key, lane.id, self._now - sequence.queued_at))
            self._grant(sequence, sequence.missing, count, admitted=True)
        for sequence in passed_over:
            self._waiting.push(sequence)

    def _affordable(
        self, sequence: Sequence, count: int, growing: list[Demand], own: Demand, *, reserved: bool
    ) -> bool:
        lane, spec = self._lane, self._lane.spec
        whole = spec.blocks_for(sequence.bound - 1)
        if (whole if reserved else spec.blocks_for(count)) > lane.pool.free:
            return False
        if not lane.running:
            return True  # it fits alone; the watermark is for those that come second
        kept_free = -int(-self._config.watermark * lane.pool.total // 1)  # rounded up
        pinned = sum(len(other.placed().blocks) for other in lane.running if other.placed().reserved)
        available = lane.pool.total - kept_free - pinned - (whole if reserved else 0)
        demands = growing if reserved else [*growing, own]
        # The plain sum bounds the peak from above, and decides where the pool is roomy.
        return sum(map(sum, demands)) <= available or peak_blocks(demands) <= available

    def _hand_out_rest(self) -> None:
        """Tokens held back for those that wait, and not used, go to the prompts that run."""
        cap = self._cap(alone=len(self._lane.running) == 1 and not self._waiting)
        for grant in tuple(self._grants.values()):
            wanted = min(grant.missing, cap) - grant.count
            if wanted > 0 and self._left:
                more = min(wanted, self._left, self._room(grant.sequence))
                if more > 0:
                    self._grant(grant.sequence, grant.missing, more)

    def _commit(self) -> Plan:
        lane = self._lane
        lane.planned += 1
        slices, rows = [], []
        for key, grant in self._grants.items():
            sequence, placement = grant.sequence, grant.sequence.placed()
            start = placement.computed
            samples = start + grant.count == sequence.length
            slices.append(
                PlannedSlice(
                    key=key,
                    slot=placement.slot,
                    start=start,
                    count=grant.count,
                    new_block_ids=tuple(grant.new_blocks),
                    samples=samples,
                    admitted=grant.admitted,
                )
            )
            if start < placement.settled:
                sequence.prefill_chunks += 1
            placement.computed += grant.count
            placement.last_step = lane.planned
            if samples:
                placement.pending += 1
                rows.append(Row(sequence, placement))
        tokens = lane.spec.max_batched_tokens - self._left
        lane.in_flight.append(InFlight(lane.planned, tuple(rows), tokens))
        if self._preempted:
            lane.cool_until = lane.planned + 1 + self._config.preemption_cooldown
        return Plan(lane.planned, tuple(slices), tuple(self._admitted), tuple(self._preempted))

    def _grant(self, sequence: Sequence, missing: int, count: int, *, admitted: bool = False) -> None:
        placement, spec = sequence.placed(), self._lane.spec
        grant = self._grants.get(sequence.key)
        if grant is None:
            grant = self._grants[sequence.key] = _Grant(sequence, missing, 0, [], admitted)
        grant.count += count
        self._left -= count
        reach = sequence.bound - 1 if placement.reserved else placement.computed + grant.count
        lacking = spec.blocks_for(reach) - len(placement.blocks)
        if lacking:
            blocks = self._lane.pool.allocate(lacking)
            placement.blocks.extend(blocks)
            grant.new_blocks.extend(blocks)

    def _preempt(self, victim: Sequence) -> None:
        self._lane.vacate(victim)
        recompute = victim.displace(self._now)
        victim.preemptions += 1
        self._waiting.push(victim)
        self._preempted.append(Preempted(victim.key, recompute))

    def _missing(self, sequence: Sequence) -> int:
        """Nothing is computed for a sequence whose time is over: `expire` ends it."""
        return 0 if self._passed(sequence) else sequence.missing

    def _passed(self, sequence: Sequence) -> bool:
        return self._some_passed and self._deadlines.passed(sequence.key, self._now)

    def _room(self, sequence: Sequence) -> int:
        """Tokens that its own and the free blocks still hold."""
        placement = sequence.placed()
        granted = self._grants.get(sequence.key)
        taken = placement.computed + (0 if granted is None else granted.count)
        return (len(placement.blocks) + self._lane.pool.free) * self._lane.spec.block_size - taken

    def _cap(self, *, alone: bool) -> int:
        return self._lane.spec.max_batched_tokens if alone else self._config.prefill_chunk

    def _cooling(self) -> bool:
        return bool(self._lane.running) and self._lane.planned + 1 < self._lane.cool_until
