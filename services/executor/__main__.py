"""The executor process: wiring only.

Exit codes: those of `services.process`, and EXIT_HUNG when a step exceeds its limit.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from services.config import ExecutorConfig
from services.description import ExecutorDescription
from services.errors import Unavailable
from services.executor.loading import load_fake, load_model, split_fake_flags
from services.executor.observer import NOBODY, describe_batch
from services.executor.report import ExecutorReport
from services.executor.service import LOADING, ExecutorService
from services.executor.session import SessionSettings
from services.executor.worker import HANG_FLOOR_NS, Held, Running, Worker
from services.metrics import ExecutorMetrics
from services.process import Process, leave, run, serving, unless_stopped
from services.trust import open_trust
from tercet.v1 import executor_pb2, executor_pb2_grpc

SERVICE: Final = "tercet.v1.ExecutorService"
EXIT_HUNG: Final = 75
STEP_GRACE_S: Final = 2.0

log = logging.getLogger(__name__)

Load = Callable[[ExecutorConfig], Held]


async def serve(config: ExecutorConfig, process: Process, load: Load, hang_floor_ns: int) -> None:
    report = ExecutorReport(
        ExecutorMetrics.make(process.metrics.registry),
        process.telemetry.tracer,
        config.max_sequences,
        process.instance,
    )
    worker = Worker(hang_floor_ns=hang_floor_ns)
    service = ExecutorService(
        worker,
        on_hang=exit_hung,
        settings=SessionSettings(heartbeat_s=config.heartbeat_s),
        observer=report,
    )
    process.readiness.set_not_ready(LOADING)
    async with serving(
        process,
        config.net,
        lambda server: executor_pb2_grpc.add_ExecutorServiceServicer_to_server(service, server),
        client_ttl_s=config.lease_ttl_s,
        trust=open_trust(config.trust),
    ):
        watch = asyncio.create_task(service.watch())
        held = await unless_stopped(process, worker.start(partial(load, config)))
        if held is not None:
            report.loaded(held.weight_bytes, held.kv_bytes, held.late_kernels)
            service.open(describe(held, process))
            process.readiness.set_ready()
            log.info("ready", extra={"model": held.model.name, "numerics": held.runner.numerics})
            await process.stop.wait()
            await drain(service, process, config.net.drain_s)
            await worker.close(STEP_GRACE_S)  # a thread that still loads or runs ends with the process
        watch.cancel()


def describe(held: Held, process: Process) -> ExecutorDescription:
    capabilities = [executor_pb2.EXECUTOR_CAPABILITY_LOGPROBS]
    if held.grammars is not None:
        capabilities.append(executor_pb2.EXECUTOR_CAPABILITY_GRAMMAR)
    return ExecutorDescription(
        model=held.model,
        capacity=held.runner.capacity,
        numerics=held.runner.numerics,
        backend=held.backend,
        instance_id=process.instance,
        config_hash=process.config_hash,
        capabilities=tuple(capabilities),
        weight_bytes=held.weight_bytes,
        kv_bytes=held.kv_bytes,
        kv_format=held.kv_format,
    )


async def drain(service: ExecutorService, process: Process, limit_s: float) -> None:
    """Refuse new owners; let the present one go on until it leaves, the limit passes or a second signal comes."""
    process.readiness.close("draining")
    service.drain()
    process.stop.clear()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await unless_stopped(process, service.ownerless())
    service.evict(Unavailable("the executor has ended: it was told to, and its owner's time to leave is up"))


def exit_hung(running: Running) -> None:
    """A step that hangs may hold the device for ever: only a new process helps. Its owner learns it by the stream."""
    step = running.order.step
    log.critical(
        "step %d of epoch %d hangs: more than %.1f s",
        step.step_id,
        running.order.epoch,
        running.limit_ns / 1e9,
        extra={"batch": describe_batch(step, (NOBODY,) * len(step.slices)), "code": EXIT_HUNG},
    )
    leave(EXIT_HUNG)


def main(argv: Sequence[str]) -> int:
    fake, others = split_fake_flags(argv)
    hang_floor_ns = HANG_FLOOR_NS if fake is None else int(fake.hang_floor_s * 1e9)

    def load(config: ExecutorConfig) -> Held:
        return load_model(config, os.environ) if fake is None else load_fake(fake, config, os.environ)

    return run(
        ExecutorConfig,
        partial(serve, load=load, hang_floor_ns=hang_floor_ns),
        lambda config: config.telemetry,
        (SERVICE,),
        others,
        os.environ,
        max_links=lambda config: config.max_sequences,
    )


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
