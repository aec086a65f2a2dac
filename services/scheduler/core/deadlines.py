"""When the next time limit passes, over all live sequences.

Knows limits and times, not queues or lanes; the clock is the caller's. Invariant: a live sequence with a limit that
can still pass has exactly one deadline here, its earliest; a finished one has none.
"""

from services.scheduler.core.calls import Limits, SequenceKey, TimeLimit
from services.scheduler.core.keyed_heap import KeyedHeap

Deadline = tuple[int, TimeLimit]  # ns, and which limit it is


def earliest(limits: Limits, submitted_at: int, *, admitted: bool, last_token_at: int | None) -> Deadline | None:
    """The deadline of a sequence now. The queue limit counts until the first admission; preemption does not revive it.

    Of two at the same time the earlier phase is named.
    """
    when: int | None = None
    kind = TimeLimit.TOTAL
    if limits.queue_ns is not None and not admitted:
        when, kind = submitted_at + limits.queue_ns, TimeLimit.QUEUE
    if last_token_at is None:
        if limits.first_token_ns is not None and (when is None or submitted_at + limits.first_token_ns < when):
            when, kind = submitted_at + limits.first_token_ns, TimeLimit.FIRST_TOKEN
    elif limits.between_tokens_ns is not None and (when is None or last_token_at + limits.between_tokens_ns < when):
        when, kind = last_token_at + limits.between_tokens_ns, TimeLimit.BETWEEN_TOKENS
    if limits.total_ns is not None and (when is None or submitted_at + limits.total_ns < when):
        when, kind = submitted_at + limits.total_ns, TimeLimit.TOTAL
    return None if when is None else (when, kind)


class Deadlines:
    def __init__(self) -> None:
        self._heap = KeyedHeap()
        self._limits: dict[SequenceKey, TimeLimit] = {}  # same keys as the heap

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, key: SequenceKey, deadline: Deadline | None) -> None:
        """Replaces the key's deadline. None: it has none."""
        if deadline is None:
            self.drop(key)
            return
        when, limit = deadline
        self._limits[key] = limit
        self._heap.set(key, (when,))

    def drop(self, key: SequenceKey) -> None:
        self._heap.discard(key)
        self._limits.pop(key, None)

    def get(self, key: SequenceKey) -> Deadline | None:
        order = self._heap.order(key)
        return None if order is None else (order[0], self._limits[key])

    def passed(self, key: SequenceKey, now: int) -> bool:
        order = self._heap.order(key)
        return order is not None and order[0] <= now

    def next(self) -> int | None:
        first = self._heap.first()
        return None if first is None else first[0][0]

    def pop_due(self, now: int) -> list[tuple[SequenceKey, TimeLimit]]:
        """Removes and returns all that passed, earliest first. A deadline passes when `now` reaches it."""
        due = []
        while (first := self._heap.first()) is not None and first[0][0] <= now:
            _, key = first
            due.append((key, self._limits[key]))
            self.drop(key)
        return due

    def check(self) -> None:
        self._heap.check()
