"""`vllm.grpc.engine.VllmEngine` over the text edge, for gateways that speak it (`smg`). Thin.

Whoever is in front tokenizes and decodes by itself: ids come in and go out. What stays ours are stop strings, grammars,
limits and which scheduler has a request. Imported only where it is asked for, since its messages come from a package
that is no dependency of anything else. Invariant: a failure is a status, never a finish reason.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
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
from services.tokenizer.schedulers import Schedulers
from services.tokenizer.service import NO_DEADLINE_S
from services.tokenizer.text import TextModel
from tercet.v1 import common_pb2, scheduler_pb2

SERVICE: Final = "vllm.grpc.engine.VllmEngine"
ASK_S: Final = 2.0
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
        figures: Figures | None = None,
    ) -> None:
        self._edge = edge
        self._model = model
        self._schedulers = schedulers
        self._archive = archive
        self._figures = figures or Figures()
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
        figures.received_at = time.time()
        figures.active += 1
        try:
            async with aclosing(
                self._edge.generate(messages.to_edge(request, name), engine_call, call.metadata)
            ) as events:
                async for event in events:
                    if event.HasField("delta"):
                        figures.delivered(len(event.delta.token_ids))
                    elif event.HasField("finished"):
                        figures.hits.append((event.finished.usage.prompt_tokens, event.finished.usage.cached_tokens))
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

    async def FlushCache(self, request: Any, context: Context) -> Any:
        raise Unimplemented("FlushCache is not served: the scheduler has no such call", field="FlushCache")

    async def Embed(self, request: Any, context: Context) -> Any:
        raise Unimplemented("Embed is not served: models here generate", field="Embed")

    async def StartProfile(self, request: Any, context: Context) -> Any:
        raise Unimplemented("StartProfile is not served", field="StartProfile")

    async def StopProfile(self, request: Any, context: Context) -> Any:
        raise Unimplemented("StopProfile is not served", field="StopProfile")


def _no_path(name: str) -> str:
    """A path on nobody's disk: gateways look there first, and ask GetTokenizer then. A bare name would send them to a
    hub."""
    return f"/nonexistent/tercet/{name}"


async def _load(scheduler: Any) -> scheduler_pb2.SchedulerServiceGetLoadResponse | None:
    try:
        load: scheduler_pb2.SchedulerServiceGetLoadResponse = await scheduler.asking.GetLoad(
            scheduler_pb2.SchedulerServiceGetLoadRequest(), timeout=ASK_S
        )
    except grpc.aio.AioRpcError:
        return None
    return load
