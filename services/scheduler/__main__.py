"""The scheduler process: wiring only."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from services.config import SchedulerConfig, TimeLimits
from services.metrics import SchedulerMetrics
from services.process import Process, StartError, leave, run, serving, unless_stopped
from services.rpc import make_channel
from services.scheduler.core.calls import CoreConfig, Limits
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.limits import LadderConfig
from services.scheduler.engine import TICK_S, Engine, EngineConfig
from services.scheduler.grammars import Grammars
from services.scheduler.intake import LimitPolicy
from services.scheduler.lease import Lease
from services.scheduler.prefixes import PrefixConfig
from services.scheduler.quota_settings import parse_quotas
from services.scheduler.record import Recorder
from services.scheduler.report import SchedulerReport
from services.scheduler.service import SchedulerServicer
from services.trust import open_trust
from tercet.v1 import scheduler_pb2_grpc

SERVICE: Final = "tercet.v1.SchedulerService"

log = logging.getLogger(__name__)


async def serve(config: SchedulerConfig, process: Process) -> None:
    trust = open_trust(config.trust, config.calls, config.keys.api_keys)
    trust.check_targets(config.executors)
    report = SchedulerReport(SchedulerMetrics.make(process.metrics.registry), config.slow_request_s)
    core_config = _core_config(config, trust.gate.users.quotas)
    core = SchedulerCore(core_config)
    engine = Engine(
        core,
        EngineConfig(
            stream_buffer_tokens=config.stream_buffer_tokens,
            slow_reader_ns=_ns(config.slow_reader_s),
            executor_grace_ns=_ns(config.executor_grace_s),
            prefix=PrefixConfig(enabled=config.prefix_cache, pin_max_ns=_ns(config.pin_max_s)),
        ),
        process.telemetry.tracer,
        report,
    )
    scheduler_id = f"{socket.gethostname()}-{process.instance}"[:128]
    leases: list[Lease] = []

    def changed() -> None:
        """Ready while an executor serves."""
        serving_now = [lease for lease in leases if not lease.state.reason]
        if serving_now:
            description = serving_now[0].state.description
            report.model_name = "" if description is None else description.model.name
            process.readiness.set_ready()
        else:
            process.readiness.set_not_ready(
                "; ".join(f"executor {lease.state.target}: {lease.state.reason}" for lease in leases)
            )

    grammars = Grammars(process.telemetry.tracer)
    async with AsyncExitStack() as stack:
        if config.record is not None:
            core.listener = stack.enter_context(_recorder(config, core_config)).note
        for target in config.executors:
            channel = await stack.enter_async_context(make_channel(target, outgoing=trust.outgoing))
            leases.append(Lease(target, channel, engine, scheduler_id, changed, grammars))
        changed()
        servicer = SchedulerServicer(
            engine,
            tuple(leases),
            LimitPolicy(*_limits(config.limits), default_max_tokens=config.default_max_tokens),
            config.net.drain_s,
            process.config_hash,
            process.readiness,
            grammars,
        )
        await stack.enter_async_context(
            serving(
                process,
                config.net,
                lambda server: scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, server),
                slow_reader_s=config.slow_reader_s,
                trust=trust,
            )
        )
        tasks = [asyncio.create_task(lease.run()) for lease in leases]
        tasks.append(asyncio.create_task(_tick(engine)))
        await process.stop.wait()
        process.readiness.close("draining")
        process.stop.clear()
        await unless_stopped(process, engine.drain(config.net.drain_s))
        await engine.drain(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _recorder(config: SchedulerConfig, core_config: CoreConfig) -> Recorder:
    try:
        return Recorder(Path(config.record or ""), core_config)
    except OSError as error:
        raise StartError(f"--record {config.record}: {error.strerror}") from error


async def _tick(engine: Engine) -> None:
    while True:
        try:
            engine.tick()
        except Exception:  # a defect; the next tick is needed all the same
            log.exception("a tick of the engine failed")
        await asyncio.sleep(TICK_S)


def _core_config(config: SchedulerConfig, of_keys: Mapping[str, str]) -> CoreConfig:
    """of_keys: quotas of tenants that the file of API keys names."""
    default_quota, quotas = parse_quotas([*config.tenant_quotas, *(f"{name}={text}" for name, text in of_keys.items())])
    return CoreConfig(
        policy=config.policy,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        steps_in_flight=config.steps_in_flight,
        prefill_chunk=config.prefill_chunk,
        watermark=config.watermark,
        aging_ns=_ns(config.aging_s),
        max_passes=config.max_passes,
        max_queued_bytes=config.max_queued_bytes,
        default_quota=default_quota,
        quotas=quotas,
        learn_output=config.learn_output,
        long_prompt_tokens=config.long_prompt_tokens,
        long_prompt_share=config.long_prompt_share,
        ladder=LadderConfig(
            enabled=config.degrade.degrade,
            protects=config.degrade.degrade_protects,
            enter_at=config.degrade.degrade_enter_at,
            enter_ns=_ns(config.degrade.degrade_enter_s),
            leave_at=config.degrade.degrade_leave_at,
            leave_ns=_ns(config.degrade.degrade_leave_s),
            prefill_share=config.degrade.degrade_prefill_share,
            max_tokens=config.degrade.degrade_max_tokens,
        ),
        tenant_cache_share=config.tenant_cache_share,
        session_lease_ns=_ns(config.session_lease_s),
        session_lease_full_below=config.session_lease_full_below,
        kv_events=config.prefix_cache,
    )


def _limits(limits: TimeLimits) -> tuple[Limits, Limits]:
    """Defaults and maxima."""
    default = Limits(
        queue_ns=_ns(limits.queue_limit_s),
        first_token_ns=_ns(limits.first_token_limit_s),
        between_tokens_ns=_ns(limits.between_tokens_limit_s),
        total_ns=_ns(limits.total_limit_s),
    )
    maximum = Limits(
        queue_ns=_ns(limits.queue_limit_max_s),
        first_token_ns=_ns(limits.first_token_limit_max_s),
        between_tokens_ns=_ns(limits.between_tokens_limit_max_s),
        total_ns=_ns(limits.total_limit_max_s),
    )
    return default, maximum


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def main(argv: Sequence[str]) -> int:
    return run(SchedulerConfig, serve, lambda config: config.telemetry, (SERVICE,), argv, os.environ)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
