"""The chain in this process for tests: a scheduler, and a text edge, in front of the fake executor."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from fake_stack import CAPABILITIES, RunningExecutor, running_executor, until
from opentelemetry.trace import NoOpTracer, Tracer
from prometheus_client import CollectorRegistry

from executor.loading.gguf import open_gguf
from executor.step import Capacity
from services.address import parse_address
from services.config import HttpLimits
from services.executor.fake import FakeRunner
from services.gateway.app import make_app
from services.gateway.server import serve as serve_http
from services.health import Readiness, add_health
from services.metrics import SchedulerMetrics, TokenizerMetrics
from services.rpc import Door, bind, make_channel, make_server
from services.scheduler.core.calls import CoreConfig, Limits
from services.scheduler.core.core import SchedulerCore
from services.scheduler.engine import Engine, EngineConfig
from services.scheduler.grammars import Grammars
from services.scheduler.intake import LimitPolicy
from services.scheduler.lease import Lease
from services.scheduler.report import SchedulerReport
from services.scheduler.service import SchedulerServicer
from services.tokenizer.chain import Chain as ChainWatch
from services.tokenizer.edge import MAX_REQUESTS, EdgeIdentity, TextEdge
from services.tokenizer.export import pack, tokenizer_files
from services.tokenizer.prompts import PromptLimits, Prompts
from services.tokenizer.renderer import Renderer
from services.tokenizer.report import EdgeReport
from services.tokenizer.schedulers import Schedulers
from services.tokenizer.service import TokenizerServicer
from services.tokenizer.templates import ChatTemplate, load_chat_template
from services.tokenizer.text import TextModel, load_tokenizer
from tercet.v1 import scheduler_pb2_grpc, tokenizer_pb2_grpc

CAPACITY = Capacity(
    block_size=4, total_blocks=64, max_batched_tokens=64, max_sequences=16, max_model_len=128, vocab_size=1000
)


@dataclass
class Chain:
    """A scheduler. registry: its metrics."""

    target: str
    stub: "scheduler_pb2_grpc.SchedulerServiceAsyncStub"
    engine: Engine
    core: SchedulerCore
    lease: Lease
    readiness: Readiness
    registry: CollectorRegistry
    grammars: Grammars

    async def drained(self) -> None:
        """Nothing is live, allocated or in flight any more."""
        await until(lambda: not self.engine.live_requests(), "the last request's end")
        await until(
            lambda: all(
                lane.blocks_free + lane.blocks_cached == lane.blocks_total and lane.steps_in_flight == 0
                for lane in self.engine.load().lanes.values()
            ),
            "an empty pool",
        )
        self.core.check()


@asynccontextmanager
async def scheduler(
    target: str,
    core: CoreConfig = CoreConfig(),
    config: EngineConfig = EngineConfig(),
    limits: Limits = Limits(),
    tracer: Tracer | None = None,
    listen: str = "127.0.0.1:0",
) -> AsyncIterator[Chain]:
    tracer = tracer or NoOpTracer()
    registry = CollectorRegistry()
    pure = SchedulerCore(core)
    engine = Engine(pure, config, tracer, SchedulerReport(SchedulerMetrics.make(registry), 30.0))
    channel = make_channel(target, extra=[("grpc.max_reconnect_backoff_ms", 200)])
    readiness = Readiness(("tercet.v1.SchedulerService",))
    grammars = Grammars(tracer)

    def changed() -> None:
        if lease.state.reason:
            readiness.set_not_ready(lease.state.reason)
        else:
            readiness.set_ready()

    lease = Lease(target, channel, engine, "test", changed, grammars)
    holding = asyncio.create_task(lease.run())
    server = make_server(tracer)
    servicer = SchedulerServicer(engine, (lease,), LimitPolicy(limits, Limits()), 5.0, "hash", readiness, grammars)
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, server)
    add_health(server, readiness)
    address = bind(server, listen)
    await server.start()
    client = make_channel(address)
    try:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(client)
        yield Chain(address, stub, engine, pure, lease, readiness, registry, grammars)
    finally:
        await client.close()
        await server.stop(0)
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        await channel.close()


@asynccontextmanager
async def chain(
    mode: str = "hash",
    capacity: Capacity = CAPACITY,
    core: CoreConfig = CoreConfig(),
    config: EngineConfig = EngineConfig(),
    limits: Limits = Limits(),
    runner: FakeRunner | None = None,
    eos: tuple[int, ...] = (),
    capabilities: tuple[int, ...] = CAPABILITIES,
) -> AsyncIterator[tuple[Chain, RunningExecutor]]:
    """A scheduler with a lease on a fake executor; on leaving, all is drained and no foreign KV entry was read."""
    async with running_executor(mode, capacity, runner=runner, eos_token_ids=eos, capabilities=capabilities) as fake:
        async with scheduler(fake.target, core, config, limits) as running:
            await until(lambda: not running.lease.state.reason, "the lease")
            yield running, fake
            await running.drained()
        assert not fake.runner.violations


@dataclass
class TextChain:
    """target: the edge's gRPC door. http: the gateway's base URL."""

    target: str
    http: str
    model: TextModel
    runner: FakeRunner
    scheduler: Chain
    watch: ChainWatch
    edge: TextEdge
    registry: CollectorRegistry
    schedulers: Schedulers


@cache
def text_model(path: Path) -> tuple[TextModel, ChatTemplate | None]:
    """Immutable, and takes a second to build."""
    with open_gguf(path) as file:
        model = load_tokenizer(file.metadata)
        return model, load_chat_template(file.metadata, model)


@asynccontextmanager
async def text_chain(
    model_path: Path,
    answer: str = "Hello.",
    *,
    script: Sequence[int] | None = None,
    padding: int = 0,
    ends: bool = True,
    tracer: Tracer | None = None,
    tokenizer_hash: str | None = None,
    max_prompt_bytes: int = 1 << 20,
    total_blocks: int = 256,
    max_requests: int = MAX_REQUESTS,
    core: CoreConfig = CoreConfig(),
) -> AsyncIterator[TextChain]:
    """Edge, gateway, scheduler and fake executor over real sockets, with the default model's real tokenizer.

    answer: what the executor plays to every prompt. script: as ids, instead. ends: then the end of the message comes.
    padding: ids that the model has beyond the tokenizer's.
    """
    tracer = tracer or NoOpTracer()
    model, template = text_model(model_path)
    capacity = replace(CAPACITY, vocab_size=model.vocab_size + padding, max_model_len=512, total_blocks=total_blocks)
    played = model.encode(answer, add_special=False) if script is None else script
    script = (*played, *((min(model.eos_ids),) if ends else ()))
    runner = FakeRunner("script", capacity, scripts={(): script})
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(
            running_executor(
                "script",
                capacity,
                runner=runner,
                tokenizer_hash=tokenizer_hash or model.hash,
                eos_token_ids=tuple(sorted(model.eos_ids)),
            )
        )
        behind = await stack.enter_async_context(scheduler(fake.target, core, tracer=tracer))
        channel = await stack.enter_async_context(make_channel(behind.target, tracer))
        readiness = Readiness(("tercet.v1.TokenizerService",))
        schedulers = Schedulers([Door(behind.target, channel, channel)], model.hash, readiness)
        (watch,) = (one.chain for one in schedulers)
        registry = CollectorRegistry()
        chats = None if template is None else Renderer(template)
        if chats is not None:
            stack.push_async_callback(chats.close)
        prompts = Prompts(model, chats, PromptLimits(max_prompt_bytes), tracer)
        edge = TextEdge(
            model,
            prompts,
            schedulers,
            EdgeIdentity("smollm2-135m", template is not None, "hash"),
            tracer,
            EdgeReport(TokenizerMetrics.make(registry, "smollm2-135m"), "smollm2-135m", 30.0),
            max_requests=max_requests,
        )
        server = make_server(tracer)
        archive = cache(lambda: pack(tokenizer_files(model, template, None)))
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(
            TokenizerServicer(edge, model, prompts, archive), server
        )
        target = bind(server, "127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, 0)
        app = make_app(edge, HttpLimits(), tracer=tracer, registry=registry)
        http = await serve_http(app, parse_address("127.0.0.1:0"))
        stack.push_async_callback(http.close, 0)
        await until(lambda: not behind.lease.state.reason, "the lease")
        watch.state = await watch.look()
        yield TextChain(
            target, f"http://127.0.0.1:{http.port}", model, runner, behind, watch, edge, registry, schedulers
        )
        await behind.drained()
    assert not runner.violations
