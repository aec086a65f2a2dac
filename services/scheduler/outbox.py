"""What waits between the engine and the reader of one stream.

Bounded: a reader who falls behind gets its tokens in fewer, longer deltas, and one who stays behind loses its request.
Nobody else is delayed, since putting never waits. Time is an argument.
"""

from collections import deque
from dataclasses import dataclass

from executor.step import TokenLogprobs
from services.scheduler.endings import Ending


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens to deliver, in order."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()

    def first(self, count: int) -> "Drawn":
        return Drawn(self.token_ids[:count], self.logprobs[:count])


class Outbox:
    """Deltas, then one ending.

    capacity: tokens that wait as deltas of their own; more are joined to the last delta.
    patience_ns: how long the reader may stay at capacity before `overdue` says so.
    """

    def __init__(self, capacity: int, patience_ns: int) -> None:
        self._capacity = capacity
        self._patience_ns = patience_ns
        self._waiting: deque[Drawn] = deque()
        self._tokens = 0
        self._full_since: int | None = None
        self._ending: Ending | None = None

    @property
    def ended(self) -> bool:
        return self._ending is not None

    def put(self, drawn: Drawn, now: int) -> None:
        if self._tokens >= self._capacity:
            last = self._waiting.pop()
            drawn = Drawn(last.token_ids + drawn.token_ids, last.logprobs + drawn.logprobs)
            self._tokens -= len(last.token_ids)
        self._waiting.append(drawn)
        self._tokens += len(drawn.token_ids)
        if self._tokens >= self._capacity and self._full_since is None:
            self._full_since = now

    def end(self, ending: Ending) -> None:
        """The first ending stands."""
        if self._ending is None:
            self._ending = ending

    def overdue(self, now: int) -> bool:
        return self._full_since is not None and now - self._full_since > self._patience_ns

    def take(self) -> Drawn | Ending | None:
        """The next thing to write; None while there is nothing. An ending stays."""
        if not self._waiting:
            return self._ending
        drawn = self._waiting.popleft()
        self._tokens -= len(drawn.token_ids)
        if self._tokens < self._capacity:
            self._full_since = None
        return drawn
