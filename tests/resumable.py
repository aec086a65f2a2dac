"""A text edge that a test can end and start again, apart from the scheduler behind it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from opentelemetry.trace import NoOpTracer
from prometheus_client import CollectorRegistry

from executor.loading.gguf import open_gguf
from services.health import Readiness
from services.metrics import TokenizerMetrics
from services.rpc import bind, make_channel, make_server
from services.tokenizer.chain import Chain
from services.tokenizer.edge import EdgeIdentity, TextEdge
from services.tokenizer.export import pack, tokenizer_files
from services.tokenizer.prompts import PromptLimits, Prompts
from services.tokenizer.report import EdgeReport
from services.tokenizer.service import TokenizerServicer
from services.tokenizer.text import TextModel, load_tokenizer
from tercet.v1 import tokenizer_pb2_grpc


@dataclass
class RunningEdge:
    target: str
    edge: TextEdge
    watch: Chain


@cache
def text_model(path: Path) -> TextModel:
    with open_gguf(path) as file:
        return load_tokenizer(file.metadata)


@asynccontextmanager
async def running_edge(
    model: TextModel, scheduler: str, *, listen: str = "127.0.0.1:0", grace_s: float = 60.0
) -> AsyncIterator[RunningEdge]:
    """On leaving, its streams are cut as if it had died."""
    tracer = NoOpTracer()
    async with AsyncExitStack() as stack:
        quick = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 100)]
        channel = await stack.enter_async_context(make_channel(scheduler, tracer, extra=quick))
        watch = Chain(channel, model.hash, Readiness(("tercet.v1.TokenizerService",)))
        prompts = Prompts(model, None, PromptLimits(1 << 20), tracer)
        report = EdgeReport(TokenizerMetrics.make(CollectorRegistry(), "m"), "m", 30.0)
        edge = TextEdge(model, prompts, channel, watch, EdgeIdentity("m", False, "hash"), tracer, report, grace_s)
        server = make_server(tracer)
        archive = cache(lambda: pack(tokenizer_files(model, None, None)))
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(
            TokenizerServicer(edge, model, prompts, archive), server
        )
        target = bind(server, listen)
        await server.start()
        stack.push_async_callback(server.stop, 0)
        watch.state = await watch.look()
        assert watch.state.problem is None, watch.state.problem
        yield RunningEdge(target, edge, watch)
        await asyncio.sleep(0)
