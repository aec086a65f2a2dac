"""The KV events of this scheduler, numbered and kept for a while, so that a watcher who was away can catch up.

Owned by the engine; watchers only read. Bounded by the keys that it holds, not by the events. Invariant: numbers
count up by 1 from 1 without a gap, and the kept ones are the latest.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from services.errors import FailedPrecondition, InvalidArgument
from services.scheduler.core.calls import KvEvent, KvRemoved, KvStored


@dataclass(frozen=True, slots=True)
class Numbered:
    sequence: int
    event: KvEvent
    executor: str


class KvEventLog:
    """most_keys: block keys kept, the latest event always among them."""

    def __init__(self, most_keys: int) -> None:
        self._most_keys = most_keys
        self._kept: deque[Numbered] = deque()
        self._keys = 0
        self._last = 0
        self._grown = asyncio.Event()

    @property
    def next(self) -> int:
        """The number of the event to come."""
        return self._last + 1

    @property
    def oldest(self) -> int:
        """The number from which on events are kept."""
        return self._kept[0].sequence if self._kept else self.next

    def add(self, event: KvEvent, executor: str) -> None:
        """executor: its target."""
        self._last += 1
        self._kept.append(Numbered(self._last, event, executor))
        self._keys += _size(event)
        while self._keys > self._most_keys and len(self._kept) > 1:
            self._keys -= _size(self._kept.popleft().event)
        self._grown.set()

    def watch(self, first: int | None) -> AsyncIterator[Numbered]:
        """Events from number `first` on (None: new ones only), without end.

        Raises FailedPrecondition naming the oldest where `first` is no longer kept, and to a watcher who falls so far
        behind; InvalidArgument for a number that is yet to come.
        """
        if first is not None and first > self.next:
            raise InvalidArgument(
                f"from_sequence is {first}; the next event is {self.next}", field="from_sequence", limit=self.next
            )
        at = self.next if first is None else first
        self._require_kept(at)
        return self._follow(at)

    async def _follow(self, at: int) -> AsyncIterator[Numbered]:
        while True:
            while at < self.next:
                self._require_kept(at)
                yield self._kept[at - self.oldest]
                at += 1
            self._grown.clear()
            await self._grown.wait()

    def _require_kept(self, first: int) -> None:
        if first < self.oldest:
            raise FailedPrecondition(
                f"event {first} is no longer kept; the oldest is {self.oldest}",
                reason="EVENTS_GONE",
                field="from_sequence",
                limit=self.oldest,
            )


def _size(event: KvEvent) -> int:
    return len(event.keys) if isinstance(event, KvStored | KvRemoved) else 1
