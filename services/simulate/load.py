"""Loads: what is asked for, and when. Generated from a seed, or replayed.

Owns the only randomness of the simulator. Knows nothing of schedulers. Invariant: requests come in the order of their
time, and a seed gives the same ones always.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Final


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a load. `block_ids`: of each full or partial block of the prompt, equal where the text up to its
    end is equal; empty: nothing is shared."""

    at_ns: int
    prompt_len: int
    output_len: int
    block_ids: tuple[int, ...] = ()
    tenant: str = "default"
    priority: int = 0


class LoadError(ValueError):
    """A description of a load that makes no sense."""


Lengths = Callable[[random.Random], int]


def parse_lengths(text: str, name: str) -> Lengths:
    """`fixed:N`, `uniform:LOW:HIGH` or `lognormal:MEDIAN:SIGMA[:MAX]` (sigma of the logarithm). Never below 1."""
    kind, *rest = text.split(":")
    try:
        numbers = [float(part) for part in rest]
    except ValueError as error:
        raise LoadError(f"{name}: {text!r} holds something that is no number") from error
    if any(not 0 <= number < 1e9 for number in numbers):
        raise LoadError(f"{name}: {text!r} holds a number outside of 0 to 1e9")
    match kind, numbers:
        case "fixed", [length] if length >= 1:
            return lambda source: int(length)
        case "uniform", [low, high] if 1 <= low <= high:
            return lambda source: source.randint(int(low), int(high))
        case "lognormal", [median, sigma, *most] if median >= 1 and len(most) <= 1:
            top = int(most[0]) if most else 1_000_000_000
            mu = log(median)
            return lambda source: max(1, min(top, round(exp(source.gauss(mu, sigma)))))
    raise LoadError(f"{name}: {text!r} is none of fixed:N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA[:MAX]")


@dataclass(frozen=True, slots=True)
class Tenant:
    """`share`: of the requests, relative to the other tenants'. `weight`: of the service that it is due, under fair."""

    name: str
    share: float = 1.0
    priority: int = 0
    weight: float = 1.0


ONE_TENANT: Final = (Tenant("default"),)


def parse_tenants(text: str) -> tuple[Tenant, ...]:
    """`NAME=SHARE[@PRIORITY][*WEIGHT]`, by commas."""
    tenants = []
    for part in text.split(","):
        name, _, rest = part.partition("=")
        rest, _, weight = rest.partition("*")
        share, _, priority = rest.partition("@")
        try:
            tenant = Tenant(name, float(share or 1), int(priority or 0), float(weight or 1))
        except ValueError as error:
            raise LoadError(f"tenants: {part!r} is not NAME=SHARE[@PRIORITY][*WEIGHT]") from error
        if not 0.001 <= tenant.weight <= 1000:
            raise LoadError(f"tenants: the weight in {part!r} is not between 0.001 and 1000")
        if not tenant.name or not 0 < tenant.share < 1e9:
            raise LoadError(f"tenants: {part!r} needs a name and a share above 0")
        tenants.append(tenant)
    if len({tenant.name for tenant in tenants}) != len(tenants):
        raise LoadError(f"tenants: a name appears twice in {text!r}")
    return tuple(tenants)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """`rate` requests a second. burst 1: Poisson. Above: that many come at once, Poisson at rate / burst."""

    rate: float
    burst: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1e9:
            raise LoadError(f"rate is {self.rate}; it must be above 0")
        if self.burst < 1:
            raise LoadError(f"burst is {self.burst}; at least 1 is needed")

    def times_ns(self, source: random.Random) -> Iterator[int]:
        now = 0.0
        while True:
            now += source.expovariate(self.rate / self.burst) * 1e9
            for _ in range(self.burst):
                yield int(now)


def generate(
    count: int,
    arrivals: Arrivals,
    prompts: Lengths,
    outputs: Lengths,
    seed: int,
    tenants: Sequence[Tenant] = ONE_TENANT,
) -> Iterator[Request]:
    """`count` requests, made as they are asked for: a million of them need no memory."""
    if count < 1:
        raise LoadError(f"requests is {count}; at least 1 is needed")
    when, what, who = (random.Random(f"{seed}/{part}") for part in ("arrivals", "lengths", "tenants"))
    shares = [tenant.share for tenant in tenants]
    for at_ns, _ in zip(arrivals.times_ns(when), range(count), strict=False):
        tenant = who.choices(tenants, shares)[0] if len(tenants) > 1 else tenants[0]
        yield Request(at_ns, prompts(what), outputs(what), tenant=tenant.name, priority=tenant.priority)


def lengths_of(requests: Sequence[Request], seed: int) -> tuple[Lengths, Lengths]:
    """Prompt and output lengths drawn from a trace, in pairs: a short answer to a long prompt stays one."""
    if not requests:
        raise LoadError("the trace is empty: no lengths can be drawn from it")
    pairs = random.Random(f"{seed}/pairs")
    drawn: list[Request] = []

    def prompt(source: random.Random) -> int:
        drawn.append(pairs.choice(requests))
        return drawn[-1].prompt_len

    def output(source: random.Random) -> int:
        return drawn.pop().output_len

    return prompt, output


def reshaped(
    requests: Sequence[Request],
    *,
    rate_scale: float = 1.0,
    length_divisor: int = 1,
    limit: int | None = None,
    tenants: Sequence[Tenant] = ONE_TENANT,
    seed: int = 0,
) -> list[Request]:
    """A trace with its first `limit` requests, times divided by `rate_scale`, lengths by `length_divisor`, and tenants
    drawn where there are several.

    Lengths are rounded up. Shared blocks do not survive a division: then each prompt stands alone.
    """
    if not 0 < rate_scale < 1e9:
        raise LoadError(f"rate_scale is {rate_scale}; it must be above 0")
    if length_divisor < 1:
        raise LoadError(f"length_divisor is {length_divisor}; at least 1 is needed")
    source = random.Random(f"{seed}/tenants")
    shares = [tenant.share for tenant in tenants]
    made = []
    for request in requests[:limit]:
        tenant = source.choices(tenants, shares)[0] if len(tenants) > 1 else tenants[0]
        made.append(
            Request(
                int(request.at_ns / rate_scale),
                -(-request.prompt_len // length_divisor),
                -(-request.output_len // length_divisor),
                request.block_ids if length_divisor == 1 else (),
                tenant.name,
                tenant.priority,
            )
        )
    return made
