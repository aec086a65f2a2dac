"""The waiting queue: follows one policy, which may be exchanged.

Knows no lanes; time only as an argument to `age`. Invariants: `tokens` and `size_bytes` are sums over those that
wait; each of them has one place in the line of its class (and tenant) and, unless it aged to the end, one date at
which its class changes next. Choosing is O(log n).
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import groupby
from typing import Final

from services.scheduler.core.calls import InvariantError, LaneId, SequenceKey
from services.scheduler.core.keyed_heap import KeyedHeap, Order
from services.scheduler.core.policies.fair import TokenCounters
from services.scheduler.core.policies.policy import AGING_RUNGS, CachedTokens, Policy, class_of
from services.scheduler.core.policies.ranked import Ranked
from services.scheduler.core.sequence import Sequence

WINDOW: Final = 64  # oldest sequences of which the longest cached prefix is chosen

_Flow = tuple[int, str]  # group, tenant ("": all)
_Rank = tuple[int, str, int]  # what the tenant was served, tenant, group


class _Group:
    """Flows of one class. Where each tenant has its own, waiting betters the class of all of them together: else a
    tenant that floods the queue would have the oldest requests, and so the best class, to itself."""

    def __init__(self) -> None:
        self.ranks: list[_Rank] = []  # of its flows, ascending
        self.members: dict[int, int] = {}  # sequences by the class that each has reached; no zeros

    @property
    def number(self) -> int:
        """Of the class: that of its member that waits longest."""
        return min(self.members)


class WaitingQueue:
    def __init__(self, policy: Policy, aging_ns: int, max_passes: int, counters: TokenCounters) -> None:
        self._policy = policy
        self._aging_ns = aging_ns
        self._max_passes = max_passes
        self._counters = counters
        self._places: dict[SequenceKey, tuple[Sequence, _Flow, Order, int]] = {}  # with the tokens counted
        self._flows: dict[_Flow, Ranked] = {}  # none is empty
        self._groups: dict[int, _Group] = {}  # none is empty
        self._order: list[tuple[int, int]] = []  # (class, group), ascending
        self._rank_of: dict[_Flow, _Rank] = {}
        self._groups_of: dict[str, dict[int, None]] = {}  # of each tenant that has flows of its own
        self._tenants: dict[str, int] = {}  # sequences waiting; no zeros
        self._priorities: dict[int, int] = {}  # likewise
        self._aging = KeyedHeap()  # by when the class changes
        self._moves = 0  # how often the order of the flows changed: a walk under way looks at it anew then
        self.tokens = 0
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Sequence]:
        """By the time of entering, not by policy."""
        return iter([sequence for sequence, *_ in self._places.values()])

    def __contains__(self, sequence: Sequence) -> bool:
        place = self._places.get(sequence.key)
        return place is not None and place[0] is sequence

    @property
    def policy(self) -> Policy:
        return self._policy

    @property
    def best_priority(self) -> int:
        """Of those that wait; there is at least one."""
        return max(self._priorities)

    def take(self, sequence: Sequence, cached: int, soon: int) -> None:
        """It is admitted, with so many tokens found in a cache, where a sequence draws `soon` tokens in a moment."""
        sequence.charged = True
        sequence.deposit = self.price(sequence, cached, soon)
        self._counters.deposit(sequence.submission.tenant, sequence.deposit)
        sequence.claimed = None
        self.remove(sequence)

    def price(self, sequence: Sequence, cached: int, soon: int) -> int:
        """What its tenant deposits when it is admitted."""
        prompt, output = sequence.ahead(cached)
        return self._counters.price(sequence.submission.tenant, prompt=prompt, output=output, soon=soon)

    def vacated(self, sequence: Sequence) -> None:
        """It runs no more: its tenant has its deposit back."""
        self._counters.deposit(sequence.submission.tenant, -sequence.deposit)
        sequence.deposit = 0

    def push(self, sequence: Sequence) -> None:
        """New, or back from a lane."""
        tenant = sequence.submission.tenant
        if sequence.deposit:
            self.vacated(sequence)
        if tenant not in self._tenants and not sequence.charged:
            self._counters.returned(tenant, self._tenants)
        self._tenants[tenant] = self._tenants.get(tenant, 0) + 1
        priority = sequence.submission.priority
        self._priorities[priority] = self._priorities.get(priority, 0) + 1
        self._enter(sequence)
        self.tokens += sequence.known
        self.size_bytes += sequence.submission.size_bytes

    def remove(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self.tokens -= sequence.known
        self.size_bytes -= sequence.submission.size_bytes
        priority = sequence.submission.priority
        self._priorities[priority] -= 1
        if not self._priorities[priority]:
            del self._priorities[priority]
        tenant = sequence.submission.tenant
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]
            self._counters.emptied(tenant)

    def forget_claims(self, lane: LaneId) -> None:
        """The lane that made room for them is gone."""
        for sequence, *_ in self._places.values():
            if sequence.claimed == lane:
                sequence.claimed = None

    def follow(self, policy: Policy) -> None:
        """Another policy from now on; what was earned by waiting is counted anew under it."""
        waiting = sorted(self, key=lambda sequence: sequence.arrival)
        for sequence in waiting:
            self._leave(sequence)
        self._policy = policy
        for sequence in waiting:
            sequence.aged, sequence.aged_at = 0, sequence.queued_at
            self._enter(sequence)

    def age(self, now: int) -> None:
        """Moves those whose time has come to a better class; each only a bounded number of times."""
        while (first := self._aging.first()) is not None and first[0][0] <= now:
            sequence = self._places[first[1]][0]
            self._leave(sequence)
            sequence.aged += 1
            sequence.aged_at += self._aging_ns
            self._enter(sequence)

    def next_aging(self) -> int | None:
        first = self._aging.first()
        return None if first is None else first[0][0]

    def ahead(self, sequence: Sequence) -> tuple[int, int]:
        """Sequences that would be before this one, and their tokens. Between tenants of one class that is not settled:
        there all others count."""
        flow, order = self._flow(sequence), self._policy.key(sequence)
        own = class_of(self._policy, sequence)
        if flow[0] in self._groups:
            own = min(own, self._groups[flow[0]].number)
        count = tokens = 0
        for other, line in self._flows.items():
            if other == flow:
                more = line.ahead(order)
            elif self._groups[other[0]].number <= own:
                more = len(line), line.tokens
            else:
                continue
            count, tokens = count + more[0], tokens + more[1]
        return count, tokens

    def walk(self, cached: CachedTokens) -> "Walk":
        return Walk(self, cached)

    def passed_by(self, chosen: Sequence, over: Iterable[Sequence]) -> None:
        """`chosen` is admitted before those in `over` that were there first."""
        for sequence in over:
            if sequence.arrival < chosen.arrival:
                sequence.passed += 1

    def check(self) -> None:
        self._aging.check()
        ranked = 0
        for flow, line in self._flows.items():
            line.check()
            ranked += len(line)
            for sequence in line:
                place = self._places.get(sequence.key)
                if place is None or place[0] is not sequence or place[1] != flow:
                    raise InvariantError(f"{sequence.key} is in line {flow}, and its place is another")
        if ranked != len(self._places) or not all(self._flows.values()):
            raise InvariantError(f"{ranked} are in line, {len(self._places)} wait")
        self._check_ranks()
        tenants: dict[str, int] = {}
        for sequence, flow, _, tokens in self._places.values():
            tenant = sequence.submission.tenant
            tenants[tenant] = tenants.get(tenant, 0) + 1
            if flow != self._flow(sequence) or tokens != sequence.known:
                raise InvariantError(f"{sequence.key} is in line {flow} with {tokens} tokens, and should not be")
            ages = self._ages(sequence)
            if ages != (sequence.key in self._aging):
                raise InvariantError(f"{sequence.key} ages {'no more' if ages else 'for nothing'}")
        if tenants != self._tenants:
            raise InvariantError(f"tenants {self._tenants} are counted, {tenants} wait")
        priorities: dict[int, int] = {}
        for sequence in self:
            priorities[sequence.submission.priority] = priorities.get(sequence.submission.priority, 0) + 1
        if priorities != self._priorities:
            raise InvariantError(f"priorities {self._priorities} are counted, {priorities} wait")
        if self.size_bytes != sum(sequence.submission.size_bytes for sequence in self):
            raise InvariantError(f"the queue counts {self.size_bytes} bytes, and holds others")

    def _check_ranks(self) -> None:
        self._settle()
        ranked = [rank for group in self._groups.values() for rank in group.ranks]
        if self._rank_of.keys() != self._flows.keys() or sorted(ranked) != sorted(self._rank_of.values()):
            raise InvariantError(f"flows {list(self._flows)} are ranked {ranked}")
        for number, group in self._groups.items():
            if group.ranks != sorted(group.ranks) or any(rank[2] != number for rank in group.ranks):
                raise InvariantError(f"group {number} is ranked {group.ranks}")
            members: dict[int, int] = {}
            for flow, line in self._flows.items():
                for sequence in line if flow[0] == number else ():
                    reached = class_of(self._policy, sequence)
                    members[reached] = members.get(reached, 0) + 1
            if members != group.members:
                raise InvariantError(f"group {number} has members {members}, and counts {group.members}")
        if self._order != sorted((group.number, number) for number, group in self._groups.items()):
            raise InvariantError(f"groups {list(self._groups)} are in order {self._order}")

    def _enter(self, sequence: Sequence) -> None:
        policy = self._policy
        flow, order = self._flow(sequence), policy.key(sequence)
        self._count(flow[0], class_of(policy, sequence), 1)
        if flow not in self._flows:
            self._flows[flow] = Ranked()
            self._groups_of.setdefault(flow[1], {})[flow[0]] = None
            self._rank(flow)
        self._flows[flow].add(order, sequence, sequence.known)
        self._places[sequence.key] = (sequence, flow, order, sequence.known)
        if self._ages(sequence):
            self._aging.set(sequence.key, (sequence.aged_at + self._aging_ns,))

    def _leave(self, sequence: Sequence) -> None:
        _, flow, order, tokens = self._places.pop(sequence.key)
        line = self._flows[flow]
        line.remove(order, tokens)
        if not line:
            del self._flows[flow]
            self._unrank(flow)
            del self._groups_of[flow[1]][flow[0]]
            if not self._groups_of[flow[1]]:
                del self._groups_of[flow[1]]
        self._count(flow[0], class_of(self._policy, sequence), -1)
        self._aging.discard(sequence.key)

    def _ages(self, sequence: Sequence) -> bool:
        policy = self._policy
        return policy.base is not None and sequence.aged < AGING_RUNGS and class_of(policy, sequence) > 0

    def _flow(self, sequence: Sequence) -> _Flow:
        policy = self._policy
        if policy.by_tenant:
            return 0 if policy.base is None else policy.base(sequence), sequence.submission.tenant
        return class_of(policy, sequence), ""

    def _count(self, number: int, reached: int, by: int) -> None:
        """`by` more members of a group have reached that class; the group goes to its place among the others."""
        group = self._groups.get(number)
        if group is None:
            group = self._groups[number] = _Group()
            before = None
        else:
            before = group.number
        group.members[reached] = group.members.get(reached, 0) + by
        if not group.members[reached]:
            del group.members[reached]
        after = group.number if group.members else None
        if after is None:
            del self._groups[number]
        if before != after:
            self._moves += 1
            if before is not None:
                del self._order[bisect_left(self._order, (before, number))]
            if after is not None:
                insort(self._order, (after, number))

    def _rank(self, flow: _Flow) -> None:
        served = self._counters.counter(flow[1]) if self._policy.by_tenant else 0
        rank = self._rank_of[flow] = (served, flow[1], flow[0])
        self._moves += 1
        insort(self._groups[flow[0]].ranks, rank)

    def _unrank(self, flow: _Flow) -> None:
        ranks = self._groups[flow[0]].ranks
        self._moves += 1
        del ranks[bisect_left(ranks, self._rank_of.pop(flow))]

    def _settle(self) -> None:
        """Tenants were served since: their flows go to other places."""
        for tenant in self._counters.take_changed():
            if self._policy.by_tenant:
                for number in self._groups_of.get(tenant, ()):
                    self._unrank((number, tenant))
                    self._rank((number, tenant))

    def _in_order(self) -> Iterator[_Rank]:
        """Of all flows: by class, and in a class the tenant served least first. Of use until the next of `_moves`."""
        if len(self._order) == 1:
            yield from self._groups[self._order[0][1]].ranks
            return
        for _, groups in groupby(self._order, key=lambda entry: entry[0]):
            yield from merge(*(self._groups[number].ranks for _, number in groups))


class Walk:
    """One look through the queue, best first. Between two calls of `next` the last one given may be removed."""

    def __init__(self, queue: WaitingQueue, cached: CachedTokens) -> None:
        self._queue = queue
        self._cached = cached
        self._reached: dict[_Flow, Order] = {}
        self._window: list[tuple[int, Sequence]] = []  # (cached tokens, sequence), by age
        self._last: tuple[_Flow, Sequence] | None = None
        self._left: set[int] = set()  # groups; asked for members only
        self._ranks: Iterator[_Rank] = iter(())  # of the flows behind the one that the walk is in
        self._rank: _Rank | None = None  # of that one
        self._moves = -1  # of the queue, when they were looked at

    def leave_group(self) -> None:
        """The others of the class that the last one was of are left out: in a class of tenants' lines, of its priority;
        else only if it did not get there by waiting, since then some of another priority may be among them."""
        if self._last is not None and (self._queue._policy.by_tenant or not self._last[1].aged):
            self._left.add(self._last[0][0])

    def next(self) -> Sequence | None:
        return self._next_cached() if self._queue._policy.prefers_cached else self._next_in_line()

    def admitted(self, chosen: Sequence) -> None:
        """Whoever is older and not chosen for its prefix was passed."""
        self._queue.passed_by(chosen, (sequence for _, sequence in self._window))

    def _next_in_line(self) -> Sequence | None:
        queue = self._queue
        queue._settle()
        if self._moves != queue._moves:
            self._moves, self._ranks = queue._moves, queue._in_order()
            self._rank = next(self._ranks, None)
        while self._rank is not None:
            _, tenant, number = self._rank
            flow = (number, tenant)
            entry = None if number in self._left else queue._flows[flow].after(self._reached.get(flow))
            if entry is not None:
                self._reached[flow], sequence = entry
                self._last = (flow, sequence)
                return sequence
            self._rank = next(self._ranks, None)
        return None

    def _next_cached(self) -> Sequence | None:
        if not self._window:
            for _ in range(WINDOW):
                sequence = self._next_in_line()
                if sequence is None:
                    break
                self._window.append((self._cached(sequence), sequence))
            if not self._window:
                return None
        bound = self._queue._max_passes
        # Those passed as often as may be come first, by age; then the longest cached prefix, by age.
        index = min(
            range(len(self._window)),
            key=lambda at: (
                (0, 0, self._window[at][1].arrival)
                if self._window[at][1].passed >= bound
                else (1, -self._window[at][0], self._window[at][1].arrival)
            ),
        )
        return self._window.pop(index)[1]
