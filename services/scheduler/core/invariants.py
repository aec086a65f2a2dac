"""What must hold between the core's parts: every live sequence is in exactly one place, and its deadline is kept."""

from collections.abc import Callable, Iterable, Mapping

from services.scheduler.core.calls import InvariantError, SequenceKey
from services.scheduler.core.deadlines import Deadline, Deadlines
from services.scheduler.core.lane import Lane
from services.scheduler.core.policies.queue import WaitingQueue
from services.scheduler.core.sequence import Sequence


def check_places(live: Mapping[SequenceKey, Sequence], waiting: WaitingQueue, lanes: Iterable[Lane]) -> None:
    """Raises InvariantError."""
    places = dict.fromkeys(live, 0)
    for lane in lanes:
        for sequence in lane.running:
            if live.get(sequence.key) is not sequence:
                raise InvariantError(f"{sequence.key} runs on lane {lane.id} and is not live")
            places[sequence.key] += 1
    for sequence in waiting:
        if live.get(sequence.key) is not sequence or sequence.placement is not None:
            raise InvariantError(f"{sequence.key} waits and is not live, or is placed")
        places[sequence.key] += 1
    if any(count != 1 for count in places.values()):
        raise InvariantError(f"not in exactly one place: {[key for key, count in places.items() if count != 1]}")
    if waiting.tokens != sum(sequence.known for sequence in waiting):
        raise InvariantError(f"the queue counts {waiting.tokens} tokens, and holds others")


def check_deadlines(
    live: Mapping[SequenceKey, Sequence], deadlines: Deadlines, true: Callable[[Sequence], Deadline | None]
) -> None:
    """Raises InvariantError."""
    deadlines.check()
    for sequence in live.values():
        entry, deadline = deadlines.entry(sequence.key), true(sequence)
        if (entry is None) != (deadline is None) or (entry or 0) > (deadline or (0,))[0]:
            raise InvariantError(f"the deadline of {sequence.key} is {deadline}, and is looked at at {entry}")
    if len(deadlines) > len(live):
        raise InvariantError("a finished sequence has a deadline")
