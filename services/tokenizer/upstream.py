"""One request at the scheduler, however many calls it takes: where a call breaks, the next one goes on behind it.

Owns the ids that came, and with them the only state that is needed to go on elsewhere. Must not know text. Invariants:
the ids of all deltas are what one undisturbed call would have given; a status that the scheduler gave to this request
itself is never answered by another try; no try outlasts the caller's time.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import grpc

from services.errors import ServiceError, Unavailable
from services.rpc_errors import DETAILS_KEY, from_rpc_error
from tercet.v1 import common_pb2, scheduler_pb2

Request = scheduler_pb2.SchedulerServiceGenerateRequest
Response = scheduler_pb2.SchedulerServiceGenerateResponse

BACKOFF_S: Final = (0.05, 0.1, 0.2, 0.4, 0.8)
TRIES_APART: Final = 256  # tries at the scheduler for each attempt of the caller; so the caller's next one is higher

# What a transport says by itself when a peer or a connection goes; a scheduler's own statuses carry details.
CUT: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
# Of a scheduler that leaves or comes: another, or itself when it is there, can go on.
PASSING: Final = frozenset({"DRAINING", "NO_EXECUTOR"})

log = logging.getLogger(__name__)


class Stream(Protocol):
    """What is used of a call."""

    def __aiter__(self) -> Any: ...

    def cancel(self) -> bool: ...


Open = Callable[[Request], Stream]


def first_try(attempt: int) -> int:
    """The attempt at the scheduler of the caller's attempt, both from 1."""
    return min((attempt - 1) * TRIES_APART + 1, 2**32 - TRIES_APART)


@dataclass(slots=True)
class Upstream:
    """message: of the first try, with its attempt. elapsed_ns: since the request came to this edge. deadline_s: on
    `time.monotonic`, when the caller's time is over. grace_s: how long a scheduler may be gone."""

    message: Request
    open: Open
    elapsed_ns: Callable[[], int]
    deadline_s: float
    grace_s: float
    ids: list[int] = field(default_factory=list)  # drawn so far, those of a former edge included
    accepted: scheduler_pb2.SchedulerAccepted | None = None
    attempt: int = 1  # of the try that runs

    async def events(self) -> AsyncGenerator[Response, None]:
        """Accepted, once per try that was accepted; deltas; Finished. Raises ServiceError.

        The first Accepted is the request's; a later one says only that the answer goes on.
        """
        self.attempt = self.message.context.attempt
        self.ids.extend(self.message.resume.output_ids)
        last = self.attempt + TRIES_APART - 1
        message, lost_at, tries, ended = self.message, None, 0, False
        while True:
            stream = self.open(message)
            try:
                async for event in stream:
                    match event.WhichOneof("event"):
                        case "accepted":
                            self.accepted = self.accepted or event.accepted
                        case "delta":
                            self.ids.extend(event.delta.token_ids)
                            lost_at, tries = None, 0
                        case "finished":
                            ended = True
                    yield event
                return
            except grpc.aio.AioRpcError as error:
                if ended:
                    return  # the answer is whole: what breaks behind it takes nothing away
                failure = from_rpc_error(error)
                if self.accepted is None or self.attempt >= last or not passes(error, failure):
                    raise failure from error
            finally:
                stream.cancel()
            now = time.monotonic()
            lost_at = now if lost_at is None else lost_at
            pause = BACKOFF_S[min(tries, len(BACKOFF_S) - 1)]
            if now + pause >= min(lost_at + self.grace_s, self.deadline_s):
                raise failure
            if tries == 0:
                self._tell(failure)
            await asyncio.sleep(pause)
            tries += 1
            self.attempt += 1
            message = self._resuming(self.accepted)

    def _resuming(self, accepted: scheduler_pb2.SchedulerAccepted) -> Request:
        message = Request()
        message.CopyFrom(self.message)
        message.context.attempt = self.attempt
        message.sampling.seed = accepted.seed
        message.elapsed_ns = self.elapsed_ns()
        prompt_ids = self.message.resume.prompt_ids or self.message.prompt_ids
        message.resume.CopyFrom(
            common_pb2.Resume(prompt_ids=prompt_ids, output_ids=self.ids, numerics=accepted.numerics)
        )
        message.ClearField("prompt_ids")
        return message

    def _tell(self, failure: ServiceError) -> None:
        log.warning(
            "the scheduler is lost in the middle of an answer, which goes on where one is there again",
            extra={
                "request_id": self.message.context.request_id,
                "reason": failure.message,
                "output_tokens": len(self.ids),
            },
        )


def passes(error: grpc.aio.AioRpcError, failure: ServiceError) -> bool:
    """Whether the same request may go on at another scheduler, or later."""
    if _has_details(error.trailing_metadata()):
        return isinstance(failure, Unavailable) and failure.reason in PASSING
    return error.code() in CUT


def _has_details(trailers: Iterable[tuple[str, str | bytes]] | None) -> bool:
    return any(key == DETAILS_KEY for key, _ in trailers or ())
