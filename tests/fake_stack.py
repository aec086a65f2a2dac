"""Running pieces of the stack for tests: servers in this process, on loopback, without a model."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from opentelemetry.trace import NoOpTracer, Tracer

from executor.step import Capacity
from services.description import ExecutorDescription, ModelIdentity
from services.executor.fake import SMALL, BadStep, FakeRunner
from services.executor.fake_stream import FaultyStream
from services.executor.observer import UNOBSERVED, Observer
from services.executor.service import ExecutorService
from services.executor.session import SessionSettings
from services.executor.worker import HANG_FLOOR_NS, GrammarSource, Held, Running, Worker
from services.health import Readiness, add_health
from services.rpc import bind, make_server
from tercet.v1 import executor_pb2, executor_pb2_grpc

MODEL_HASH = "f" * 64
TOKENIZER_HASH = "e" * 64
CAPABILITIES = (executor_pb2.EXECUTOR_CAPABILITY_LOGPROBS, executor_pb2.EXECUTOR_CAPABILITY_PROMPT_LOGPROBS)


@dataclass
class RunningExecutor:
    """target: where it listens. hung: the steps that `on_hang` was told about."""

    target: str
    runner: FakeRunner
    stream: FaultyStream
    service: ExecutorService
    worker: Worker
    description: ExecutorDescription
    hung: list[Running] = field(default_factory=list)


def fake_description(
    capacity: Capacity,
    numerics: str,
    *,
    model_hash: str = MODEL_HASH,
    tokenizer_hash: str = TOKENIZER_HASH,
    eos_token_ids: tuple[int, ...] = (2,),
    instance_id: str = "fake-instance",
    grammars: bool = False,
    capabilities: tuple[int, ...] = CAPABILITIES,
) -> ExecutorDescription:
    model = ModelIdentity(
        "fake", model_hash, tokenizer_hash, capacity.max_model_len, capacity.vocab_size, eos_token_ids
    )
    more = (executor_pb2.EXECUTOR_CAPABILITY_GRAMMAR,) if grammars else ()
    return ExecutorDescription(model, capacity, numerics, "fake", instance_id, "config-hash", capabilities + more)


@asynccontextmanager
async def running_executor(
    mode: str = "hash",
    capacity: Capacity = SMALL,
    *,
    runner: FakeRunner | None = None,
    model_hash: str = MODEL_HASH,
    tokenizer_hash: str = TOKENIZER_HASH,
    eos_token_ids: tuple[int, ...] = (2,),
    instance_id: str = "fake-instance",
    settings: SessionSettings = SessionSettings(),
    hang_floor_ns: int = HANG_FLOOR_NS,
    observer: Observer = UNOBSERVED,
    tracer: Tracer | None = None,
    listen: str = "127.0.0.1:0",
    opened: bool = True,
    grammars: GrammarSource | None = None,
    capabilities: tuple[int, ...] = CAPABILITIES,
) -> AsyncIterator[RunningExecutor]:
    """A real executor server over a FakeRunner (`runner`, or one of `mode` and `capacity`).

    grammars: who answers when one is to be prepared; the fake runner draws as ever. None: they are refused.
    opened: False leaves it as while a model loads; `service.open(description)` ends that. listen: give an address
    to start another one where this one was.
    """
    fake = runner or FakeRunner(mode, capacity)
    hung: list[Running] = []
    description = fake_description(
        fake.capacity,
        fake.numerics,
        model_hash=model_hash,
        tokenizer_hash=tokenizer_hash,
        eos_token_ids=eos_token_ids,
        instance_id=instance_id,
        grammars=grammars is not None,
        capabilities=capabilities,
    )
    worker = Worker(hang_floor_ns=hang_floor_ns)
    await worker.start(lambda: Held(fake, BadStep, description.model, "fake", grammars=grammars))
    stream = FaultyStream()
    service = ExecutorService(worker, on_hang=hung.append, settings=settings, observer=observer, outgoing=stream)
    server = make_server(tracer or NoOpTracer())
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(service, server)
    readiness = Readiness(("tercet.v1.ExecutorService",))
    add_health(server, readiness)
    target = bind(server, listen)
    await server.start()
    watch = asyncio.create_task(service.watch())
    if opened:
        service.open(description)
        readiness.set_ready()
    try:
        yield RunningExecutor(target, fake, stream, service, worker, description, hung)
    finally:
        watch.cancel()
        fake.release()
        await server.stop(0)
        left = await worker.close()
    assert left, "the worker's thread is still busy"


async def until(condition: Callable[[], bool], what: str = "the condition", limit_s: float = 10.0) -> None:
    """Wait until `condition` holds; fail by name if it never does."""
    for _ in range(round(limit_s / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{what} did not come true within {limit_s:g} s")
