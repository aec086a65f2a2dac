"""What a step costs, learned from what steps cost. Pure."""

from typing import Final

SMOOTHING: Final = 0.2


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


class DrainRate:
    """Requests that ended per second, over the last ones."""

    def __init__(self, window: int = 32) -> None:
        self._window = window
        self._ends: list[int] = []

    def observe(self, now: int) -> None:
        self._ends.append(now)
        del self._ends[: -self._window]

    def seconds_for(self, requests: int, now: int) -> float:
        """How long until so many have ended, at the measured rate. Between 0.1 and 60; 1 while nothing is measured."""
        if len(self._ends) < 2 or now <= self._ends[0]:
            return 1.0
        per_second = len(self._ends) / ((now - self._ends[0]) / 1e9)
        return min(60.0, max(0.1, requests / per_second))
