"""What the step stream tells whoever keeps figures of it, and whom a step serves."""

from dataclasses import dataclass
from typing import Final, Protocol

from executor.step import Step
from services.executor.lease import Grant
from services.executor.worker import StepDone
from services.wire import RequestLabel


@dataclass(frozen=True, slots=True)
class Sequence:
    """What a slot holds, as far as figures, spans and logs need it. prompt_len: tokens."""

    label: RequestLabel
    prompt_len: int


NOBODY: Final = Sequence(RequestLabel(), 0)


class Observer(Protocol):
    def granted(self, grant: Grant) -> None:
        """A claim was granted, by a takeover where somebody is ousted."""

    def refused(self) -> None:
        """A claim was refused by the lease."""

    def step(self, done: StepDone, served: tuple[Sequence, ...]) -> None:
        """A step was run, failed, or was found stale. served: of its slices, in their order."""


class _Unobserved:
    def granted(self, grant: Grant) -> None:
        pass

    def refused(self) -> None:
        pass

    def step(self, done: StepDone, served: tuple[Sequence, ...]) -> None:
        pass


UNOBSERVED: Final[Observer] = _Unobserved()


def describe_batch(step: Step, served: tuple[Sequence, ...]) -> list[dict[str, object]]:
    """Slots, positions and request ids of a step, for the log: no text, no token ids."""
    return [
        {"slot": piece.slot, "start": piece.start, "count": piece.count, "request_id": sequence.label.request_id}
        for piece, sequence in zip(step.slices, served, strict=True)
    ]
