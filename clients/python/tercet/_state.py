"""What the sync and the async stream share: everything but I/O.

Owns the outcome of a generation, its tries and its span. Must not know a channel, a thread or an event loop; time and
randomness come in as arguments. Invariant: the outcome is set once, and the span ends with it.
"""

import threading
from typing import Final

from tercet._fold import Fold
from tercet._request import GenerateCall
from tercet._retry import Retries
from tercet._tracing import CallSpan
from tercet.errors import RequestCancelledError, TercetError, UnavailableError
from tercet.options import RetryPolicy
from tercet.types import Accepted, Answer, Delta, FinishReason, Logprobs, Timings, Usage
from tercet.v1 import common_pb2, tokenizer_pb2

CANCELLED: Final = "the request was cancelled"


class StreamState:
    """What is known of a generation. Everything here can be read at any time; unknown so far is None."""

    def __init__(self, call: GenerateCall, policy: RetryPolicy, span: CallSpan, now: float) -> None:
        self._request = call
        self._span = span
        self._started = now
        self._retries = Retries(policy, now + call.identity.timeout)
        self._fold = Fold(1 if call.sampling.n is None else call.sampling.n)
        self._end_lock = threading.Lock()
        self._ended = False
        self._error: TercetError | None = None

    @property
    def request_id(self) -> str:
        """The request's id, in every server's log and trace."""
        return self._request.identity.request_id

    @property
    def trace_id(self) -> str | None:
        """The trace's id, 32 hexadecimal digits. None: not traced."""
        return self._span.trace_id

    @property
    def accepted(self) -> Accepted | None:
        """What the server said when it queued the request."""
        return self._fold.accepted

    @property
    def seed(self) -> int | None:
        """The seed in use: with it, the same request gives the same tokens again."""
        return self._request.sampling.seed if self._fold.accepted is None else self._fold.accepted.seed

    @property
    def answers(self) -> tuple[Answer, ...]:
        """All n answers, as far as they came."""
        return self._fold.answers()

    @property
    def prompt_logprobs(self) -> tuple[Logprobs, ...]:
        """Of the prompt's tokens from the second on, where asked for. All are there before the first delta."""
        return tuple(self._fold.prompt_logprobs)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why answer 0 ended; the others' are in `answers`."""
        return self._fold.answers()[0].finish_reason

    @property
    def usage(self) -> Usage | None:
        """Tokens of all answers that have ended: the prompt counts once, the rest is summed."""
        return self._fold.usage

    @property
    def timings(self) -> Timings | None:
        """Where answer 0's time went; the others' are in `answers`."""
        return self._fold.answers()[0].timings

    @property
    def attempt(self) -> int:
        """Times that the request was sent."""
        return self._retries.attempt

    def _message(self) -> tokenizer_pb2.TokenizerServiceGenerateRequest:
        """Of the present try: the whole request, or what is left of it."""
        so_far, accepted = self._so_far(), self._fold.accepted
        if so_far is None or accepted is None:
            return self._request.attempt(self._retries.attempt)
        return self._request.resumed(self._retries.attempt, accepted.seed, so_far)

    def _so_far(self) -> common_pb2.Resume | None:
        """What to go on from; None: nothing was delivered, or it can't go on."""
        return self._fold.so_far() if self._fold.delivered and self._request.resumes else None

    def _take(self, event: tokenizer_pb2.TokenizerServiceGenerateResponse, now: float) -> Delta | None:
        """Take in an event; the delta, if it is one."""
        first = not self._fold.delivered
        delta = self._fold.apply(event)
        if event.WhichOneof("event") == "accepted" and self._fold.accepted is not None:
            self._span.accepted(self._fold.accepted)
        if delta is not None:
            self._retries.delivered()
            if first:
                self._span.first_chunk(now - self._started)
        return delta

    def _again(self, error: TercetError, now: float, jitter: float) -> float | None:
        """Seconds to wait before the next try; None: `error` stands.

        Once something is delivered, sending again would repeat it: the next try goes on from there, or there is none.
        """
        if self._ended or (self._fold.delivered and self._so_far() is None):
            return None
        delay = self._retries.after(error, now, jitter)
        if delay is not None:
            self._span.retried(self._retries.attempt, error)
        return delay

    def _is_whole(self, error: TercetError) -> bool:
        """Whether all has come: a server that goes behind the last answer's end takes nothing away."""
        if not self._fold.is_complete or not isinstance(error, UnavailableError):
            return False
        self._complete()
        return True

    def _complete(self) -> None:
        """The call ended with status OK; InternalError if the answers did not."""
        self._fold.complete()
        self._finish(None)

    def _finish(self, error: TercetError | None) -> TercetError | None:
        """Set the outcome, if there is none yet; the outcome that stands."""
        with self._end_lock:
            if self._ended:
                return self._error
            self._ended = True
            if error is not None:
                self._error = error.with_facts(request_id=self.request_id, attempts=self._retries.attempt)
        self._span.end(self._fold.answers(), self._fold.usage, self._error)
        return self._error

    def _failure(self, error: TercetError) -> TercetError:
        """End with `error`; what to raise: `error`, or what ended the stream before."""
        return self._finish(error) or error

    def _cancelled(self) -> TercetError:
        return self._failure(RequestCancelledError(CANCELLED))
