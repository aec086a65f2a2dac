"""The degrade ladder: what low classes lose, rung by rung, while the pressure lasts.

Knows pressure as a number and time as an argument; others act on the rungs in force. Off unless configured. A rung is
taken after the pressure stood at its mark without a break, the next after as long again; given back the same way at a
lower mark, so a pressure that hovers at either does not make the rungs flap.
"""

from services.scheduler.core.calls import SubmitError
from services.scheduler.core.limits import LadderConfig, Rung


class Degraded(SubmitError):
    """Its class is not admitted while the pressure lasts: the shell answers RESOURCE_EXHAUSTED."""


RUNGS = tuple(Rung)


class Ladder:
    def __init__(self, config: LadderConfig) -> None:
        self._config = config
        self._level = 0  # rungs in force
        self._high_since: int | None = None
        self._low_since: int | None = None
        self.taken = 0  # since the start
        self.released = 0

    @property
    def rungs(self) -> tuple[Rung, ...]:
        return RUNGS[: self._level]

    def observe(self, pressure: float, now: int) -> None:
        """Called at least whenever the pressure may have risen."""
        config = self._config
        if not config.enabled:
            return
        if pressure < config.enter_at:
            self._high_since = None
        elif self._high_since is None:
            self._high_since = now
        elif now - self._high_since >= config.enter_ns and self._level < len(RUNGS):
            self._level, self._high_since = self._level + 1, now
            self.taken += 1
        if pressure > config.leave_at:
            self._low_since = None
        elif self._low_since is None:
            self._low_since = now
        elif now - self._low_since >= config.leave_ns and self._level:
            self._level, self._low_since = self._level - 1, now
            self.released += 1

    def hits(self, rung: Rung, priority: int) -> bool:
        """Whether a request of this priority loses by this rung now."""
        return self._level >= rung.value and priority < self._config.protects

    def lost_by(self, priority: int) -> tuple[Rung, ...]:
        """The rungs by which a request of this priority would lose now."""
        return tuple(rung for rung in self.rungs if self.hits(rung, priority))

    def admit(self, priority: int) -> None:
        """Raises Degraded where the class is not admitted."""
        if self.hits(Rung.ADMISSION, priority):
            raise Degraded(
                "priority",
                f"under sustained pressure priorities below {self._config.protects} are refused; this is {priority}",
            )
