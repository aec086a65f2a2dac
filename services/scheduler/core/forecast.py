"""Will a lane's pool last if somebody comes in: the forecast that one step's admissions are held against.

Knows one lane and changes nothing of it. Invariant: as long as the expected lengths hold, those that run and those
let in by `affords` end without one being preempted.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence as Series

from services.scheduler.core.admission import Demand, demand, peak_blocks
from services.scheduler.core.calls import CoreConfig
from services.scheduler.core.lane import Lane
from services.scheduler.core.sequence import Sequence


class PoolForecast:
    def __init__(self, lane: Lane, config: CoreConfig) -> None:
        self._lane = lane
        self._config = config
        self._kept_free = -int(-config.watermark * lane.pool.total // 1)  # rounded up
        self._looked = False  # whether those that run were looked at, one by one
        self._demands: list[Demand] = []  # of those that run or will, reserved ones left out; ascending
        self._sum = self._held = 0
        self._pinned = 0  # whole needs, reserved
        self._running = len(lane.running)
        self._coming = 0  # blocks that are not there yet, and will be before anybody comes in
        self._promised = 0  # blocks that others will come in with

    def _look(self) -> None:
        """Linear in what runs, so only where the pool is not so roomy that `Lane.expected` says enough."""
        if self._looked:
            return
        self._looked = True
        lane = self._lane
        shared = lane.pool.shared  # else nobody's blocks are looked at
        for other in lane.running:
            if other.placed().reserved:
                table = other.placed().blocks
                self._pinned += len(table) - lane.cache.shared_head(table)
            else:
                self._demands.append(self.demand(other) if shared else demand(other, lane.spec, self._config))
        self._demands.sort()
        self._sum = sum(map(sum, self._demands))
        self._held = sum(run for _, run in self._demands)

    def copy(self) -> "PoolForecast":
        self._look()
        twin = object.__new__(PoolForecast)
        twin.__dict__ = {**self.__dict__, "_demands": list(self._demands)}
        return twin

    def demand(self, sequence: Sequence) -> Demand:
        """Blocks that others hold too are left out: they are counted once, for all."""
        left, run = demand(sequence, self._lane.spec, self._config)
        if sequence.placement is not None and self._lane.pool.shared:
            run -= self._lane.cache.shared_head(sequence.placement.blocks)
        return left, run

    def affords(self, sequence: Sequence, found: Series[int], reach: int, *, reserved: bool) -> bool:
        """Whether it can come in with the blocks that were found, and with others up to position `reach`."""
        lane, spec = self._lane, self._lane.spec
        whole = spec.blocks_for(sequence.bound - 1)
        idle = lane.cache.idle_among(found)
        first = (whole if reserved else spec.blocks_for(reach)) - len(found)
        if first > lane.cache.available + self._coming - self._promised - idle:
            return False
        if not self._running:
            return True  # it fits alone; the watermark is for those that come second
        if not self._looked:
            # An upper bound of the peak: nobody leaves, and all blocks are counted as if they were not shared.
            own_whole = whole if reserved else sum(self.demand(sequence))
            if lane.expected + own_whole <= lane.pool.total - self._kept_free:
                return True
            self._look()
        held = len(found) - idle  # by others, so they are counted already
        available = lane.pool.total - self._kept_free - self._pinned - lane.pool.shared
        if reserved:
            available -= whole - held
            own: Demand | None = None
        else:
            left, run = self.demand(sequence)
            own = (left, run - held)
            # Bounds of the peak, from above and below: they decide wherever the pool is roomy, or full.
            if self._sum + sum(own) <= available:
                return True
            least = min(own[0], self._demands[0][0]) if self._demands else own[0]
            if self._held + own[1] + least * (len(self._demands) + 1) > available:
                return False
        if own is None:
            return self._sum <= available or peak_blocks(self._demands) <= available
        return peak_blocks([*self._demands, own]) <= available

    def enter(self, sequence: Sequence, found: Series[int], reach: int, *, reserved: bool) -> None:
        """It will come in, though it is not placed yet."""
        self._running += 1
        self._promised += self._lane.spec.blocks_for(sequence.bound - 1 if reserved else reach) - len(found)
        self._count(sequence, reserved=reserved)

    def entered(self, sequence: Sequence) -> None:
        """It is placed, and holds its first blocks."""
        self._running += 1
        if self._looked:
            self._count(sequence, reserved=sequence.placed().reserved)

    def leave(self, victim: Sequence) -> None:
        """It will be preempted. It is not reserved."""
        own = self.demand(victim)
        del self._demands[bisect_left(self._demands, own)]
        self._sum -= sum(own)
        self._held -= own[1]
        self._running -= 1
        self._coming += sum(self._lane.pool.holders(block) == 1 for block in victim.placed().blocks)

    @property
    def promised(self) -> int:
        return self._promised

    def _count(self, sequence: Sequence, *, reserved: bool) -> None:
        if reserved:
            whole = self._lane.spec.blocks_for(sequence.bound - 1)
            shared = 0
            if sequence.placement is not None:
                shared = self._lane.cache.shared_head(sequence.placement.blocks)
            self._pinned += whole - shared
            return
        own = self.demand(sequence)
        insort(self._demands, own)
        self._sum += sum(own)
        self._held += own[1]
