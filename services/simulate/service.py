"""What tenants were given while they were backlogged: the measure of a fair scheduler.

Service is counted as the policy fair counts it (core/policies/fair.py): uncached prompt tokens when a step with them is
planned, twice the output tokens when they are drawn, over the tenant's weight. Two tenants can be compared over a
window in which both have somebody waiting all the time; who wants less than its share is given less. Pure.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

BIN_NS: Final = 1_000_000_000
WINDOW_BINS: Final = 30  # 30 s; a window begins with each bin
PROMPT_COST: Final = 1  # a token, as in the policy
OUTPUT_COST: Final = 2


@dataclass(slots=True)
class _Account:
    given: dict[int, int] = field(default_factory=dict)  # tokens by cost, by bin
    idle: dict[int, None] = field(default_factory=dict)  # bins in part of which nobody waited
    waiting: int = 0
    since: int = 0  # when the number that waits became what it is, from or to 0


class Service:
    """Of each tenant, by bins of a second. Times come in order, for one tenant's waiting."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def prompt(self, tenant: str, now: int, tokens: int) -> None:
        self._give(tenant, now // BIN_NS, tokens * PROMPT_COST)

    def drawn(self, tenant: str, times: Sequence[int]) -> None:
        """A token at each of the times, which ascend."""
        at = 0
        while at < len(times):
            number = times[at] // BIN_NS
            following = bisect_left(times, (number + 1) * BIN_NS, lo=at)
            self._give(tenant, number, (following - at) * OUTPUT_COST)
            at = following

    def waits(self, tenant: str, now: int, change: int) -> None:
        account = self._account(tenant)
        if not account.waiting:
            self._idle(account, now)
        account.waiting += change
        if not account.waiting:
            account.since = now

    def tenants(self, until: int) -> "dict[str, Served]":
        """By name."""
        made = {}
        for name, account in sorted(self._accounts.items()):
            if not account.waiting:
                self._idle(account, until)
            bins = range(until // BIN_NS)
            made[name] = Served(
                tuple(account.given.get(number, 0) for number in bins),
                tuple(number not in account.idle for number in bins),
            )
        return made

    def _give(self, tenant: str, number: int, cost: int) -> None:
        given = self._account(tenant).given
        given[number] = given.get(number, 0) + cost

    def _idle(self, account: _Account, now: int) -> None:
        account.idle.update(dict.fromkeys(range(account.since // BIN_NS, now // BIN_NS + 1)))
        account.since = now

    def _account(self, tenant: str) -> _Account:
        return self._accounts.setdefault(tenant, _Account())


@dataclass(frozen=True, slots=True)
class Served:
    """Of one tenant, a whole bin of the run each. `backlogged`: somebody of it waited all the time."""

    given: tuple[int, ...]
    backlogged: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Balance:
    """Over all windows in which two tenants or more were backlogged. worst: the largest difference of weighted service
    in one of them, as a share of the largest service in it; None where there was no such window."""

    windows: int
    worst: float | None
    worst_at_ns: int


def balance(served: Mapping[str, Served], weights: Mapping[str, float]) -> Balance:
    """weights: those that are not 1."""
    names = list(served)
    bins = min((len(one.given) for one in served.values()), default=0)
    given = [list(accumulate(served[name].given, initial=0)) for name in names]
    idle = [list(accumulate((not one for one in served[name].backlogged), initial=0)) for name in names]
    windows, worst, worst_at = 0, None, 0
    for begin in range(bins - WINDOW_BINS + 1):
        end = begin + WINDOW_BINS
        amounts = [
            (given[index][end] - given[index][begin]) / weights.get(name, 1.0)
            for index, name in enumerate(names)
            if idle[index][end] == idle[index][begin]
        ]
        if len(amounts) < 2 or not max(amounts):
            continue
        windows += 1
        difference = (max(amounts) - min(amounts)) / max(amounts)
        if worst is None or difference > worst:
            worst, worst_at = difference, begin * BIN_NS
    return Balance(windows, worst, worst_at)
