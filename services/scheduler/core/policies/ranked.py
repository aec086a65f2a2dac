"""Sequences in ascending order, with the count and the tokens of all that precede one.

Knows neither policies nor time. A list cut into runs of bounded length, each with the sum of its tokens: finding a
place is two binary searches, moving neighbours happens inside one run, sums are taken over runs. Invariant: runs are
never empty, never longer than 2 * RUN, and ascending within and between; orders are unique.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from services.scheduler.core.calls import InvariantError
from services.scheduler.core.keyed_heap import Order
from services.scheduler.core.sequence import Sequence

RUN: Final = 256

Entry = tuple[Order, Sequence]


class Ranked:
    def __init__(self) -> None:
        self._runs: list[list[Entry]] = []
        self._lasts: list[Order] = []  # the last order of each run
        self._tokens: list[int] = []  # of each run
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        for run in self._runs:
            for _, sequence in run:
                yield sequence

    def add(self, order: Order, sequence: Sequence, tokens: int) -> None:
        self._size += 1
        if not self._runs:
            self._runs.append([(order, sequence)])
            self._lasts.append(order)
            self._tokens.append(tokens)
            return
        at = min(bisect_left(self._lasts, order), len(self._runs) - 1)
        run = self._runs[at]
        insort(run, (order, sequence), key=_order)
        self._tokens[at] += tokens
        self._lasts[at] = run[-1][0]
        if len(run) > 2 * RUN:
            self._split(at)

    def remove(self, order: Order, tokens: int) -> None:
        """`order` is there, with so many tokens."""
        at = bisect_left(self._lasts, order)
        run = self._runs[at] if at < len(self._runs) else []
        index = bisect_left(run, order, key=_order)
        if index == len(run) or run[index][0] != order:
            raise InvariantError(f"nothing waits at {order}")
        del run[index]
        self._size -= 1
        self._tokens[at] -= tokens
        if run:
            self._lasts[at] = run[-1][0]
        else:
            del self._runs[at], self._lasts[at], self._tokens[at]

    @property
    def tokens(self) -> int:
        return sum(self._tokens)

    def after(self, order: Order | None) -> Entry | None:
        """The first behind `order`, which need not be there any more. None: the very first."""
        if order is None:
            return self._runs[0][0] if self._runs else None
        at = bisect_right(self._lasts, order)
        if at == len(self._runs):
            return None
        run = self._runs[at]
        return run[bisect_right(run, order, key=_order)]

    def ahead(self, order: Order) -> tuple[int, int]:
        """How many are before `order`, and their tokens."""
        at = bisect_left(self._lasts, order)
        count, tokens = sum(map(len, self._runs[:at])), sum(self._tokens[:at])
        if at < len(self._runs):
            run = self._runs[at]
            index = bisect_left(run, order, key=_order)
            count += index
            tokens += sum(sequence.known for _, sequence in run[:index])
        return count, tokens

    def check(self) -> None:
        orders = [order for run in self._runs for order, _ in run]
        if any(one >= other for one, other in pairwise(orders)):
            raise InvariantError(f"the ranks are out of order: {orders}")
        if self._lasts != [run[-1][0] for run in self._runs if run] or any(len(run) > 2 * RUN for run in self._runs):
            raise InvariantError("the runs are not what their bounds say")
        if self._tokens != [sum(sequence.known for _, sequence in run) for run in self._runs]:
            raise InvariantError("the tokens of a run are not the sum of its sequences'")
        if self._size != len(orders):
            raise InvariantError(f"{self._size} are counted, {len(orders)} are ranked")

    def _split(self, at: int) -> None:
        run = self._runs[at]
        low, high = run[:RUN], run[RUN:]
        self._runs[at : at + 1] = [low, high]
        self._lasts[at : at + 1] = [low[-1][0], high[-1][0]]
        self._tokens[at : at + 1] = [sum(sequence.known for _, sequence in part) for part in (low, high)]


def _order(entry: Entry) -> Order:
    return entry[0]
