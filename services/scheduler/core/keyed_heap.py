"""Keys in ascending order of a value that may change: the queue and the deadlines are made of it.

Knows neither sequences nor time. Invariant: a key has one living entry, which may stand before its place and never
behind it; entries that died (removed, or given a lower order) never outnumber the living ones by more than a constant.
So memory is O(keys), and operations are O(log keys), amortised.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from services.scheduler.core.calls import InvariantError, SequenceKey

Order = tuple[int, ...]

_SLACK = 16  # dead entries that a small heap may hold, so that it is not rebuilt at every removal


class KeyedHeap:
    def __init__(self) -> None:
        self._entries: list[tuple[Order, int, SequenceKey]] = []
        self._living: dict[SequenceKey, tuple[Order, int]] = {}  # the serial tells a living entry from a dead one
        self._serial = 0  # also the tie break: of equal orders the one set first comes first

    def __len__(self) -> int:
        return len(self._living)

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._living

    def __iter__(self) -> Iterator[SequenceKey]:
        """Keys by the time they were set, not by order."""
        return iter(self._living)

    def order(self, key: SequenceKey) -> Order | None:
        living = self._living.get(key)
        return None if living is None else living[0]

    def set(self, key: SequenceKey, order: Order) -> None:
        living = self._living.get(key)
        if living is not None and living[0] <= order:
            # Later than before: the entry that there is will be seen first, and corrected then. A key whose order
            # grows at every step costs no push at every step.
            self._living[key] = (order, living[1])
            return
        self._serial += 1
        self._living[key] = (order, self._serial)
        heappush(self._entries, (order, self._serial, key))
        self._compact()

    def discard(self, key: SequenceKey) -> None:
        if self._living.pop(key, None) is not None:
            self._compact()

    def first(self) -> tuple[Order, SequenceKey] | None:
        while self._entries:
            order, serial, key = self._entries[0]
            living = self._living.get(key)
            if living == (order, serial):
                return order, key
            heappop(self._entries)
            if living is not None and living[1] == serial:
                heappush(self._entries, (*living, key))
        return None

    def check(self) -> None:
        if len(self._entries) > 2 * len(self._living) + _SLACK:
            raise InvariantError(f"{len(self._entries)} heap entries for {len(self._living)} keys")
        entries = {(serial, key): order for order, serial, key in self._entries}
        for key, (order, serial) in self._living.items():
            if (serial, key) not in entries or entries[serial, key] > order:
                raise InvariantError("a living key has no heap entry, or only one behind its place")

    def _compact(self) -> None:
        if len(self._entries) > 2 * len(self._living) + _SLACK:
            self._entries = [(order, serial, key) for key, (order, serial) in self._living.items()]
            heapify(self._entries)
