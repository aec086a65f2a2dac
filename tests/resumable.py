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
from services.health import Readiness, add_health
from services.metrics import TokenizerMetrics
from services.rpc import Door, ServerOptions, bind, make_channel, make_server
from services.tokenizer.edge import EdgeIdentity, TextEdge
from services.tokenizer.export import pack, tokenizer_files
from services.tokenizer.prompts import PromptLimits, Prompts
from services.tokenizer.report import EdgeReport, SchedulerGauges
from services.tokenizer.schedulers import Schedulers
from services.tokenizer.service import TokenizerServicer
from services.tokenizer.text import TextModel, load_tokenizer
from tercet.v1 import tokenizer_pb2_grpc


@dataclass
class RunningEdge:
    target: str
    edge: TextEdge
    schedulers: Schedulers
    registry: CollectorRegistry


@cache
def text_model(path: Path) -> TextModel:
    with open_gguf(path) as file:
        return load_tokenizer(file.metadata)


@asynccontextmanager
async def running_edge(
    model: TextModel,
    *targets: str,
    listen: str = "127.0.0.1:0",
    grace_s: float = 60.0,
    watched: bool = False,
    most: int = 4096,
    slow_reader_s: float = 30.0,
) -> AsyncIterator[RunningEdge]:
    """targets: of its schedulers. watched: it looks at them again and again. most: requests at once. On leaving, its
    streams are cut as if it had died."""
    tracer = NoOpTracer()
    async with AsyncExitStack() as stack:
        quick = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 100)]
        doors = []
        for target in targets:
            channel = await stack.enter_async_context(make_channel(target, tracer, extra=quick))
            doors.append(Door(target, channel, channel))
        registry = CollectorRegistry()
        metrics = TokenizerMetrics.make(registry, "m", targets)
        readiness = Readiness(("tercet.v1.TokenizerService",))
        schedulers = Schedulers(doors, model.hash, readiness, SchedulerGauges(metrics))
        prompts = Prompts(model, None, PromptLimits(1 << 20), tracer)
        report = EdgeReport(metrics, "m", 30.0)
        edge = TextEdge(model, prompts, schedulers, EdgeIdentity("m", False, "hash"), tracer, report, grace_s, most)
        server = make_server(tracer, options=ServerOptions(slow_reader_s=slow_reader_s))
        archive = cache(lambda: pack(tokenizer_files(model, None, None)))
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(
            TokenizerServicer(edge, model, prompts, archive), server
        )
        add_health(server, readiness)
        target = bind(server, listen)
        await server.start()
        stack.push_async_callback(server.stop, 0)
        for one in schedulers:
            one.chain.state = await one.chain.look()
            assert one.state.problem is None, one.state.problem
        schedulers.note()
        watching = asyncio.create_task(schedulers.watch()) if watched else None
        yield RunningEdge(target, edge, schedulers, registry)
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await asyncio.sleep(0)
