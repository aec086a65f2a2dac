"""In which order sequences leave the queue: a table of policies.

A policy is a row of pure functions of one sequence and a few yes-or-no traits; nothing here changes anything or knows
the queue, lanes or time. All rows are made of the same three steps. *Class*: an integer from 0 (soonest) up; waiting
lowers it to 0 in AGING_RUNGS equal rungs, so nobody starves and a sequence is re-keyed at most that often. *Flow*: in
a class all wait in one line, or each tenant in its own and the tenant served least comes first. *Key*: the order in
a line.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from services.scheduler.core.deadlines import earliest
from services.scheduler.core.keyed_heap import Order
from services.scheduler.core.limits import TOP_PRIORITY
from services.scheduler.core.sequence import Sequence

AGING_RUNGS: Final = 4
SIZE_CLASS: Final = 64  # tokens: whose lengths are nearer than that are served by arrival

CachedTokens = Callable[[Sequence], int]  # of its known tokens, how many a lane has computed for others already


class Batching(Enum):
    CONTINUOUS = "continuous"  # anyone joins and leaves at every step
    COMPACT = "compact"  # nobody joins before the whole batch has ended; a row that ended costs nothing
    PADDED = "padded"  # likewise; a row that ended goes on costing a token of every step, and keeps its slot


@dataclass(frozen=True, slots=True)
class Policy:
    key: Callable[[Sequence], Order]  # ends with the arrival, so it is unique
    base: Callable[[Sequence], int] | None = None  # class at enqueue; None: all in class 0, and nobody ages
    by_priority: bool = False  # the class is the priority's, and protects a running sequence too
    preempts: bool = False  # a higher priority takes slots and blocks from running work of a strictly lower class
    by_tenant: bool = False
    prefers_cached: bool = False  # of the oldest ones, the longest cached prefix first
    refuses_late: bool = False  # a submission that can't make its limits is refused
    batching: Batching = Batching.CONTINUOUS
    gives_way: bool = False  # a running prompt leaves its part of a step to a shorter one that waits
    reserves: bool = False  # blocks for the whole need are held from admission on


def by_arrival(sequence: Sequence) -> Order:
    """A preempted sequence comes back at its arrival rank, so it is next."""
    return (sequence.arrival,)


def by_deadline(sequence: Sequence) -> Order:
    """Its earliest time limit; those without one come last."""
    deadline = earliest(
        sequence.submission.limits,
        sequence.submitted_at,
        admitted=sequence.admitted,
        last_token_at=sequence.last_token_at,
    )
    return (1, 0, sequence.arrival) if deadline is None else (0, deadline[0], sequence.arrival)


def priority_class(sequence: Sequence) -> int:
    return max(0, TOP_PRIORITY - sequence.submission.priority)


def size_class(sequence: Sequence) -> int:
    """Linear in the tokens to compute, so that a rung of aging takes a quarter of the prompt's length off: with classes
    of doublings it would take a quarter of the logarithm, and a long prompt overtook most short ones after one rung."""
    return sequence.known // SIZE_CLASS


POLICIES: Final[dict[str, Policy]] = {
    "fcfs": Policy(by_arrival),
    "priority": Policy(by_arrival, base=priority_class, by_priority=True, preempts=True),
    "fair": Policy(by_arrival, base=priority_class, by_priority=True, preempts=True, by_tenant=True),
    "deadline": Policy(by_deadline, refuses_late=True),
    "shortest": Policy(by_arrival, base=size_class, gives_way=True),
    "cache": Policy(by_arrival, prefers_cached=True),
    # Baselines, for measurements only.
    "static-padded": Policy(by_arrival, batching=Batching.PADDED),
    "static-compact": Policy(by_arrival, batching=Batching.COMPACT),
    "reserve": Policy(by_arrival, reserves=True),
}


def policy_named(name: str) -> Policy:
    """Raises ValueError."""
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is unknown; there are {', '.join(POLICIES)}")
    return POLICIES[name]


def class_of(policy: Policy, sequence: Sequence) -> int:
    """The class now: 0 once it has aged to the end, whatever it began with."""
    if policy.base is None:
        return 0
    base = policy.base(sequence)
    return base - base * min(sequence.aged, AGING_RUNGS) // AGING_RUNGS


def protection(policy: Policy, sequence: Sequence) -> int:
    """First part of a running sequence's rank, lower is better: what it aged to is kept while it runs."""
    if policy.by_priority:
        return class_of(policy, sequence) - TOP_PRIORITY
    return -sequence.submission.priority


def claim(sequence: Sequence) -> int:
    """What a waiting sequence must be strictly below to preempt: its own priority. Waiting long wins places that get
    free, and never takes them: so two can't take turns at preempting each other."""
    return max(0, TOP_PRIORITY - sequence.submission.priority) - TOP_PRIORITY
