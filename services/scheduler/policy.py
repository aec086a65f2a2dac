"""In which order sequences leave the queue: a table of policies, and the queue that follows one of them.

A policy is a function of one sequence to a tuple; the lowest leaves first. It is computed when the sequence enters
the queue. The queue knows no lanes. Invariant: `tokens` is the sum of the known lengths of those that wait.
"""

from collections.abc import Callable, Iterator

from services.scheduler.calls import SequenceKey
from services.scheduler.keyed_heap import KeyedHeap, Order
from services.scheduler.sequence import Sequence

Policy = Callable[[Sequence], Order]


def fcfs(sequence: Sequence) -> Order:
    """First come, first served. A preempted sequence comes back at its arrival rank, so it is next."""
    return (sequence.arrival,)


POLICIES: dict[str, Policy] = {"fcfs": fcfs}


class WaitingQueue:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap = KeyedHeap()
        self._sequences: dict[SequenceKey, Sequence] = {}  # same keys as the heap
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """By the time of entering, not by policy."""
        return iter(self._sequences.values())

    def __contains__(self, sequence: Sequence) -> bool:
        return self._sequences.get(sequence.key) is sequence

    def push(self, sequence: Sequence) -> None:
        self._sequences[sequence.key] = sequence
        self._heap.set(sequence.key, self._policy(sequence))
        self.tokens += sequence.known

    def remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.key]
        self._heap.discard(sequence.key)
        self.tokens -= sequence.known

    def first(self) -> Sequence | None:
        first = self._heap.first()
        return None if first is None else self._sequences[first[1]]

    def check(self) -> None:
        self._heap.check()
