"""What a step costs, learned from what steps cost. Pure.

Two views of the same measurements: `StepCost` errs high, so that a slow step is not taken for one that hangs; `StepFit`
is as near as it can be, for the choices of policies and admission.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from services.scheduler.core.limits import require

SMOOTHING: Final = 0.2


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """What steps cost, as measured: a step of t tokens takes step_ns + t * token_ns."""

    step_ns: int
    token_ns: int
    request_ns: int = 0  # between two ends of requests while others wait; 0: not measured

    def __post_init__(self) -> None:
        if min(self.step_ns, self.token_ns, self.request_ns) < 0:
            for name in ("step_ns", "token_ns", "request_ns"):
                require(name, getattr(self, name), at_least=0)


class StepCost:
    """Exponentially smoothed nanoseconds of a step and of a token in it."""

    def __init__(self) -> None:
        self._step_ns: float | None = None
        self._token_ns = 0.0

    def observe(self, tokens: int, elapsed_ns: int) -> None:
        per_token = elapsed_ns / max(tokens, 1)
        if self._step_ns is None:
            self._step_ns, self._token_ns = float(elapsed_ns), per_token
            return
        self._step_ns += SMOOTHING * (elapsed_ns - self._step_ns)
        self._token_ns += SMOOTHING * (per_token - self._token_ns)

    def predict(self, tokens: int) -> int | None:
        """Nanoseconds of a step with so many tokens; None before the first observation. Errs high: a step of many
        tokens costs less per token than a step of few."""
        if self._step_ns is None:
            return None
        return int(max(self._step_ns, self._token_ns * tokens))


class StepFit:
    """A straight line through (tokens, nanoseconds) of the last steps; older ones count less and less."""

    def __init__(self, memory: float = 0.99) -> None:
        self._memory = memory
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._estimate: CostEstimate | None = None  # of what was observed until now, once somebody asked

    def observe(self, tokens: int, elapsed_ns: int) -> None:
        self.observe_each(tokens, (elapsed_ns,))

    def observe_each(self, tokens: int, elapsed_ns: Iterable[int]) -> None:
        """Steps of equally many tokens, one after the other."""
        keep, squared = self._memory, tokens * tokens
        weight, x, y, xx, xy = self._weight, self._x, self._y, self._xx, self._xy
        for elapsed in elapsed_ns:
            weight = weight * keep + 1
            x = x * keep + tokens
            y = y * keep + elapsed
            xx = xx * keep + squared
            xy = xy * keep + tokens * elapsed
        self._weight, self._x, self._y, self._xx, self._xy = weight, x, y, xx, xy
        self._estimate = None

    @property
    def mean_ns(self) -> float | None:
        """Of a step, as they were lately; None before the first."""
        return self._y / self._weight if self._weight else None

    def estimate(self, request_ns: int = 0) -> CostEstimate | None:
        """None before the first step. Where all steps had one size, all of the cost is the step's own."""
        if not self._weight:
            return None
        if self._estimate is not None and self._estimate.request_ns == request_ns:
            return self._estimate
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        slope = 0.0 if spread < 0.5 else (self._xy / self._weight - mean_x * mean_y) / spread
        slope = min(max(0.0, slope), mean_y / max(mean_x, 1.0))
        self._estimate = CostEstimate(round(max(0.0, mean_y - slope * mean_x)), round(slope), request_ns)
        return self._estimate


class DrainRate:
    """Requests that ended per second, over the last ones."""

    def __init__(self, window: int = 32) -> None:
        self._window = window
        self._ends: list[int] = []

    def observe(self, now: int) -> None:
        self._ends.append(now)
        del self._ends[: -self._window]

    def request_ns(self, now: int) -> int:
        """Nanoseconds between two ends; 0 while nothing is measured."""
        if len(self._ends) < self._window or now <= self._ends[0]:
            return 0
        return (now - self._ends[0]) // len(self._ends)

    def seconds_for(self, requests: int, now: int) -> float:
        """How long until so many have ended, at the measured rate. Between 0.1 and 60; 1 while nothing is measured."""
        if len(self._ends) < 2 or now <= self._ends[0]:
            return 1.0
        per_second = len(self._ends) / ((now - self._ends[0]) / 1e9)
        return min(60.0, max(0.1, requests / per_second))
