"""Asking a scheduler: the subject of its checks, requests, answers whose order is looked at on the way."""

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import grpc

from services.conform.kit import ANSWER_S, NotApplicable, check_status, fail, require
from tercet.v1 import common_pb2, scheduler_pb2

if TYPE_CHECKING:
    from tercet.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

GENERATE_S: Final = 30.0
SHORT: Final = 8

Request = scheduler_pb2.SchedulerServiceGenerateRequest


@dataclass(frozen=True, slots=True)
class Scheduler:
    """The subject of the checks. long: output tokens of an answer that takes its time."""

    channel: grpc.aio.Channel
    stub: "SchedulerServiceAsyncStub"
    model: common_pb2.ModelDescription
    numerics: str

    @property
    def prompt(self) -> list[int]:
        ends = set(self.model.eos_token_ids)
        usable = [one for one in range(min(self.model.vocab_size, 4096)) if one not in ends]
        return [usable[(3 + 7 * at) % len(usable)] for at in range(min(5, self.model.max_model_len // 2))]

    @property
    def long(self) -> int:
        return self.model.max_model_len - len(self.prompt)


@dataclass(frozen=True, slots=True)
class Answer:
    accepted: scheduler_pb2.SchedulerAccepted
    token_ids: list[int]
    finished: scheduler_pb2.SchedulerFinished


async def meet(channel: grpc.aio.Channel, stub: "SchedulerServiceAsyncStub") -> Scheduler:
    told = await stub.Describe(scheduler_pb2.SchedulerServiceDescribeRequest(), timeout=ANSWER_S)
    return Scheduler(channel, stub, told.model, told.numerics)


def request(scheduler: Scheduler, max_tokens: int = SHORT, **sampling: Any) -> Request:
    """Greedy, of exactly max_tokens unless told otherwise, under an id of its own."""
    drawing: dict[str, Any] = {"temperature": 0.0, "seed": 1, "ignore_eos": True, "max_tokens": max_tokens, **sampling}
    return Request(
        context=common_pb2.RequestContext(request_id=f"conform-{uuid.uuid4().hex}"),
        prompt_ids=scheduler.prompt,
        sampling=common_pb2.SamplingParams(**drawing),
    )


def generate(scheduler: Scheduler, message: Request, **options: Any) -> Any:
    return scheduler.stub.Generate(message, timeout=options.pop("timeout", GENERATE_S), **options)


async def whole(scheduler: Scheduler, message: Request, **options: Any) -> Answer:
    """An answer from Accepted to its end, its order looked at on the way."""
    accepted = finished = None
    tokens: list[int] = []
    async for event in generate(scheduler, message, **options):
        kind = event.WhichOneof("event")
        require(finished is None, f"{kind} came behind Finished")
        match kind:
            case "accepted":
                require(accepted is None and not tokens, "Accepted is not the first event, or came twice")
                accepted = event.accepted
            case "delta":
                require(accepted is not None, "a delta came before Accepted")
                require(event.delta.token_ids, "a delta holds no token")
                require(event.delta.index == 0, f"a delta of answer {event.delta.index}; one answer was asked for")
                tokens.extend(event.delta.token_ids)
            case "finished":
                finished = event.finished
            case other:
                fail(f"an event {other} that was not asked for")
    if accepted is None or finished is None:
        fail(f"the stream ended well without {'Accepted' if accepted is None else 'Finished'}")
    return Answer(accepted, tokens, finished)


async def begun(stream: Any, deltas: int = 1) -> list[int]:
    """Reads until so many deltas have come."""
    tokens: list[int] = []
    async for event in stream:
        if event.WhichOneof("event") == "finished":
            raise NotApplicable("answers end before anything can be done about them")
        tokens.extend(event.delta.token_ids)
        deltas -= bool(event.delta.token_ids)
        if deltas <= 0:
            return tokens
    fail("the stream ended without Finished")


async def ending(stream: Any, *codes: grpc.StatusCode, what: str) -> Any:
    """The refusal that a begun stream ends with."""
    try:
        async for _ in stream:
            pass
    except grpc.aio.AioRpcError as error:
        return check_status(error, *codes, what=what)
    fail(f"{what} ended well; expected {' or '.join(code.name for code in codes)}")
