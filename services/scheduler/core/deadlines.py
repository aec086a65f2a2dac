"""When the next time limit passes, over all live sequences.

Knows limits and times, not queues or lanes; the clock is the caller's. Each token moves the limit between tokens: to
write that down at every token of every sequence would be most of a step's work. So what is kept is a bound: invariant:
a live sequence with a limit that can still pass has exactly one entry here, at its deadline or before; a finished one
has none. Whoever finds that an entry is reached asks for the deadline as it is, and the entry moves there.
"""

from collections.abc import Callable

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
    """true: the deadline of a live sequence as it is, never earlier than what it was set to last."""

    def __init__(self, true: Callable[[SequenceKey], Deadline | None]) -> None:
        self._true = true
        self._heap = KeyedHeap()

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, key: SequenceKey, deadline: Deadline | None) -> None:
        """Replaces the key's entry. None: it has none."""
        if deadline is None:
            self.drop(key)
        else:
            self._heap.set(key, (deadline[0],))

    def drop(self, key: SequenceKey) -> None:
        self._heap.discard(key)

    def get(self, key: SequenceKey) -> Deadline | None:
        return self._true(key) if key in self._heap else None

    def entry(self, key: SequenceKey) -> int | None:
        """No later than its deadline, ns."""
        order = self._heap.order(key)
        return None if order is None else order[0]

    def passed(self, key: SequenceKey, now: int) -> bool:
        entry = self.entry(key)
        return entry is not None and entry <= now and self._look(key, now) is not None

    def next(self) -> int | None:
        """No deadline passes before, ns."""
        first = self._heap.first()
        return None if first is None else first[0][0]

    def pop_due(self, now: int) -> list[tuple[SequenceKey, TimeLimit]]:
        """Removes and returns all that passed, earliest first. A deadline passes when `now` reaches it."""
        due = []
        while (first := self._heap.first()) is not None and first[0][0] <= now:
            _, key = first
            if (deadline := self._look(key, now)) is not None:
                due.append((*deadline, key))
                self.drop(key)
        due.sort(key=lambda passed: passed[0])
        return [(key, limit) for _, limit, key in due]

    def check(self) -> None:
        self._heap.check()

    def _look(self, key: SequenceKey, now: int) -> Deadline | None:
        """Its deadline if that passed; else the entry is where it is."""
        deadline = self._true(key)
        if deadline is not None and deadline[0] <= now:
            return deadline
        self.set(key, deadline)
        return None
