"""Whether a request can still make its time limits: the refusal of the policy that goes by deadlines.

Knows lanes as they are and costs as measured; no clock.
"""

from collections.abc import Iterable

from services.scheduler.core.calls import SubmitError, TimeLimit
from services.scheduler.core.cost import CostEstimate
from services.scheduler.core.lane import Lane
from services.scheduler.core.sequence import Sequence


class TooLate(SubmitError):
    """By what steps cost it can't make its time limit: the shell answers DEADLINE_EXCEEDED."""

    def __init__(self, limit: TimeLimit, message: str) -> None:
        super().__init__("limits", message)
        self.limit = limit


def in_time(sequence: Sequence, ahead: int, ahead_tokens: int, lanes: Iterable[Lane], cost: CostEstimate) -> None:
    """Raises TooLate where not even the first token can come before a limit passes, by what steps have cost.

    `ahead`, `ahead_tokens`: sequences that leave the queue before it. There is at least one lane. What can come sooner
    than the estimate is let in: work ahead is taken to be shared by all lanes evenly, and cached prefixes, stops and
    cancellations only help.
    """
    at = list(lanes)
    running = [other for lane in at for other in lane.running]
    tokens = sum(other.missing for other in running if other.missing > 1) + ahead_tokens
    budget = sum(lane.spec.max_batched_tokens for lane in at)
    to_leave = len(running) + ahead + 1 - sum(lane.slots for lane in at)  # ends before there is a slot for it
    begins = max(_steps(tokens, budget, len(at), cost), max(0, to_leave) * cost.request_ns)
    drawn = begins + _steps(sequence.known, budget // len(at), 1, cost)
    limits = sequence.submission.limits
    for kind, limit, wait in (
        (TimeLimit.QUEUE, None if sequence.admitted else limits.queue_ns, begins),
        (TimeLimit.FIRST_TOKEN, limits.first_token_ns, drawn),
        (TimeLimit.TOTAL, limits.total_ns, drawn),
    ):
        if limit is not None and wait > limit:
            raise TooLate(
                kind,
                f"{kind.value} time limit: with {ahead} requests ahead it would take about {wait / 1e9:.3g} s, "
                f"allowed are {limit / 1e9:.3g} s",
            )


def _steps(tokens: int, budget: int, lanes: int, cost: CostEstimate) -> int:
    """Nanoseconds that so many tokens take, in full steps of all lanes at once."""
    return -(-tokens // budget) * cost.step_ns + tokens * cost.token_ns // lanes
