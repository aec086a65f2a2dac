"""Settings of what tenants and classes may have: part of the core's configuration.

Knows numbers only. Standard library only; what is out of range is refused by name.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

TOP_PRIORITY: Final = 100  # callers name priorities from -100 to 100


def require(name: str, value: float, *, at_least: float, at_most: float | None = None) -> None:
    if not value >= at_least:
        raise ValueError(f"{name} is {value}, below {at_least}")
    if at_most is not None and not value <= at_most:
        raise ValueError(f"{name} is {value}, above {at_most}")


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """What one tenant may have. None: no limit."""

    concurrency: int | None = None  # live sequences
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt and output; charged at submission, the unused refunded at the end
    weight: float = 1.0  # share among tenants under the policy fair

    def __post_init__(self) -> None:
        for name in ("concurrency", "requests_per_minute", "tokens_per_minute"):
            if getattr(self, name) is not None:
                require(name, getattr(self, name), at_least=1)
        require("weight", self.weight, at_least=0.001, at_most=1000)


@dataclass(frozen=True, slots=True)
class SessionLease:
    """What keeps the blocks of a session between its turns. Pressure is the share of the pool that is live, leased or
    pinned, 0 to 1."""

    ns: int = 0  # most that a lease lives; 0: there are none
    full_below: float = 0.5  # pressure from which on the time shrinks, evenly to nothing where the pool is full

    def ttl_ns(self, pressure: float) -> int:
        """What a lease lives at this pressure."""
        return int(self.ns * min(1.0, max(0.0, (1 - pressure) / (1 - self.full_below))))


class Rung(Enum):
    """What a scheduler under sustained pressure takes from low classes, in this order."""

    PREFILL_SHARE = 1
    SINGLE_ANSWER = 2
    MAX_TOKENS = 3
    ADMISSION = 4


@dataclass(frozen=True, slots=True)
class LadderConfig:
    """When rungs are taken and given back. Pressure is the fullest of the queue's limits, 0 to 1."""

    enabled: bool = False
    protects: int = 0  # priorities from here up lose nothing
    enter_at: float = 0.8  # pressure
    enter_ns: int = 5_000_000_000  # that long at or above it: one rung more
    leave_at: float = 0.5
    leave_ns: int = 15_000_000_000  # that long at or below it: one rung less
    prefill_share: float = 0.25  # of the tokens of a step that prompts get, for low classes together
    max_tokens: int = 256

    def __post_init__(self) -> None:
        require("enter_at", self.enter_at, at_least=0, at_most=1)
        require("leave_at", self.leave_at, at_least=0, at_most=self.enter_at)
        require("prefill_share", self.prefill_share, at_least=0.01, at_most=1)
        for name in ("enter_ns", "leave_ns", "max_tokens"):
            require(name, getattr(self, name), at_least=1)
