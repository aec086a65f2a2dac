"""Two executors against one at the same load, and balance by active requests against by connections.

`python benchmarks/two_executors.py`. Prints one JSON line. The scheduling core is the one that serves; the executors
are modelled on a virtual clock, with a step of t tokens taking `step_ms` + t * `token_ms` (times four for the slow
one). So the figures are exact, the same on every machine, and hold nothing of sockets.

By connections means what a load balancer in front does that knows no work: each executor has a scheduler of its own,
and requests go to them in turn.
"""

import argparse
import json
import math
import random
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from services.scheduler.core.calls import (
    CoreConfig,
    Emission,
    Finished,
    LaneSpec,
    Plan,
    SequenceOutcome,
    StepOutcome,
    Submission,
    Tokens,
)
from services.scheduler.core.core import SchedulerCore

MS: Final = 1_000_000
SPEC: Final = LaneSpec(block_size=16, total_blocks=4096, max_batched_tokens=512, max_sequences=32, max_model_len=4096)
SLOW: Final = 4.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """at: ns."""

    key: str
    at: int
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Pace:
    step_ms: float
    token_ms: float

    def times(self, factor: float) -> "Pace":
        return Pace(self.step_ms * factor, self.token_ms * factor)

    def ns(self, tokens: int) -> int:
        return int((self.step_ms + self.token_ms * tokens) * MS)


@dataclass
class Site:
    """One scheduler with its executors. A lane's steps run one after the other."""

    paces: Sequence[Pace]
    core: SchedulerCore = field(default_factory=lambda: SchedulerCore(CoreConfig(max_queued_requests=100_000)))
    flights: dict[str, deque[tuple[int, Plan]]] = field(default_factory=dict)
    first_ns: dict[str, int] = field(default_factory=dict)  # when the first token came
    end_ns: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number in range(len(self.paces)):
            self.core.attach(f"lane{number}", SPEC, 0)
            self.flights[f"lane{number}"] = deque()

    def submit(self, arrival: Arrival) -> None:
        self.core.submit(Submission(arrival.key, "t", arrival.prompt, arrival.output), arrival.at)
        self.plan(arrival.at)

    def plan(self, now: int) -> None:
        for (lane, flight), pace in zip(self.flights.items(), self.paces, strict=True):
            while (plan := self.core.plan(lane, now)) is not None:
                begins = max(now, flight[-1][0]) if flight else now
                flight.append((begins + pace.ns(sum(piece.count for piece in plan.slices)), plan))

    def next_at(self) -> int | None:
        return min((flight[0][0] for flight in self.flights.values() if flight), default=None)

    def advance(self) -> None:
        """The next step that ends."""
        now, lane = min((flight[0][0], lane) for lane, flight in self.flights.items() if flight)
        _, plan = self.flights[lane].popleft()
        outcomes = tuple(SequenceOutcome(piece.slot, 1) for piece in plan.slices if piece.samples)
        self.note(self.core.apply(lane, StepOutcome(plan.step_id, outcomes), now), now)
        self.plan(now)

    def note(self, emissions: Sequence[Emission], now: int) -> None:
        for emission in emissions:
            match emission:
                case Tokens():
                    self.first_ns.setdefault(emission.key, now)
                case Finished():
                    self.end_ns[emission.key] = now


def arrivals(count: int, per_second: float, seed: int) -> list[Arrival]:
    """Poisson; lengths are log-normal, with medians of 200 tokens in and 80 out."""
    chance = random.Random(seed)
    at, made = 0.0, []
    for number in range(count):
        at += chance.expovariate(per_second) * 1e9
        prompt = min(2000, max(4, int(chance.lognormvariate(math.log(200), 0.8))))
        output = min(600, max(2, int(chance.lognormvariate(math.log(80), 0.7))))
        made.append(Arrival(f"r{number}", int(at), prompt, output))
    return made


def run(sites: Sequence[Site], load: Sequence[Arrival]) -> dict[str, float]:
    """Arrivals go to the sites in turn. Milliseconds of what the requests took."""
    coming = deque(load)
    turn = 0
    while coming or any(site.next_at() is not None for site in sites):
        due = [(at, number) for number, site in enumerate(sites) if (at := site.next_at()) is not None]
        if coming and (not due or coming[0].at <= min(due)[0]):
            sites[turn % len(sites)].submit(coming.popleft())
            turn += 1
        else:
            sites[min(due)[1]].advance()
    ended = {key: at for site in sites for key, at in site.end_ns.items()}
    first = {key: at for site in sites for key, at in site.first_ns.items()}
    if len(ended) != len(load):
        raise SystemExit(f"{len(load) - len(ended)} of {len(load)} requests did not end")
    whole = sorted((ended[one.key] - one.at) / MS for one in load)
    token = sorted((first[one.key] - one.at) / MS for one in load)
    return {
        "p50_ms": round(_at(whole, 0.5), 1),
        "p99_ms": round(_at(whole, 0.99), 1),
        "first_token_p50_ms": round(_at(token, 0.5), 1),
        "first_token_p99_ms": round(_at(token, 0.99), 1),
    }


def _at(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--per-second", type=float, default=12.0, help="of all executors together")
    parser.add_argument("--step-ms", type=float, default=8.0)
    parser.add_argument("--token-ms", type=float, default=0.15)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(argv)
    pace = Pace(chosen.step_ms, chosen.token_ms)
    load = arrivals(chosen.requests, chosen.per_second, chosen.seed)
    uneven = (pace.times(SLOW), pace)
    one, two = run([Site([pace])], load), run([Site([pace, pace])], load)
    active, turns = run([Site(uneven)], load), run([Site([own]) for own in uneven], load)
    report: dict[str, Any] = {
        "requests": chosen.requests,
        "per_second": chosen.per_second,
        "one": one,
        "two": two,
        "two_p99_lower_by": round(1 - two["p99_ms"] / one["p99_ms"], 3),
        "one_slow_by_active_requests": active,
        "one_slow_by_connections": turns,
        "active_p99_lower_by": round(1 - active["p99_ms"] / turns["p99_ms"], 3),
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
