"""`vllm.grpc.engine.VllmEngine` over the text edge, for gateways that speak it (`smg`). Thin.

Whoever is in front tokenizes and decodes by itself: ids come in and go out. What stays ours are stop strings, grammars,
limits and which scheduler has a request. Imported only where it is asked for, since its messages come from a package
that is no dependency of anything else. Invariant: a failure is a status, never a finish reason.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import grpc
from smg_grpc_proto.generated import common_pb2 as smg_pb2
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from services import names
from services.callers import read_caller
from services.errors import InvalidArgument, Unavailable, Unimplemented
from services.gateway.engine import EngineCall
from services.process import VERSION
from services.rpc_server import call_context
from services.tokenizer import vllm_messages as messages
from services.tokenizer.edge import TextEdge
from services.tokenizer.export import TokenizerZip
from services.tokenizer.schedulers import Scheduler, Schedulers
from services.tokenizer.service import NO_DEADLINE_S
from services.tokenizer.text import TextModel
from services.tokenizer.vllm_events import CacheEvents
from tercet.v1 import common_pb2, scheduler_pb2, tokenizer_pb2

SERVICE: Final = "vllm.grpc.engine.VllmEngine"
ASK_S: Final = 2.0
MOST_FLUSH_S: Final = 600.0
FLUSH_POLL_S: Final = 0.1
MOST_ABORTS: Final = 1024  # ids of one call
RATE_S: Final = 2.0  # over which tokens per second are counted
HITS: Final = 64  # latest answers over which the cache's share is counted
ORIGINAL_ID_CHARS: Final = 256

Context = Any  # grpc.aio.ServicerContext is generic in ways that the generated servicers don't name


@dataclass(slots=True)
class Figures:
    """What went through this port lately. clock: seconds, monotonic."""

    clock: Callable[[], float] = time.monotonic
    active: int = 0
    received_at: float = 0.0  # seconds since 1970
    began: float = field(init=False)
    tokens: deque[tuple[float, int]] = field(default_factory=deque)
    hits: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=HITS))  # prompt tokens, cached ones

    def __post_init__(self) -> None:
        self.began = self.clock()

    def delivered(self, tokens: int) -> None:
        self.tokens.append((self.clock(), tokens))
        self._trim()

    def tokens_per_s(self) -> float:
        self._trim()
        return sum(count for _, count in self.tokens) / RATE_S

    def cached_share(self) -> float:
        prompt = sum(tokens for tokens, _ in self.hits)
        return sum(cached for _, cached in self.hits) / prompt if prompt else 0.0

    def _trim(self) -> None:
        since = self.clock() - RATE_S
        while self.tokens and self.tokens[0][0] < since:
            self.tokens.popleft()


class VllmServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    """archive: may take a moment, is called in a thread."""

    def __init__(
        self,
        edge: TextEdge,
        model: TextModel,
        schedulers: Schedulers,
        archive: Callable[[], TokenizerZip],
        events: CacheEvents,
    ) -> None:
        self._edge = edge
        self._model = model
        self._schedulers = schedulers
        self._archive = archive
        self._events = events
        self._figures = Figures()
        self._was_ready = False

    async def Generate(self, request: Any, context: Context) -> AsyncIterator[Any]:
        call, figures = call_context(context), self._figures
        name = messages.request_id(request.request_id) if request.request_id else call.request_id
        if name != request.request_id:
            call.span.set_attribute(names.ORIGINAL_REQUEST_ID, request.request_id[:ORIGINAL_ID_CHARS])
        left: float | None = context.time_remaining()
        engine_call = EngineCall(
            request_id=name,
            tenant=None,
            priority=None,
            context=call.context,
            timeout_s=NO_DEADLINE_S if left is None else left,
            started_ns=call.started_ns,
            principal=call.principal,
        )
        replies = messages.Replies(request)
        tenant = read_caller(common_pb2.RequestContext(), call.metadata, name, call.principal).tenant
        passing = _Passing(self._events, tenant, request.tokenized.input_ids)
        figures.received_at = time.time()
        figures.active += 1
        try:
            async with aclosing(
                self._edge.generate(messages.to_edge(request, name), engine_call, call.metadata)
            ) as events:
                async for event in events:
                    match event.WhichOneof("event"):
                        case "accepted":
                            passing.accepted(event.accepted)
                        case "delta":
                            figures.delivered(len(event.delta.token_ids))
                            passing.delta(event.delta)
                        case "finished":
                            usage = event.finished.usage
                            figures.hits.append((usage.prompt_tokens, usage.cached_tokens))
                            passing.finished(event.finished)
                    for reply in replies.of(event):
                        yield reply
        finally:
            figures.active -= 1

    async def Abort(self, request: Any, context: Context) -> Any:
        if len(request.request_ids) > MOST_ABORTS:
            raise InvalidArgument(
                f"request_ids has {len(request.request_ids)} entries; the limit is {MOST_ABORTS}",
                field="request_ids",
                limit=MOST_ABORTS,
            )
        call = call_context(context)
        caller = read_caller(common_pb2.RequestContext(), call.metadata, call.request_id, call.principal)
        for given in request.request_ids:
            self._edge.abort(caller.tenant, messages.request_id(given))
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        """Before the chain was complete for the first time there is no engine to be healthy: UNAVAILABLE, so that a
        gateway asks again before it reads the model's description."""
        problem = await self._edge.why_not_ready()
        self._was_ready = self._was_ready or problem is None
        if not self._was_ready:
            raise Unavailable(problem or "", reason="STARTING")
        return vllm_engine_pb2.HealthCheckResponse(healthy=problem is None, message=problem or "")

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        described = await self._edge.describe()
        model = described.model
        if not model.max_model_len:
            raise Unavailable("no scheduler has described the model yet", reason="STARTING")
        bos = self._model.bos_id
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=_no_path(model.name),
            is_generation=True,
            max_context_length=model.max_model_len,
            vocab_size=model.vocab_size,
            served_model_name=model.name,
            tokenizer_path=_no_path(model.name),
            eos_token_ids=model.eos_token_ids,
            bos_token_id=0 if bos is None else bos,
            max_req_input_len=model.max_model_len - 1,
        )

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        figures = self._figures
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=figures.active,
            is_paused=False,
            last_receive_timestamp=figures.received_at,
            uptime_seconds=figures.clock() - figures.began,
            server_type="tercet",
            data_parallel_size=1,
        )

    async def GetLoads(self, request: Any, context: Context) -> Any:
        """The schedulers that answer, together, as one rank."""
        if request.dp_rank:
            raise InvalidArgument(f"dp_rank is {request.dp_rank}; there is one rank, 0", field="dp_rank", limit=0)
        loads = [load for load in await asyncio.gather(*map(_load, self._schedulers)) if load is not None]
        if not loads:
            raise self._schedulers.problem() or Unavailable("no scheduler answers", reason="NO_SCHEDULER")
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=VERSION,
            dp_rank_count=1,
            loads=[messages.load(loads, self._figures.tokens_per_s(), self._figures.cached_share())],
        )

    async def GetTokenizer(self, request: Any, context: Context) -> AsyncIterator[Any]:
        archive = await asyncio.to_thread(self._archive)
        *first, last = archive.chunks()
        for chunk in first:
            yield smg_pb2.GetTokenizerChunk(data=chunk)
        yield smg_pb2.GetTokenizerChunk(data=last, sha256=archive.sha256)

    def SubscribeKvEvents(self, request: Any, context: Context) -> AsyncIterator[Any]:
        return self._events.subscribe(request.start_sequence_number)

    async def FlushCache(self, request: Any, context: Context) -> Any:
        """At every scheduler. What requests that run hold is taken as they end, within timeout_s; else no success."""
        if not 0 <= request.timeout_s <= MOST_FLUSH_S:
            raise InvalidArgument(
                f"timeout_s is {request.timeout_s:g}; it must be 0 to {MOST_FLUSH_S:g}",
                field="timeout_s",
                limit=int(MOST_FLUSH_S),
            )
        until, removed = time.monotonic() + request.timeout_s, 0
        while True:
            answers = await asyncio.gather(*map(_flush, self._schedulers))
            missing = answers.count(None)
            flushed = [one for one in answers if one is not None]
            removed += sum(one.removed_blocks for one in flushed)
            held = sum(one.held_blocks for one in flushed)
            if not (held or missing) or time.monotonic() >= until:
                break
            await asyncio.sleep(FLUSH_POLL_S)
        message = f"{removed} blocks forgotten"
        if held:
            message += f"; {held} are held by requests that run"
        if missing:
            message += f"; {missing} of {len(answers)} schedulers did not answer"
        return smg_pb2.FlushCacheResponse(success=not (held or missing), message=message)

    async def Embed(self, request: Any, context: Context) -> Any:
        raise Unimplemented("Embed is not served: models here generate", field="Embed")

    async def StartProfile(self, request: Any, context: Context) -> Any:
        raise Unimplemented("StartProfile is not served", field="StartProfile")

    async def StopProfile(self, request: Any, context: Context) -> Any:
        raise Unimplemented("StopProfile is not served", field="StopProfile")


class _Passing:
    """The tokens of one request, for who listens to what is cached. prompt: empty where it came as text."""

    def __init__(self, events: CacheEvents, tenant: str, prompt: Sequence[int]) -> None:
        self._events = events
        self._tenant = tenant
        self._prompt = prompt
        self._numerics = ""
        self._outputs: dict[int, list[int]] = {}

    def accepted(self, accepted: tokenizer_pb2.Accepted) -> None:
        self._numerics = accepted.numerics
        self._prompt = self._prompt or accepted.prompt_ids
        self._events.learn(self._numerics, self._tenant, self._prompt)

    def delta(self, delta: tokenizer_pb2.TextDelta) -> None:
        self._outputs.setdefault(delta.index, []).extend(delta.token_ids)

    def finished(self, finished: tokenizer_pb2.Finished) -> None:
        output = self._outputs.pop(finished.index, [])
        self._events.learn(self._numerics, self._tenant, self._prompt, output)


def _no_path(name: str) -> str:
    """A path on nobody's disk: gateways look there first, and ask GetTokenizer then. A bare name would send them to a
    hub."""
    return f"/nonexistent/tercet/{name}"


@asynccontextmanager
async def vllm_engine(
    edge: TextEdge, model: TextModel, schedulers: Schedulers, archive: Callable[[], TokenizerZip]
) -> AsyncIterator[Callable[[grpc.aio.Server], None]]:
    """The service with what it watches in the background; yields what adds it to a server."""
    events = CacheEvents(schedulers)
    servicer = VllmServicer(edge, model, schedulers, archive, events)
    watching = asyncio.create_task(events.watch())
    try:
        yield lambda server: vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _load(scheduler: Scheduler) -> scheduler_pb2.SchedulerServiceGetLoadResponse | None:
    try:
        return await scheduler.asking.GetLoad(scheduler_pb2.SchedulerServiceGetLoadRequest(), timeout=ASK_S)
    except grpc.aio.AioRpcError:
        return None


async def _flush(scheduler: Scheduler) -> scheduler_pb2.SchedulerServiceFlushCacheResponse | None:
    try:
        return await scheduler.asking.FlushCache(scheduler_pb2.SchedulerServiceFlushCacheRequest(), timeout=ASK_S)
    except grpc.aio.AioRpcError:
        return None
