"""Whether and when a failed call is sent again. Pure: time and randomness are arguments."""

from tercet.errors import ResourceExhaustedError, TercetError, UnavailableError
from tercet.options import RetryPolicy


class Retries:
    """One call's tries. Invariant: none starts at or after the deadline.

    deadline: on the clock that `now` is read from, seconds. attempt: number of the present try, from 1. The policy's
    bound and the pauses count tries since something was delivered.
    """

    def __init__(self, policy: RetryPolicy, deadline: float) -> None:
        self._policy = policy
        self._deadline = deadline
        self.attempt = 1
        self._in_a_row = 1

    def delivered(self) -> None:
        """The present try has brought something."""
        self._in_a_row = 1

    def remaining(self, now: float) -> float:
        """Seconds to the deadline, at least 0."""
        return max(0.0, self._deadline - now)

    def after(self, error: TercetError, now: float, jitter: float) -> float | None:
        """Seconds to wait before the next try, which `attempt` then counts; None: `error` stands.

        jitter: uniform in [0, 1).
        """
        if not self._may_repeat(error) or self._in_a_row >= self._policy.attempts:
            return None
        doublings = min(self._in_a_row - 1, 62)
        backoff = min(self._policy.max_backoff, self._policy.initial_backoff * 2.0**doublings)
        delay = max(backoff * (0.8 + 0.4 * jitter), error.retry_after or 0.0)
        if delay >= self.remaining(now):
            return None
        self.attempt += 1
        self._in_a_row += 1
        return delay

    def _may_repeat(self, error: TercetError) -> bool:
        if isinstance(error, UnavailableError):
            return True
        exhausted = isinstance(error, ResourceExhaustedError) and error.retry_after is not None
        return exhausted and self._policy.resource_exhausted
