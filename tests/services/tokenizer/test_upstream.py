"""When the edge goes on with an answer at the scheduler, and when a failure stands."""

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from services import errors
from services.errors import ServiceError
from services.rpc_errors import DETAILS_KEY, status_code, to_status
from services.tokenizer.upstream import TRIES_APART, AtScheduler, Request, Response, Upstream, first_try
from tercet.v1 import common_pb2, scheduler_pb2

ACCEPTED = Response(accepted=scheduler_pb2.SchedulerAccepted(seed=7, numerics="n1", max_tokens=9))
FINISHED = Response(finished=scheduler_pb2.SchedulerFinished(reason=common_pb2.FINISH_REASON_LENGTH))


def drawn(*token_ids: int) -> Response:
    return Response(delta=scheduler_pb2.TokenDelta(token_ids=token_ids))


def cut(code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> AioRpcError:
    """What the transport says by itself."""
    return AioRpcError(code, Metadata(), Metadata(), "Socket closed")


def said(error: ServiceError) -> AioRpcError:
    """What the scheduler says."""
    trailers = Metadata((DETAILS_KEY, to_status(error).SerializeToString()))
    return AioRpcError(status_code(error), Metadata(), trailers, error.message)


class Scripted:
    def __init__(self, script: tuple[object, ...]) -> None:
        self._script = script
        self.cancelled = False

    async def __aiter__(self) -> AsyncIterator[Response]:
        for event in self._script:
            if isinstance(event, Exception):
                raise event
            yield event  # type: ignore[misc]

    def cancel(self) -> bool:
        self.cancelled = True
        return True


@dataclass
class Scheduler:
    """Plays one script a call; the last one again and again. others: so many other ones are able."""

    scripts: list[tuple[object, ...]]
    sent: list[Request] = field(default_factory=list)
    streams: list[Scripted] = field(default_factory=list)
    others: int = 0
    losses: int = 0

    def open(self, message: Request) -> Scripted:
        self.sent.append(message)
        self.streams.append(Scripted(self.scripts[min(len(self.sent), len(self.scripts)) - 1]))
        return self.streams[-1]

    def lost(self) -> bool:
        """Whether another one is able."""
        self.losses += 1
        return self.losses <= self.others

    def progress(self) -> None:
        self.losses = 0

    async def run(self, *, grace_s: float = 30.0, left_s: float = 30.0) -> list[Response]:
        message = Request(
            context=common_pb2.RequestContext(request_id="r", attempt=1),
            prompt_ids=[1, 2],
            sampling=common_pb2.SamplingParams(top_k=5),
            elapsed_ns=10,
        )
        delivered = AtScheduler(message, lambda: 99)
        self.upstream = Upstream(message, delivered, self, self.open, time.monotonic() + left_s, grace_s, "r")
        return [event async for event in self.upstream.events()]


async def refused(scheduler: Scheduler, **options: float) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await scheduler.run(**options)
    assert all(stream.cancelled for stream in scheduler.streams)
    return caught.value


async def test_the_next_try_carries_what_came() -> None:
    scheduler = Scheduler(
        [
            (ACCEPTED, drawn(5), drawn(6, 7), cut()),
            (cut(),),
            (ACCEPTED, drawn(8), cut()),
            (ACCEPTED, drawn(9), FINISHED),
        ]
    )
    events = await scheduler.run()
    assert [one for event in events for one in event.delta.token_ids] == [5, 6, 7, 8, 9]
    assert [message.context.attempt for message in scheduler.sent] == [1, 2, 3, 4]
    assert [list(message.resume.output_ids) for message in scheduler.sent] == [[], [5, 6, 7], [5, 6, 7], [5, 6, 7, 8]]
    for message in scheduler.sent[1:]:
        assert list(message.resume.prompt_ids) == [1, 2]
        assert not message.prompt_ids
        assert (message.resume.numerics, message.sampling.seed, message.sampling.top_k) == ("n1", 7, 5)
        assert message.elapsed_ns == 99
    assert all(stream.cancelled for stream in scheduler.streams)


@pytest.mark.parametrize(
    "failure",
    [
        *(cut(code) for code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)),
        said(errors.Unavailable("leaves", reason="DRAINING")),
        said(errors.Unavailable("comes", reason="NO_EXECUTOR")),
        said(errors.ResourceExhausted("full", reason="QUEUE_FULL")),
    ],
    ids=lambda failure: str(failure.code()),
)
async def test_what_passes_is_waited_out(failure: AioRpcError) -> None:
    scheduler = Scheduler([(ACCEPTED, failure), (ACCEPTED, drawn(5), FINISHED)])
    assert (await scheduler.run())[-1] == FINISHED
    assert len(scheduler.sent) == 2


@pytest.mark.parametrize(
    "failure",
    [
        said(errors.Unavailable("too long", reason="EXECUTOR_LOST")),
        said(errors.Aborted("others", reason="NUMERICS_CHANGED")),
        said(errors.Cancelled("by a call")),
        said(errors.Internal("a defect")),
        said(errors.ResourceExhausted("slow", reason="SLOW_READER")),
        said(errors.DeadlineExceeded("late")),
        cut(grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
    ids=lambda failure: str(failure.code()),
)
async def test_what_is_about_the_request_stands(failure: AioRpcError) -> None:
    scheduler = Scheduler([(ACCEPTED, drawn(5), failure), (ACCEPTED, FINISHED)])
    assert (await refused(scheduler)).message == failure.details()
    assert len(scheduler.sent) == 1


@pytest.mark.parametrize("script", [(cut(),), (said(errors.Unavailable("leaves", reason="DRAINING")),)])
async def test_before_accepted_a_failure_stands(script: tuple[object, ...]) -> None:
    scheduler = Scheduler([script, (ACCEPTED, FINISHED)])
    assert isinstance(await refused(scheduler), errors.Unavailable)
    assert len(scheduler.sent) == 1


@pytest.mark.parametrize(
    "failure",
    [
        cut(),
        said(errors.Unavailable("leaves", reason="DRAINING")),
        said(errors.ResourceExhausted("full", reason="QUEUE_FULL")),
        said(errors.Unavailable("for too long", reason="EXECUTOR_LOST")),
    ],
    ids=lambda failure: f"{failure.code()} {failure.details()}",
)
@pytest.mark.parametrize("before", [(), (ACCEPTED,), (ACCEPTED, drawn(5))], ids=["new", "accepted", "begun"])
async def test_another_scheduler_takes_it_at_once(failure: AioRpcError, before: tuple[object, ...]) -> None:
    scheduler = Scheduler([(*before, failure), (ACCEPTED, drawn(6), FINISHED)], others=1)
    events = await scheduler.run(grace_s=0)
    assert [one for event in events for one in event.delta.token_ids] == ([5, 6] if len(before) == 2 else [6])
    assert [message.context.attempt for message in scheduler.sent] == [1, 2]
    assert scheduler.sent[1].HasField("resume") is bool(before)
    assert scheduler.sent[1].elapsed_ns == 99


@pytest.mark.parametrize(
    "failure",
    [
        said(errors.Unavailable("kills executors", reason="LOST_TOO_OFTEN")),
        said(errors.ResourceExhausted("of the tenant", reason="QUOTA_EXCEEDED")),
        said(errors.InvalidArgument("bad")),
    ],
    ids=lambda failure: str(failure.code()),
)
async def test_what_every_scheduler_would_say_is_not_asked_twice(failure: AioRpcError) -> None:
    scheduler = Scheduler([(failure,), (ACCEPTED, FINISHED)], others=1)
    assert (await refused(scheduler)).message == failure.details()
    assert len(scheduler.sent) == 1


async def test_others_are_tried_once_each_and_then_the_failure_stands_for_a_new_request() -> None:
    scheduler = Scheduler([(cut(),)], others=2)
    assert isinstance(await refused(scheduler), errors.Unavailable)
    assert len(scheduler.sent) == 3


@pytest.mark.parametrize("bounds", [{"grace_s": 0.2}, {"left_s": 0.2}])
async def test_waiting_is_bounded_by_the_grace_and_by_the_callers_time(bounds: dict[str, float]) -> None:
    scheduler = Scheduler([(ACCEPTED, drawn(5), cut()), (cut(),)])
    assert isinstance(await refused(scheduler, **bounds), errors.Unavailable)
    assert len(scheduler.sent) > 1


async def test_what_breaks_behind_the_end_takes_nothing_away() -> None:
    scheduler = Scheduler([(ACCEPTED, drawn(5), FINISHED, cut()), (ACCEPTED, FINISHED)])
    assert await scheduler.run() == [ACCEPTED, drawn(5), FINISHED]
    assert len(scheduler.sent) == 1


def test_a_callers_next_attempt_is_above_all_tries_of_the_one_before() -> None:
    count: Callable[[int], int] = first_try
    assert count(1) == 1
    assert count(2) > count(1) + TRIES_APART - 1
    assert count(2**32 - 1) < 2**32
