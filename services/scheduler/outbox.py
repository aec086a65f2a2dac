"""What waits between the engine and the reader of one stream.

Bounded: a reader who falls behind gets its tokens in fewer, longer deltas, and one who stays behind loses its request.
Nobody else is delayed, since putting never waits. Time is an argument.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum

from executor.step import TokenLogprobs
from services.errors import ServiceError
from services.scheduler.endings import Completed


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens of one answer to deliver, in order."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    index: int = 0

    def first(self, count: int) -> "Drawn":
        return Drawn(self.token_ids[:count], self.logprobs[:count], self.index)


@dataclass(frozen=True, slots=True)
class Scored:
    """Logprobs of the prompt's tokens from `first` on, where 0 is its second token."""

    first: int
    logprobs: tuple[TokenLogprobs, ...]

    def behind(self, count: int) -> "Scored":
        """What of it comes behind the first `count`."""
        return Scored(max(self.first, count), self.logprobs[max(0, count - self.first) :])


@dataclass(frozen=True, slots=True)
class Ended:
    """One answer is complete."""

    index: int
    completed: Completed


class Whole(Enum):
    """All answers are."""

    WHOLE = "whole"


Event = Drawn | Scored | Ended
End = Whole | ServiceError


class Outbox:
    """Events, then one end.

    capacity: tokens that wait as deltas of their own; more are joined to their answer's last delta.
    patience_ns: how long the reader may stay at capacity before `overdue` says so.
    """

    def __init__(self, capacity: int, patience_ns: int) -> None:
        self._capacity = capacity
        self._patience_ns = patience_ns
        self._waiting: dict[int, Event] = {}  # by a number that grows
        self._order: deque[int] = deque()
        self._last: dict[int, int] = {}  # the number of each answer's last delta that waits
        self._number = 0
        self._tokens = 0
        self._full_since: int | None = None
        self._end: End | None = None

    @property
    def ended(self) -> bool:
        return self._end is not None

    def put(self, event: Event, now: int) -> None:
        if not isinstance(event, Drawn):
            self._append(event)
            return
        number = self._last.get(event.index)
        last = None if number is None else self._waiting[number]
        if number is not None and isinstance(last, Drawn) and self._tokens >= self._capacity:
            joined = Drawn(last.token_ids + event.token_ids, last.logprobs + event.logprobs, event.index)
            self._waiting[number] = joined
        else:
            self._append(event)
            self._last[event.index] = self._number
        self._tokens += len(event.token_ids)
        if self._tokens >= self._capacity and self._full_since is None:
            self._full_since = now

    def end(self, end: End) -> None:
        """The first one stands."""
        if self._end is None:
            self._end = end

    def overdue(self, now: int) -> bool:
        return self._full_since is not None and now - self._full_since > self._patience_ns

    def take(self) -> Event | End | None:
        """The next thing to write; None while there is nothing. An end stays."""
        if not self._order:
            return self._end
        number = self._order.popleft()
        event = self._waiting.pop(number)
        if isinstance(event, Drawn):
            if self._last.get(event.index) == number:
                del self._last[event.index]
            self._tokens -= len(event.token_ids)
            if self._tokens < self._capacity:
                self._full_since = None
        return event

    def _append(self, event: Event) -> None:
        self._number += 1
        self._waiting[self._number] = event
        self._order.append(self._number)
