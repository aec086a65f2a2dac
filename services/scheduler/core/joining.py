"""Who comes in with a step: the walk through the queue.

In the policy's order. Where one can't be afforded, smaller ones of no lower protection pass it, a bounded number of
times in its whole life: then nobody comes in before it.
"""

from typing import Final

from services.scheduler.core.admission import fits
from services.scheduler.core.calls import Admitted
from services.scheduler.core.forecast import PoolForecast
from services.scheduler.core.moment import LOOK_PAST, Moment
from services.scheduler.core.policies.policy import Batching, protection
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.shares import PromptShares
from services.scheduler.core.sheet import Sheet

LOOK_SMALLER: Final = 8  # sequences that merely can't be afforded now before a lane stops looking


class Joining:
    def __init__(self, moment: Moment, sheet: Sheet, shares: PromptShares) -> None:
        self._moment = moment
        self._sheet = sheet
        self._shares = shares
        self._forecast = PoolForecast(moment.lane, moment.config)
        # Who can't be afforded, with the blocks that they will have, and their protection.
        self._blocked: list[tuple[Sequence, int, int]] = []
        self.admitted: list[Admitted] = []
        self.prompts: list[Sequence] = []  # of those admitted, who misses more than one token

    def admit(self) -> None:
        moment, lane, most = self._moment, self._moment.lane, self._moment.config.max_passes
        if moment.closed():
            return
        walk = moment.waiting.walk(lambda waiting: len(lane.find(waiting)) * lane.spec.block_size)
        looked = 0
        while self._sheet.left and lane.free_slots and looked < LOOK_PAST and len(self._blocked) <= LOOK_SMALLER:
            sequence = walk.next()
            if sequence is None or moment.cooling(sequence):
                break
            if moment.passed(sequence) or not fits(sequence, lane.spec):
                looked += 1
                continue
            found = lane.find(sequence)
            first = lane.computing(sequence, len(found))
            if first is not None and not moment.passed(first):
                # Its next block is being computed: once is enough. It is looked at again when that one is there, or
                # when who computes it is gone.
                looked += 1
                continue
            size = sum(self._forecast.demand(sequence))
            if self._stands_behind(sequence, size):
                looked += 1
                continue
            reserved = moment.reserves(sequence)
            start = len(found) * lane.spec.block_size
            count = self._tokens(sequence, sequence.missing - start)
            if not count or not self._forecast.affords(sequence, found, start + count, reserved=reserved):
                if sequence.passed >= most:
                    break
                self._blocked.append((sequence, size, protection(moment.policy, sequence)))
                continue
            if sequence.claimed != lane.id and moment.choice.leaves(sequence):
                looked += 1
                continue
            self._place(sequence, found, count, size, reserved=reserved)
            walk.admitted(sequence)
            for other, *_ in self._blocked:
                other.passed += 1
            if any(other.passed >= most for other, *_ in self._blocked):
                break
        if moment.policy.batching is not Batching.CONTINUOUS and self.admitted:
            lane.batch = len(lane.running)

    def _tokens(self, sequence: Sequence, missing: int) -> int:
        """Of its first slice."""
        moment, left = self._moment, self._sheet.left
        alone = not moment.lane.running and len(moment.waiting) == 1
        count = min(missing, moment.cap(alone=alone), left)
        if sequence.passed < moment.config.max_passes and not alone:
            allowed = self._shares.allowed(sequence, missing, alone=moment.alone())
            count = count if allowed is None else min(count, allowed)
        return count

    def _stands_behind(self, sequence: Sequence, size: int) -> bool:
        """Whether one that could not be afforded is not to be passed by it."""
        if not self._blocked:
            return False
        own = protection(self._moment.policy, sequence)
        return any(size >= larger or own > protected for _, larger, protected in self._blocked)

    def _place(self, sequence: Sequence, found: list[int], count: int, size: int, *, reserved: bool) -> None:
        moment = self._moment
        lane, start = moment.lane, len(found) * moment.lane.spec.block_size
        missing = sequence.missing - start
        moment.waiting.take(sequence, start, moment.soon)
        lane.place(
            sequence, protection=protection(moment.policy, sequence), expected=size, reserved=reserved, found=found
        )
        sequence.admitted = True
        self.admitted.append(Admitted(sequence.key, lane.id, moment.now - sequence.queued_at, start))
        self._sheet.grant(sequence, missing, count, admitted=True)
        if missing > 1:
            self.prompts.append(sequence)
            self._shares.spend(sequence, missing, count)
        self._forecast.entered(sequence)
        moment.choice.took(sequence)
