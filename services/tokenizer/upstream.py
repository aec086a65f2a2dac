"""One request at the servers behind, however many calls it takes: where a call breaks, the next one goes on behind it.

The edge drives it over schedulers, the gateway alone over tokenizers. What was delivered is the `Progress`'s, which
server is next the `Way`'s. Invariants: the tokens of all deltas are what one undisturbed call would have given; a
status that a server gave to this request itself is never answered by another try; no try outlasts the caller's time.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

import grpc

from services.errors import Aborted, ResourceExhausted, ServiceError, Unavailable
from services.rpc_errors import DETAILS_KEY, from_rpc_error
from tercet.v1 import common_pb2, scheduler_pb2

Request = scheduler_pb2.SchedulerServiceGenerateRequest
Response = scheduler_pb2.SchedulerServiceGenerateResponse

BACKOFF_S: Final = (0.05, 0.1, 0.2, 0.4, 0.8)
TRIES_APART: Final = 256  # tries at the scheduler for each attempt of the caller; so the caller's next one is higher

# What a transport says by itself when a peer or a connection goes; a server's own statuses carry details.
CUT: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
# Of a server that leaves or comes: another, or itself when it is there, can go on.
PASSING: Final = frozenset({"DRAINING", "NO_EXECUTOR", "STARTING", "NO_SCHEDULER", "SCHEDULER_NOT_READY"})
# Of a server that is full: another may have room, and an answer that has begun waits until one has.
FULL: Final = frozenset({"QUEUE_FULL", "EDGE_FULL"})
# What only this server can't: another may.
ELSEWHERE: Final = frozenset({(Unavailable, "EXECUTOR_LOST"), (Aborted, "NUMERICS_CHANGED")})

log = logging.getLogger(__name__)

Q = TypeVar("Q")
E = TypeVar("E")
Q_co = TypeVar("Q_co", covariant=True)
E_contra = TypeVar("E_contra", contravariant=True)


class Stream(Protocol):
    """What is used of a call."""

    def __aiter__(self) -> Any: ...

    def cancel(self) -> bool: ...


class Progress(Protocol[Q_co, E_contra]):
    """What was delivered of an answer, and the message that goes on behind it."""

    @property
    def accepted(self) -> bool: ...

    @property
    def attempt(self) -> int:
        """Of the first try."""
        ...

    @property
    def tokens(self) -> int:
        """Output tokens so far."""
        ...

    def accept(self, event: E_contra) -> None:
        """An Accepted; the first one counts."""
        ...

    def add(self, event: E_contra) -> None:
        """A delta."""
        ...

    def finish(self, event: E_contra) -> bool:
        """An answer's end; whether that was the last one's."""
        ...

    def again(self, attempt: int) -> Q_co | None:
        """The message of a further try; None: it can't go on."""
        ...


class Way(Protocol):
    """Where the tries go; see `services.peers.Route`."""

    def lost(self) -> bool: ...

    def progress(self) -> None: ...


def first_try(attempt: int) -> int:
    """The attempt at the scheduler of the caller's attempt, both from 1."""
    return min((attempt - 1) * TRIES_APART + 1, 2**32 - TRIES_APART)


@dataclass(slots=True)
class Upstream(Generic[Q, E]):
    """first: the message of the first try. open: calls the way's next server. deadline_s: on `time.monotonic`, when the
    caller's time is over. grace_s: how long a server may be gone where no other is able."""

    first: Q
    delivered: Progress[Q, E]
    way: Way
    open: Callable[[Q], Stream]
    deadline_s: float
    grace_s: float
    request_id: str
    attempt: int = field(init=False)  # of the try that runs

    def __post_init__(self) -> None:
        self.attempt = self.delivered.attempt

    async def events(self) -> AsyncGenerator[E, None]:
        """Accepted, once per try that was accepted; deltas; Finished. Raises ServiceError.

        The first Accepted is the request's; a later one says only that the answer goes on.
        """
        last = self.attempt + TRIES_APART - 1
        message, lost_at, tries, ended = self.first, None, 0, False
        while True:
            stream = self.open(message)
            try:
                async for event in stream:
                    match event.WhichOneof("event"):
                        case "accepted":
                            self.delivered.accept(event)
                        case "delta":
                            self.delivered.add(event)
                            if lost_at is not None:
                                lost_at, tries = None, 0
                                self.way.progress()
                        case "finished":
                            ended = self.delivered.finish(event)
                    yield event
                return
            except grpc.aio.AioRpcError as error:
                if ended:
                    return  # the answer is whole: what breaks behind it takes nothing away
                failure = from_rpc_error(error)
                if self.attempt >= last or not passes(error, failure):
                    raise failure from error
            finally:
                stream.cancel()
            able = self.way.lost()  # another server
            now = time.monotonic()
            lost_at = now if lost_at is None else lost_at
            pause = 0.0 if able else BACKOFF_S[min(tries, len(BACKOFF_S) - 1)]
            waits = self.delivered.accepted and (type(failure), failure.reason) not in ELSEWHERE
            if (not able and (not waits or now + pause >= lost_at + self.grace_s)) or now + pause >= self.deadline_s:
                raise failure
            resumed = self.delivered.again(self.attempt + 1)
            if resumed is None:
                raise failure
            if tries == 0 and self.delivered.accepted:
                self._tell(failure)
            await asyncio.sleep(pause)
            tries += 1
            self.attempt += 1
            message = resumed

    def _tell(self, failure: ServiceError) -> None:
        log.warning(
            "a server is lost in the middle of an answer, which goes on at another, or where one is there again",
            extra={
                "request_id": self.request_id,
                "reason": failure.message,
                "output_tokens": self.delivered.tokens,
            },
        )


@dataclass(slots=True)
class AtScheduler:
    """The progress of a request at schedulers: the ids that came, those of a former edge included.

    message: of the first try, with its attempt. elapsed_ns: since the request came to this edge.
    """

    message: Request
    elapsed_ns: Callable[[], int]
    ids: list[list[int]] = field(default_factory=list)  # by answer
    finished: set[int] = field(default_factory=set)  # answers
    told: scheduler_pb2.SchedulerAccepted | None = None

    def __post_init__(self) -> None:
        resume = self.message.resume
        self.ids = [list(resume.output_ids), *(list(other.output_ids) for other in resume.others)]
        self.ids += [[] for _ in range(self.message.sampling.n - len(self.ids))]
        ended = (resume.finished, *(other.finished for other in resume.others))
        self.finished |= {index for index, finished in enumerate(ended) if finished}

    @property
    def accepted(self) -> bool:
        return self.told is not None

    @property
    def attempt(self) -> int:
        return self.message.context.attempt

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))

    def accept(self, event: Response) -> None:
        if self.told is None and event.accepted.n:
            del self.ids[event.accepted.n :]  # fewer come than were asked for
        self.told = self.told or event.accepted

    def add(self, event: Response) -> None:
        self.ids[event.delta.index].extend(event.delta.token_ids)

    def finish(self, event: Response) -> bool:
        self.finished.add(event.finished.index)
        return len(self.finished) == len(self.ids)

    def again(self, attempt: int) -> Request:
        message = Request()
        message.CopyFrom(self.message)
        message.context.attempt = attempt
        message.elapsed_ns = self.elapsed_ns()
        if self.told is None:
            return message
        message.sampling.seed = self.told.seed
        prompt_ids = self.message.resume.prompt_ids or self.message.prompt_ids
        if message.sampling.HasField("n"):
            message.sampling.n = len(self.ids)
        message.resume.CopyFrom(
            common_pb2.Resume(
                prompt_ids=prompt_ids,
                output_ids=self.ids[0],
                numerics=self.told.numerics,
                finished=0 in self.finished,
                others=[
                    common_pb2.ResumedAnswer(output_ids=ids, finished=index in self.finished)
                    for index, ids in enumerate(self.ids[1:], 1)
                ],
            )
        )
        message.ClearField("prompt_ids")
        return message


def passes(error: grpc.aio.AioRpcError, failure: ServiceError) -> bool:
    """Whether the same request may go on at another server, or later."""
    if not _has_details(error.trailing_metadata()):
        return error.code() in CUT
    if isinstance(failure, Unavailable) and failure.reason in PASSING:
        return True
    if isinstance(failure, ResourceExhausted) and failure.reason in FULL:
        return True
    return (type(failure), failure.reason) in ELSEWHERE


def _has_details(trailers: Iterable[tuple[str, str | bytes]] | None) -> bool:
    return any(key == DETAILS_KEY for key, _ in trailers or ())
