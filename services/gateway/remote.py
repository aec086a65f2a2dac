"""The text engine at the other end of channels: what `tercet gateway` alone stands on.

Owns the translation of a call to metadata, deadline and errors, and what is seen of each tokenizer. Must not know HTTP.
Where a tokenizer dies its answers go on at another, or at the same one when it is there again, as the edge does it
for schedulers (`services.tokenizer.upstream`). Invariant: when a generator is closed or its task cancelled, the call is
cancelled.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.trace import get_current_span

from services import names, trace_context
from services.errors import ServiceError, Unavailable
from services.gateway.engine import EngineCall
from services.health import READY, REASON_KEY
from services.peers import Peers
from services.rpc import Door
from services.rpc_errors import from_rpc_error
from services.tokenizer.upstream import Stream, Upstream
from tercet._resume import Came, resumed, so_far
from tercet.v1 import tokenizer_pb2, tokenizer_pb2_grpc

if TYPE_CHECKING:
    from tercet.v1.tokenizer_pb2_grpc import TokenizerServiceAsyncStub

ASIDE_TIMEOUT_S: Final = 3.0
POLL_S: Final = 1.0
RESUME_GRACE_S: Final = 60.0

T = TypeVar("T")

Request = tokenizer_pb2.TokenizerServiceGenerateRequest
Response = tokenizer_pb2.TokenizerServiceGenerateResponse
Description = tokenizer_pb2.TokenizerServiceDescribeResponse

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of a tokenizer. One that answers and is not ready decides by itself what it takes."""

    problem: ServiceError | None = None
    takes: bool = True
    numerics: str = ""


@dataclass(slots=True)
class Tokenizer:
    """A peer. calls: of requests; traced."""

    target: str
    calls: "TokenizerServiceAsyncStub"
    asking: "TokenizerServiceAsyncStub"
    health: health_pb2_grpc.HealthStub
    state: Seen = Seen()

    async def describe(self) -> Description:
        """Raises ServiceError."""
        try:
            return await self.asking.Describe(tokenizer_pb2.TokenizerServiceDescribeRequest(), timeout=ASIDE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def look(self) -> Seen:
        try:
            described = await self.describe()
            reason = await self._not_ready()
        except ServiceError as error:
            return Seen(Unavailable(f"the tokenizer does not answer: {error.message or error.reason}"), takes=False)
        problem = None if reason is None else Unavailable(f"the tokenizer is not ready: {reason}")
        return Seen(problem, numerics=described.numerics)

    async def _not_ready(self) -> str | None:
        call = self.health.Check(health_pb2.HealthCheckRequest(service=READY), timeout=ASIDE_TIMEOUT_S)
        try:
            answer = await call
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return None
            told: bytes = dict(await call.trailing_metadata()).get(REASON_KEY, b"it gives no reason")
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return told.decode(errors="replace")


class RemoteEngine:
    """doors: to at least one tokenizer; their owner closes them. grace_s: how long an answer that has begun waits for a
    tokenizer."""

    def __init__(self, doors: Sequence[Door], grace_s: float = RESUME_GRACE_S) -> None:
        self._grace_s = grace_s
        self._tokenizers = Peers(
            [
                Tokenizer(
                    door.target,
                    tokenizer_pb2_grpc.TokenizerServiceStub(door.calls),
                    tokenizer_pb2_grpc.TokenizerServiceStub(door.asking),
                    health_pb2_grpc.HealthStub(door.asking),
                )
                for door in doors
            ]
        )

    async def watch(self) -> None:
        """Looks at the tokenizers again and again, until cancelled."""
        while True:
            for one, state in zip(
                self._tokenizers, await asyncio.gather(*(one.look() for one in self._tokenizers)), strict=True
            ):
                if state.problem is not None and one.state.problem is None:
                    log.warning("not ready", extra={"tokenizer": one.target, "reason": state.problem.message})
                one.state = state
            await asyncio.sleep(POLL_S)

    async def generate(self, request: Request, call: EngineCall) -> AsyncGenerator[Response, None]:
        """See TextEngine. Refusals of the other side keep their kind, field, limit and delay."""
        deadline_s = time.monotonic() + call.timeout_s
        metadata = _metadata(call)
        delivered = AtTokenizer(request)
        route = self._tokenizers.route(blake2b(call.request_id.encode(), digest_size=16).digest())

        def call_next(message: Request) -> Stream:
            left_s = max(0.0, deadline_s - time.monotonic())
            return route.take().calls.Generate(message, timeout=left_s, metadata=metadata)

        upstream = Upstream(delivered.first, delivered, route, call_next, deadline_s, self._grace_s, call.request_id)
        try:
            async with aclosing(upstream.events()) as events:
                async for response in events:
                    if response.HasField("accepted"):
                        delivered.passed = 0
                        if route.numerics is not None:
                            get_current_span(call.context).add_event(names.EVENT_TOKENIZER_LOST)
                            continue
                        route.numerics = response.accepted.numerics
                    if not response.HasField("prompt_logprobs") or delivered.score(response):
                        yield response
        finally:
            route.leave()

    async def describe(self) -> Description:
        """See TextEngine."""
        return await self._ask(lambda one: one.describe())

    async def tokenize(
        self, request: tokenizer_pb2.TokenizerServiceTokenizeRequest, call: EngineCall
    ) -> tokenizer_pb2.TokenizerServiceTokenizeResponse:
        return await self._ask(
            lambda one: one.calls.Tokenize(request, timeout=call.timeout_s, metadata=_metadata(call))
        )

    async def detokenize(
        self, request: tokenizer_pb2.TokenizerServiceDetokenizeRequest, call: EngineCall
    ) -> tokenizer_pb2.TokenizerServiceDetokenizeResponse:
        return await self._ask(
            lambda one: one.calls.Detokenize(request, timeout=call.timeout_s, metadata=_metadata(call))
        )

    async def render_chat(
        self, request: tokenizer_pb2.TokenizerServiceRenderChatRequest, call: EngineCall
    ) -> tokenizer_pb2.TokenizerServiceRenderChatResponse:
        return await self._ask(
            lambda one: one.calls.RenderChat(request, timeout=call.timeout_s, metadata=_metadata(call))
        )

    async def _ask(self, question: Callable[[Tokenizer], Awaitable[T]]) -> T:
        """The first that answers. What is about the question itself is not asked again elsewhere."""
        failure: ServiceError = Unavailable("there is no tokenizer")
        for one in self._tokenizers.able() or self._tokenizers:
            try:
                return await question(one)
            except ServiceError as error:
                failure = error
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
                if not isinstance(failure, Unavailable):
                    break
        raise failure

    async def why_not_ready(self) -> str | None:
        """See TextEngine. Asks the tokenizers each time."""
        states = await asyncio.gather(*(one.look() for one in self._tokenizers))
        problems = [state.problem.message for state in states if state.problem is not None]
        return "; ".join(problems) if len(problems) == len(states) else None


@dataclass(slots=True)
class AtTokenizer:
    """The progress of a request at tokenizers."""

    message: Request
    ids: list[list[int]] = field(default_factory=list)  # by answer
    characters: list[int] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)
    told: tokenizer_pb2.Accepted | None = None
    scored: int = 0  # of the prompt's logprobs, passed on
    passed: int = 0  # of them, come in this try: without a delta it tells them from the start
    told_first: bool = False

    def __post_init__(self) -> None:
        n = max(1, self.message.sampling.n)
        self.ids = [[] for _ in range(n)]
        self.characters = [0] * n

    @property
    def first(self) -> Request:
        """The message of the first try: whoever is to go on elsewhere needs the prompt's ids."""
        message = Request()
        message.CopyFrom(self.message)
        message.return_prompt_ids = True
        return message

    @property
    def accepted(self) -> bool:
        return self.told is not None

    @property
    def attempt(self) -> int:
        return self.message.context.attempt or 1

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))

    def accept(self, event: Response) -> None:
        if self.told is None and event.accepted.n:
            del self.ids[event.accepted.n :]  # fewer come than were asked for
        self.told = self.told or event.accepted

    def add(self, event: Response) -> None:
        self.ids[event.delta.index].extend(event.delta.token_ids)
        self.characters[event.delta.index] += len(event.delta.text)

    def score(self, event: Response) -> bool:
        """Cuts off what was passed on before; whether something is left."""
        rows, known = event.prompt_logprobs.logprobs, self.scored - self.passed
        self.passed += len(rows)
        self.scored = max(self.scored, self.passed)
        del rows[: max(0, known)]
        if self.told_first:
            event.prompt_logprobs.ClearField("first")
        news = bool(rows) or event.prompt_logprobs.HasField("first")
        self.told_first = True
        return news

    def finish(self, event: Response) -> bool:
        self.finished.add(event.finished.index)
        return len(self.finished) == len(self.ids)

    def again(self, attempt: int) -> Request | None:
        message = self.first
        if self.told is None:
            message.context.attempt = attempt
            return message
        came = [
            Came(ids, characters, index in self.finished)
            for index, (ids, characters) in enumerate(zip(self.ids, self.characters, strict=False))
        ]
        delivered = so_far(self.told, came)
        return None if delivered is None else resumed(message, attempt, self.told.seed, delivered)


def _metadata(call: EngineCall) -> tuple[tuple[str, str], ...]:
    return (*call.metadata.items(), *trace_context.inject(get_current_span(call.context)))
