"""A scheduler with several executors, in this process, for tests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from opentelemetry.trace import NoOpTracer
from prometheus_client import CollectorRegistry

from services.health import Readiness, add_health
from services.metrics import SchedulerMetrics
from services.rpc import bind, make_channel, make_server
from services.scheduler.core.calls import CoreConfig, Limits
from services.scheduler.core.core import SchedulerCore
from services.scheduler.engine import Engine, EngineConfig
from services.scheduler.grammars import Grammars
from services.scheduler.intake import LimitPolicy
from services.scheduler.lease import Lease
from services.scheduler.report import SchedulerReport
from services.scheduler.service import SchedulerServicer
from tercet.v1 import scheduler_pb2_grpc


@dataclass
class Lanes:
    target: str
    engine: Engine
    core: SchedulerCore
    leases: list[Lease]


@asynccontextmanager
async def many_lanes(
    *targets: str, core: CoreConfig = CoreConfig(), config: EngineConfig = EngineConfig()
) -> AsyncIterator[Lanes]:
    async with AsyncExitStack() as stack:
        pure = SchedulerCore(core)
        report = SchedulerReport(SchedulerMetrics.make(CollectorRegistry()), 30.0)
        engine = Engine(pure, config, NoOpTracer(), report)
        readiness = Readiness(("tercet.v1.SchedulerService",))
        grammars = Grammars(NoOpTracer())
        leases: list[Lease] = []
        for target in targets:
            channel = make_channel(target, extra=[("grpc.max_reconnect_backoff_ms", 200)])
            await stack.enter_async_context(channel)
            leases.append(Lease(target, channel, engine, "test", readiness.set_ready, grammars))
        server = make_server(NoOpTracer())
        servicer = SchedulerServicer(
            engine, tuple(leases), LimitPolicy(Limits(), Limits()), 5.0, "hash", readiness, grammars
        )
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, server)
        add_health(server, readiness)
        address = bind(server, "127.0.0.1:0")
        await server.start()
        holding = [asyncio.create_task(lease.run()) for lease in leases]
        try:
            yield Lanes(address, engine, pure, leases)
        finally:
            await server.stop(0)
            for task in holding:
                task.cancel()
            await asyncio.gather(*holding, return_exceptions=True)
