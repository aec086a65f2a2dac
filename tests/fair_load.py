"""Two tenants that both always have work waiting, on a virtual clock: what each is served, step by step.

Service is what tenants pay for, where it really happens: a prompt position when a step first computes it (those found
in the cache never), a token when it is delivered. Derived from plans and emissions, not from the core's accounts.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

from services.scheduler.core.calls import CoreConfig, LaneSpec, Plan, SequenceOutcome, StepOutcome, Submission, Tokens
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.limits import TenantQuota

SECOND = 1_000_000_000
STEP_NS = 12_000_000  # of every step
TOKEN_NS = 60_000  # more for each position in it

Lengths = Callable[[random.Random], tuple[int, int]]  # tokens: prompt, answer


@dataclass(frozen=True)
class Tenant:
    """rate: requests a second. asked: of the answer, that max_tokens is told to be; None: its true length."""

    lengths: Lengths
    rate: float
    weight: float = 1.0
    begins_s: float = 0.0
    asked: int | None = None
    shared: int = 0  # tokens at the head of each of its prompts that are the same
    priority: int = 0


@dataclass
class Served:
    """`at`: nanoseconds, ascending; `of`: what each tenant was served since the start at those times, over its weight;
    `waits`: whether each had something waiting."""

    at: list[int] = field(default_factory=list)
    of: dict[str, list[float]] = field(default_factory=dict)
    waits: dict[str, list[bool]] = field(default_factory=dict)
    admissions: int = 0
    preemptions: int = 0

    def windows(self, window_s: float = 30.0) -> Iterator[tuple[int, int]]:
        """First and last index of each in which both wait without a break."""
        first, broken = 0, -1
        for index, now in enumerate(self.at):
            if not all(waits[index] for waits in self.waits.values()):
                broken = index
            while self.at[first] < now - window_s * SECOND:
                first += 1
            if first > 0 and first - 1 > broken:
                yield first - 1, index

    def total(self) -> float:
        return sum(served[-1] for served in self.of.values())

    def worst(self) -> float:
        """Over all windows, the most by which one was served less, as a share of what the other was."""
        one, other = self.of.values()
        worst = 0.0
        for first, last in self.windows():
            served = (one[last] - one[first], other[last] - other[first])
            worst = max(worst, 1 - min(served) / max(served))
        return worst


@dataclass
class _Request:
    tenant: str
    prompt: int
    answer: int
    computed: int = 0  # prompt positions that were computed or found
    drawn: int = 0
    ended: bool = False


def serve(
    tenants: Mapping[str, Tenant],
    spec: LaneSpec,
    *,
    seconds: float,
    lanes: int = 1,
    config: Mapping[str, object] | None = None,
    seed: int = 1,
) -> Served:
    quotas = {name: TenantQuota(weight=tenant.weight) for name, tenant in tenants.items()}
    core = SchedulerCore(
        CoreConfig(
            **{  # type: ignore[arg-type]
                "policy": "fair",
                "quotas": quotas,
                "max_queued_requests": 1_000_000,
                "max_queued_tokens": 1 << 40,
                **(config or {}),
            }
        )
    )
    chance = random.Random(seed)
    requests: dict[str, _Request] = {}
    serial = count()
    served = dict.fromkeys(tenants, 0.0)
    waiting = dict.fromkeys(tenants, 0)
    arrivals = {name: int(tenant.begins_s * SECOND) for name, tenant in tenants.items()}
    story = Served(of={name: [] for name in tenants}, waits={name: [] for name in tenants})
    flights: dict[str, deque[Plan]] = {f"lane-{number}": deque() for number in range(lanes)}
    free_at = dict.fromkeys(flights, 0)
    for lane in flights:
        core.attach(lane, spec, 0)

    def submit(name: str, now: int) -> None:
        tenant = tenants[name]
        prompt, answer = tenant.lengths(chance)
        key = f"{name}{next(serial)}"
        requests[key] = _Request(name, prompt, answer)
        blocks = prompt // spec.block_size
        keys = tuple(
            f"{name if (index + 1) * spec.block_size <= tenant.shared else key}-{index}".encode()
            for index in range(blocks)
        )
        core.submit(
            Submission(
                key,
                name,
                prompt,
                tenant.asked or answer,
                priority=tenant.priority,
                block_keys=keys,
                key_block_size=spec.block_size,
            ),
            now,
        )
        waiting[name] += 1

    def note_plan(plan: Plan) -> None:
        for one in plan.preempted:
            waiting[requests[one.key].tenant] += 1
            story.preemptions += 1
        for one in plan.admitted:
            waiting[requests[one.key].tenant] -= 1
            story.admissions += 1
            request = requests[one.key]
            request.computed = max(request.computed, min(one.cached_tokens, request.prompt))

    def note_results(plan: Plan, lane: str, now: int) -> None:
        outcomes = []
        for piece in plan.slices:
            request = requests[piece.key]
            end = min(piece.start + piece.count, request.prompt)
            if end > request.computed:
                served[request.tenant] += (end - request.computed) / tenants[request.tenant].weight
                request.computed = end
            if piece.samples:
                ended = request.drawn + 1 >= request.answer
                outcomes.append(SequenceOutcome(piece.slot, 1, ended=ended))
        for emission in core.apply(lane, StepOutcome(plan.step_id, tuple(outcomes)), now):
            if isinstance(emission, Tokens):
                request = requests[emission.key]
                request.drawn += emission.count
                served[request.tenant] += 2 * emission.count / tenants[request.tenant].weight

    now = 0
    while now < seconds * SECOND:
        lane = min(free_at, key=lambda name: (free_at[name], name))
        now = free_at[lane]
        for name, tenant in tenants.items():
            while arrivals[name] <= now:
                submit(name, arrivals[name])
                arrivals[name] += int(chance.expovariate(tenant.rate) * SECOND)
        core.expire(now)
        while (plan := core.plan(lane, now)) is not None:
            note_plan(plan)
            flights[lane].append(plan)
        if not flights[lane]:
            free_at[lane] = now + STEP_NS
            continue
        plan = flights[lane].popleft()
        now += STEP_NS + TOKEN_NS * sum(piece.count for piece in plan.slices)
        note_results(plan, lane, now)
        free_at[lane] = now
        story.at.append(now)
        for name in tenants:
            story.of[name].append(served[name])
            story.waits[name].append(waiting[name] > 0)
    core.check()
    return story
