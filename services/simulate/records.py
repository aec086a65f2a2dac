"""What happened to every request of a run, in columns: a million requests take some 80 MB.

Pure. Knows emissions of the core and the virtual clock, nothing of policies. Invariant: a request that was submitted
has exactly one outcome at the end of a run.
"""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from services.scheduler.core.calls import Finished, Reason
from services.simulate.load import Request
from services.simulate.service import Served

NEVER: Final = -1  # in a column of times


class Outcome(IntEnum):
    LIVE = 0
    SERVED = 1  # to its end
    CUT = 2  # a time limit after the first token
    EXPIRED = 3  # a time limit before it
    REFUSED = 4  # at submission: the queue was full
    UNFIT = 5  # no executor can ever hold it


_OUTCOMES: Final[Mapping[Reason, Outcome]] = {
    Reason.STOP: Outcome.SERVED,
    Reason.LENGTH: Outcome.SERVED,
    Reason.TIME_LIMIT: Outcome.CUT,
    Reason.DEADLINE: Outcome.EXPIRED,
    Reason.DOES_NOT_FIT: Outcome.UNFIT,
}


def _column() -> "array[int]":
    return array("q")


@dataclass(slots=True)
class Records:
    """One entry a request in each column, by the number of its arrival. Times in ns, NEVER where it did not happen."""

    submitted: "array[int]" = field(default_factory=_column)
    first: "array[int]" = field(default_factory=_column)
    last: "array[int]" = field(default_factory=_column)  # its last token
    ended: "array[int]" = field(default_factory=_column)
    prompt: "array[int]" = field(default_factory=_column)
    delivered: "array[int]" = field(default_factory=_column)
    cached: "array[int]" = field(default_factory=_column)  # prompt tokens
    preemptions: "array[int]" = field(default_factory=_column)
    recomputed: "array[int]" = field(default_factory=_column)  # tokens
    tenant: "array[int]" = field(default_factory=_column)  # index into `tenants`
    outcome: bytearray = field(default_factory=bytearray)
    tenants: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.outcome)

    def arrive(self, request: Request, now: int) -> int:
        """The number of a new request."""
        self.submitted.append(now)
        self.prompt.append(request.prompt_len)
        for column in (self.first, self.last, self.ended):
            column.append(NEVER)
        for column in (self.delivered, self.cached, self.preemptions, self.recomputed):
            column.append(0)
        self.tenant.append(self.tenants.setdefault(request.tenant, len(self.tenants)))
        self.outcome.append(Outcome.LIVE)
        return len(self.outcome) - 1

    def refuse(self, number: int, outcome: Outcome, now: int) -> None:
        self.outcome[number] = outcome
        self.ended[number] = now

    def token(self, number: int, now: int) -> None:
        if self.first[number] == NEVER:
            self.first[number] = now
        self.last[number] = now

    def end(self, number: int, finished: Finished, now: int) -> None:
        if self.outcome[number] != Outcome.LIVE:
            raise RuntimeError(f"request {number} ends twice")
        usage = finished.usage
        self.outcome[number] = _OUTCOMES[finished.reason]
        self.ended[number] = now
        self.delivered[number] = usage.delivered
        self.cached[number] = usage.cached_tokens
        self.preemptions[number] = usage.preemptions
        self.recomputed[number] = usage.recomputed_tokens


@dataclass(frozen=True, slots=True)
class Point:
    """Means over one bin of time that begins at `at_ns`."""

    at_ns: int
    waiting: float
    running: float


class Timeline:
    """How many waited and ran, as means over bins. When the bins run out, two become one: memory is bounded.

    `change` is to be told of every change, in the order of time.
    """

    def __init__(self, bins: int = 1024, width_ns: int = 100_000_000) -> None:
        self._limit = bins
        self._width = width_ns
        self._sums: list[list[int]] = []  # a bin: [waiting * ns, running * ns]
        self._since = 0
        self._waiting = 0
        self._running = 0
        self.peak_waiting = 0

    def change(self, now: int, waiting: int, running: int) -> None:
        self._spread(now)
        self._waiting, self._running = waiting, running
        self.peak_waiting = max(self.peak_waiting, waiting)

    def points(self, until: int) -> list[Point]:
        self._spread(until)
        width = self._width
        return [
            Point(index * width, waiting / width, running / width)
            for index, (waiting, running) in enumerate(self._sums)
        ]

    def _spread(self, now: int) -> None:
        while self._since < now:
            index = self._since // self._width
            if index >= self._limit:
                self._halve()
                continue
            while len(self._sums) <= index:
                self._sums.append([0, 0])
            until = min(now, (index + 1) * self._width)
            cell = self._sums[index]
            cell[0] += self._waiting * (until - self._since)
            cell[1] += self._running * (until - self._since)
            self._since = until

    def _halve(self) -> None:
        sums, self._width = self._sums, 2 * self._width
        self._sums = [
            [sum(cell[0] for cell in sums[index : index + 2]), sum(cell[1] for cell in sums[index : index + 2])]
            for index in range(0, len(sums), 2)
        ]


@dataclass(frozen=True, slots=True)
class Run:
    """All that a run leaves."""

    records: Records
    timeline: tuple[Point, ...]
    peak_waiting: int
    last_arrival_ns: int
    end_ns: int
    steps: int
    step_tokens: int
    preemptions: int
    busy_ns: tuple[int, ...]  # an executor
    served: Mapping[str, Served]  # by tenant; empty where it was not asked for


Selector = Callable[[int], bool]
