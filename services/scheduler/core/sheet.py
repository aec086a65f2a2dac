"""The slices of one step while they are made up: who gets how many tokens, and the blocks for them.

Knows one lane and its pool; nothing of the queue or of why somebody gets something. What was granted stays granted:
`commit` turns it into the plan and notes it in the lane.
"""

from dataclasses import dataclass

from services.scheduler.core.calls import Admitted, Plan, PlannedSlice, Preempted, SequenceKey
from services.scheduler.core.lane import InFlight, Lane
from services.scheduler.core.policies.fair import TokenCounters
from services.scheduler.core.sequence import Placement, Sequence


@dataclass(slots=True, eq=False)
class Grant:
    sequence: Sequence
    missing: int  # tokens, before this step
    count: int  # of them granted
    new_blocks: tuple[int, ...] = ()
    admitted: bool = False


class Sheet:
    def __init__(self, lane: Lane, padding: int) -> None:
        self._lane = lane
        self._padding = padding
        self.left = lane.spec.max_batched_tokens - padding  # tokens
        self.grants: dict[SequenceKey, Grant] = {}  # in the order of the slices

    def room(self, sequence: Sequence, kept: int) -> int:
        """Tokens that its own blocks and those it may take still hold; `kept` blocks are not for it."""
        placement = sequence.placed()
        granted = self.grants.get(sequence.key)
        taken = placement.computed + (0 if granted is None else granted.count)
        blocks = len(placement.blocks) + max(0, self._lane.cache.available - kept)
        return blocks * self._lane.spec.block_size - taken

    def grant(self, sequence: Sequence, missing: int, count: int, *, admitted: bool = False) -> None:
        placement, lane = sequence.placed(), self._lane
        grant = self.grants.get(sequence.key)
        if grant is None:
            found = tuple(placement.blocks) if admitted else ()  # the executor hears of them with the first slice
            grant = self.grants[sequence.key] = Grant(sequence, missing, 0, found, admitted)
        grant.count += count
        self.left -= count
        reach = sequence.bound - 1 if placement.reserved else placement.computed + grant.count
        lacking = lane.spec.blocks_for(reach) - len(placement.blocks)
        if lacking:
            grant.new_blocks += lane.grow(placement, lacking)

    def commit(self, counters: TokenCounters, admitted: list[Admitted], preempted: list[Preempted]) -> Plan:
        lane = self._lane
        lane.planned += 1
        step_id = lane.planned
        slices: list[PlannedSlice] = []
        rows: list[Placement] = []
        ends: list[tuple[Placement, int]] = []
        for grant in self.grants.values():
            sequence, count = grant.sequence, grant.count
            placement = sequence.placement
            if placement is None:  # to the type checker; `placed` costs more than the rest of a decode row
                continue
            start = placement.computed
            end = start + count
            samples = end == sequence.known + placement.pending
            # What PlannedSlice(...) does, without a call in Python: of a decode row this is the dearest part.
            parts = (sequence.key, placement.slot, start, count, grant.new_blocks, samples, grant.admitted)
            slices.append(tuple.__new__(PlannedSlice, parts))
            if start < placement.settled:
                sequence.prefill_chunks += 1
                if due := sequence.pay(start, end):
                    counters.charge(sequence.submission.tenant, prompt=due)
            placement.computed = end
            placement.last_step = step_id
            if samples:
                placement.pending += 1
                rows.append(placement)
            ends.append((placement, end))
        tokens = lane.spec.max_batched_tokens - self._padding - self.left
        lane.in_flight.append(InFlight(step_id, tuple(rows), tuple(ends), tokens))
        return Plan(step_id, tuple(slices), tuple(admitted), tuple(preempted), self._padding)
