"""What is simulated: a scheduler's core, so many executors, their cost. Frozen values."""

from dataclasses import dataclass, field
from enum import StrEnum

from services.scheduler.core.calls import CoreConfig, LaneSpec, Limits
from services.simulate.cost import PRESETS, CostModel


class FleetError(ValueError):
    """A fleet that makes no sense. Names the field."""


class Told(StrEnum):
    """What the scheduler knows of a request's output length beforehand."""

    EXACT = "exact"  # max_tokens is what it will draw, and ends it
    NONE = "none"  # nothing; a stop id ends it


@dataclass(frozen=True, slots=True)
class Fleet:
    """`told`: see Told; a number: max_tokens is that, or the output if it is longer.

    `slowness`: of each executor, how many times the cost model's time its steps take; shorter than `executors`: the
    rest are as the model.
    """

    core: CoreConfig
    lane: LaneSpec
    executors: int = 1
    cost: CostModel = field(default_factory=lambda: PRESETS["cpu-2core"])
    slowness: tuple[float, ...] = ()
    limits: Limits = field(default_factory=Limits)
    told: Told | int = Told.EXACT

    def __post_init__(self) -> None:
        if not 1 <= self.executors <= 100_000:
            raise FleetError(f"executors is {self.executors}; 1 to 100000 are possible")
        if len(self.slowness) > self.executors:
            raise FleetError(f"slowness names {len(self.slowness)} executors; there are {self.executors}")
        if any(not 0 < factor < 1e6 for factor in self.slowness):
            raise FleetError(f"slowness is {self.slowness}; each must be above 0")
        if not isinstance(self.told, Told) and self.told < 1:
            raise FleetError(f"told is {self.told}; at least 1 is needed")

    def costs(self) -> list[CostModel]:
        """An executor each; equal ones are one object."""
        scaled = [self.cost if factor == 1 else self.cost.scaled(factor) for factor in self.slowness]
        return scaled + [self.cost] * (self.executors - len(scaled))

    def max_tokens(self, output_len: int) -> int | None:
        if isinstance(self.told, Told):
            return output_len if self.told is Told.EXACT else None
        return max(self.told, output_len)
