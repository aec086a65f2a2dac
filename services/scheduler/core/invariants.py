"""What must hold between the queue and the lanes: every live sequence is in exactly one of these places."""

from collections.abc import Iterable, Mapping

from services.scheduler.core.calls import InvariantError, SequenceKey
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
