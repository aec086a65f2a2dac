"""Why a sequence waits, and where in the queue it stands: for people who ask. Pure; changes nothing."""

from collections.abc import Iterable
from dataclasses import dataclass

from services.scheduler.core.admission import fits
from services.scheduler.core.lane import Lane
from services.scheduler.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Wait:
    """since: ns, when it began to wait this time. position: sequences ahead of it. reason: what is missing: "executor",
    "queue" (others come first), "slots" or "blocks"."""

    since: int
    position: int
    reason: str


def wait_of(sequence: Sequence, position: int, lanes: Iterable[Lane]) -> Wait:
    """lanes: those that take new work."""
    return Wait(sequence.queued_at, position, _reason(sequence, position, lanes))


def _reason(sequence: Sequence, position: int, lanes: Iterable[Lane]) -> str:
    able = [lane for lane in lanes if sequence.limit is not None and fits(sequence, lane.spec)]
    if not able:
        return "executor"
    if position:
        return "queue"
    with_slots = [lane for lane in able if lane.free_slots]
    if not with_slots:
        return "slots"
    # Admission looks at what it is expected to grow to, so blocks for today alone are not enough.
    if all(
        lane.spec.blocks_for(sequence.bound - 1) - len(lane.find(sequence)) > lane.cache.available
        for lane in with_slots
    ):
        return "blocks"
    return "queue"
