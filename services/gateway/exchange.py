"""One generating HTTP request from its head to its end: the shell around the pure mappings.

Owns the order of things and every way in which they end. Invariants: the HTTP status is committed at the first
delta or Finished, so a refusal keeps its status; a client who leaves, in any phase, ends the engine's generator at
once and it is closed when the exchange is over; each exchange ends with one span and one observation.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

from opentelemetry.trace import Tracer
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from services import names
from services.callers import read_caller
from services.config import HttpLimits
from services.errors import Cancelled, Internal, ServiceError, Unavailable
from services.gate import OPEN_GATE, Gate
from services.gateway import http_errors, replies
from services.gateway.chunks import DONE, ChunkMaker, to_event, to_json
from services.gateway.engine import EngineCall, TextEngine
from services.gateway.intake import X_REQUEST_ID, draw_request_id, header_rows, only_header, read_body, read_head
from services.gateway.json_body import JsonObject, parse_object
from services.gateway.openai import Generation
from services.gateway.outlet import Outlet, SlowReader
from services.gateway.spans import RequestSpan
from services.gateway.spoken import Listening, SpokenChunks, listening_of, read_whole
from services.gateway.transcript import Transcript
from services.keys import Principal
from services.metrics import GatewayMetrics
from tercet.v1 import tokenizer_pb2

JSON: Final = "application/json"
EVENT_STREAM: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
CLIENT_GONE: Final = http_errors.ROWS[Cancelled].status
TRACE_ID_HEADER: Final = "tercet-trace-id"

Events = AsyncGenerator[tokenizer_pb2.TokenizerServiceGenerateResponse, None]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Desk:
    """What every exchange needs. clock: seconds since 1970. gate: who may ask."""

    engine: TextEngine
    limits: HttpLimits
    tracer: Tracer
    metrics: GatewayMetrics
    clock: Callable[[], float] = time.time
    gate: Gate = OPEN_GATE


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path: how its body is read and its reply written. An ASGI application."""

    desk: Desk
    route: str
    read: Callable[[JsonObject], Generation]
    style: replies.Style

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Exchange(self, scope, receive, send).run()


@dataclass(slots=True)
class Ending:
    """How an exchange ended. status: what the outcome means, also where another one was sent before."""

    status: int = 200
    outcome: str = "ok"
    error_type: str | None = None


@dataclass(slots=True)
class Work:
    """A request understood and about to run."""

    generation: Generation
    call: EngineCall
    transcript: Transcript
    listening: Listening


class Exchange:
    def __init__(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        self._endpoint = endpoint
        self._desk = endpoint.desk
        self._receive = receive
        self._headers = header_rows(scope)
        self._started_ns = time.monotonic_ns()
        self._span = RequestSpan(
            self._desk.tracer, scope["method"], endpoint.route, scope.get("scheme", "http"), self._headers
        )
        self._request_id = draw_request_id()
        self._outlet = Outlet(send, {}, self._desk.limits.write_timeout_s)
        self._transcript: Transcript | None = None
        self._form: str | None = None  # the parameter that asked for a grammar
        self._ending = Ending()
        self._streaming = False

    async def run(self) -> None:
        """Serve the request. Raises nothing but CancelledError, after the client was told."""
        self._name(self._request_id)
        if self._span.trace_id:
            self._outlet.add_header(TRACE_ID_HEADER, self._span.trace_id)
        try:
            await self._attempt()
        except asyncio.CancelledError:
            await self._fail(Unavailable("the server is shutting down", reason="SHUTTING_DOWN"))
            raise
        finally:
            self._close()

    async def _attempt(self) -> None:
        """The work, with every failure turned into what the client sees of it."""
        try:
            work = await self._understand()
            await self._until_disconnect(self._deliver(work))
            self._ending.outcome = _outcome(work.transcript)
        except ServiceError as error:
            await self._fail(error)
        except ClientDisconnect:
            self._give_up(Cancelled("the client left"))
        except SlowReader as error:
            self._ending = Ending(CLIENT_GONE, "slow_reader", "slow_reader")
            log.warning("stream ended: %s", error, extra={"request_id": self._request_id})
        except Exception as error:
            await self._fail(self._unexpected(error))

    async def _understand(self) -> Work:
        head = read_head(self._headers, self._request_id)
        self._name(head.request_id)
        principal = self._desk.gate.admit(only_header(self._headers, names.MD_AUTHORIZATION))
        limits = self._desk.limits
        raw = await read_body(self._receive, head, limits.max_body_bytes, limits.body_timeout_s)
        generation = self._endpoint.read(parse_object(raw))
        self._span.ask(generation)
        self._form = generation.form or ("tools" if generation.tools.demanded else None)
        listening = await self._listen(generation)
        self._transcript = Transcript(
            generation.choices, keep_text=not generation.stream, prompt_only=generation.score_only
        )
        call = EngineCall(
            request_id=head.request_id,
            tenant=head.tenant,
            priority=head.priority,
            context=self._span.context,
            timeout_s=self._desk.limits.request_timeout_s,
            started_ns=self._started_ns,
            principal=principal,
        )
        if principal is not None:
            call = _spelled_out(call, generation, principal)
        return Work(generation, call, self._transcript, listening)

    async def _listen(self, generation: Generation) -> Listening:
        if self._endpoint.style is not replies.CHAT:
            return Listening(None, None, False, _draw_call_id)
        described = await self._desk.engine.describe()
        return listening_of(generation, described.tool_format, described.reasoning_format, _draw_call_id)

    async def _until_disconnect(self, work: Coroutine[None, None, None]) -> None:
        """Run `work` to its end, or cancel it when the client leaves; it is over when this returns."""
        worker = asyncio.ensure_future(work)
        watcher = asyncio.ensure_future(_disconnected(self._receive))
        try:
            await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not worker.done() and not self._outlet.complete:
                raise ClientDisconnect
            await asyncio.wait({worker})
            if worker.cancelled():
                raise Internal("the engine gave the request up", reason="ENGINE_CANCELLED")
            worker.result()
        finally:
            worker.cancel()
            watcher.cancel()
            await asyncio.gather(worker, watcher, return_exceptions=True)

    async def _deliver(self, work: Work) -> None:
        async with aclosing(self._desk.engine.generate(work.generation.request, work.call)) as events:
            if work.generation.stream:
                await self._stream(work, events)
            else:
                await self._collect(work, events)

    async def _collect(self, work: Work, events: Events) -> None:
        async for response in events:
            work.transcript.apply(response)
        work.transcript.check_complete()
        frame = replies.frame_of(work.transcript, self._request_id, self._created())
        generation = work.generation
        reply = replies.whole(
            self._endpoint.style, frame, work.transcript, logprobs=generation.logprobs, echo=generation.echo
        )
        if work.listening.reads:
            read_whole(reply, work.listening)
        await self._outlet.whole(200, JSON, to_json(reply), {})

    async def _stream(self, work: Work, events: Events) -> None:
        maker = ChunkMaker(self._endpoint.style, work.generation, work.transcript, self._request_id, self._created())
        spoken = SpokenChunks(work.listening) if work.listening.reads else None
        async for response in events:
            chunk = maker.chunk(work.transcript.apply(response))
            chunks = [] if chunk is None else [chunk] if spoken is None else spoken.split(chunk)
            if not chunks:
                continue
            if not self._outlet.started:
                await self._outlet.start(200, EVENT_STREAM)
                self._desk.metrics.open_streams.inc()
                self._streaming = True
            await self._outlet.write(b"".join(map(to_event, chunks)))
        work.transcript.check_complete()
        last = maker.last()
        await self._outlet.write((to_event(last) if last is not None else b"") + DONE, last=True)

    async def _fail(self, error: ServiceError) -> None:
        """Tell the client: by status and body, or inside a stream that has begun, which then ends without [DONE]."""
        self._give_up(error)
        body = http_errors.body_of(error, self._endpoint.style.prompt_parameter, self._form)
        try:
            if not self._outlet.started:
                headers = http_errors.headers_of(error)
                await self._outlet.whole(self._ending.status, JSON, to_json(body), headers)
            elif not self._outlet.complete:
                await self._outlet.write(to_event(body), last=True)
        except SlowReader as slow:
            log.warning("an error could not be delivered: %s", slow, extra={"request_id": self._request_id})

    def _give_up(self, error: ServiceError) -> None:
        code = http_errors.code_of(error)
        self._ending = Ending(http_errors.row_of(error).status, code, code)

    def _unexpected(self, error: Exception) -> Internal:
        log.error(
            "uncaught %s in %s",
            type(error).__name__,
            self._endpoint.route,
            exc_info=error,
            extra={"request_id": self._request_id, "trace_id": self._span.trace_id},
        )
        return Internal(
            f"internal error, see the server log under request id {self._request_id}", reason="UNCAUGHT_EXCEPTION"
        )

    def _name(self, request_id: str) -> None:
        self._request_id = request_id
        self._outlet.add_header(X_REQUEST_ID, request_id)
        self._span.identify(request_id)

    def _close(self) -> None:
        if self._transcript is not None:
            self._span.answer(self._transcript)
        if self._streaming:
            self._desk.metrics.open_streams.dec()
        ending = self._ending
        self._span.end(ending.status, ending.outcome, ending.error_type)
        seconds = (time.monotonic_ns() - self._started_ns) / 1e9
        self._desk.metrics.record(self._endpoint.route, _status_class(ending.status), seconds, self._span.span)

    def _created(self) -> int:
        return int(self._desk.clock())


def _spelled_out(call: EngineCall, generation: Generation, principal: Principal) -> EngineCall:
    """With the key's tenant and a priority that it allows: an engine behind a channel knows this process's key only."""
    context = generation.request.context
    caller = read_caller(context, call.metadata, call.request_id, principal)
    context.priority = caller.priority
    return replace(call, tenant=caller.tenant, priority=caller.priority)


def _draw_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _status_class(status: int) -> str:
    """One of `services.metrics.STATUS_CLASSES`."""
    return "client_gone" if status == CLIENT_GONE else f"{status // 100}xx"


def _outcome(transcript: Transcript) -> str:
    """The first answer's finish reason: all of a request are under the same limits."""
    finished = transcript.answers[0].finished
    return "ok" if finished is None else replies.finish_reason(finished)
