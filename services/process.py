"""What every service process does around its service: settings, logs, telemetry, health, metrics, signals, exit codes.

Owns the frame; `serve` fills it. Exit codes: 0 after a drain, 2 for settings that are refused (starting again would
change nothing), 1 for anything else. Invariant: a process that has drained exits even where a library's thread or
event loop would not.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import grpc
from grpc_reflection.v1alpha import reflection

from services import logs
from services.config import ListenConfig, TelemetryConfig
from services.errors import ServiceError
from services.health import Readiness, add_health
from services.metrics_http import MetricsServer
from services.process_metrics import ProcessMetrics
from services.rpc import ServerOptions, bind, make_server
from services.settings import ConfigError, Settings, as_dict, effective_hash, parse
from services.telemetry import Telemetry, open_telemetry
from services.trust import NO_TRUST, Trust

log = logging.getLogger(__name__)

VERSION: Final = "0.1.0"
EXIT_FAILED: Final = 1
EXIT_REFUSED: Final = 2
STOP_GRACE_S: Final = 2.0
RESTARTS: Final = "TERCET_RESTARTS"  # how often the supervisor has started this process again

PING_SHARE: Final = 0.4  # of the time after which a silent client is gone: then it is asked; the rest is for its answer

Config = TypeVar("Config", bound=Settings)
T = TypeVar("T")


class StartError(Exception):
    """The process can't do its work with these settings: a model that isn't there, an address that is taken."""


@dataclass(frozen=True, slots=True)
class Process:
    """What a service finds around it. stop: set by SIGTERM and SIGINT."""

    name: str
    instance: str
    config_hash: str
    telemetry: Telemetry
    metrics: ProcessMetrics
    readiness: Readiness
    stop: asyncio.Event


def run(
    config_type: type[Config],
    serve: Callable[[Config, Process], Awaitable[None]],
    telemetry_of: Callable[[Config], TelemetryConfig],
    services: Sequence[str],
    argv: Sequence[str],
    environ: Mapping[str, str],
    max_links: Callable[[Config], int] = lambda _: 128,
) -> int:
    """The whole life of a service process. services: names that its health tells besides "" and `liveness`."""
    try:
        config = parse(config_type, argv, environ)
    except ConfigError as error:
        print(f"tercet {config_type.process}: {error.message}", file=sys.stderr)
        return EXIT_REFUSED
    telemetry_config = telemetry_of(config)
    logs.setup(config_type.process, telemetry_config.log_level)
    config_hash = effective_hash(config)
    instance = secrets.token_hex(8)
    telemetry = open_telemetry(
        telemetry_config,
        service=f"tercet-{config_type.process}",
        instance=instance,
        version=VERSION,
        max_links=max_links(config),
    )
    metrics = ProcessMetrics.make(
        config_type.process,
        VERSION,
        config_hash,
        restarts=int(environ.get(RESTARTS, "0")),
        spans=telemetry.counts,
    )
    metrics.count_exceptions(logging.getLogger())
    log.info("starting", extra={"config_hash": config_hash, "instance": instance, "config": as_dict(config)})

    async def life() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, stop.set)
        process = Process(config_type.process, instance, config_hash, telemetry, metrics, Readiness(services), stop)
        lag = asyncio.create_task(metrics.watch_loop())
        try:
            await serve(config, process)
        finally:
            lag.cancel()

    code = 0
    try:
        _run_loop(life)
    except (StartError, ServiceError) as error:
        log.error("cannot start", extra={"reason": str(error)})
        code = EXIT_REFUSED
    except Exception:
        log.exception("the process failed")
        code = EXIT_FAILED
    telemetry.close()
    log.info("ended", extra={"code": code})
    return code


def leave(code: int) -> None:
    """Exits now: grpc.aio's threads can keep an interpreter from ending, and nothing is left to do."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


async def unless_stopped(process: Process, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` gives; None, and `work` is cancelled, where the process is told to stop before.

    To drain, clear `process.stop` first: then a second signal ends the waiting.
    """
    working, stopping = asyncio.create_task(work), asyncio.create_task(process.stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


@asynccontextmanager
async def serving(
    process: Process,
    net: ListenConfig,
    add: Callable[[grpc.aio.Server], object],
    client_ttl_s: float | None = None,
    slow_reader_s: float | None = None,
    trust: Trust = NO_TRUST,
) -> AsyncIterator[str]:
    """A gRPC server with health and reflection, and the metrics server if asked for; yields where it listens.

    client_ttl_s: a client whose connection is dead for so long is gone, and so are its calls; None: the default.
    slow_reader_s: how long a client may leave one message of a stream unread; None: for ever.
    trust: who may call, and by which certificates.
    On leaving, open calls get a short grace: a service drains before that.
    """
    trust.check_listen("--listen", net.listen, trust.certificates)
    options = ServerOptions(max_connection_age_s=net.max_connection_age_s, slow_reader_s=slow_reader_s)
    if client_ttl_s is not None:
        options = replace(options, ping_s=PING_SHARE * client_ttl_s, ping_timeout_s=(1 - PING_SHARE) * client_ttl_s)
    async with contextlib.AsyncExitStack() as stack:
        address = await stack.enter_async_context(
            door(process, net.listen, add, process.readiness.services, options, trust)
        )
        await stack.enter_async_context(trust.kept_fresh())
        if net.metrics_listen is not None:
            tls = None if trust.certificates is None else trust.certificates.lasting_context()
            metrics = MetricsServer(net.metrics_listen, process.metrics.registry, process.readiness, tls)
            await stack.enter_async_context(metrics)
            log.info("metrics", extra={"address": metrics.address})
        yield address


@asynccontextmanager
async def door(
    process: Process,
    listen: str,
    add: Callable[[grpc.aio.Server], object],
    services: Iterable[str],
    options: ServerOptions,
    trust: Trust,
) -> AsyncIterator[str]:
    """One gRPC server of the process, with health and reflection; yields where it listens. services: what reflection
    names besides."""
    server = make_server(
        process.telemetry.tracer, observer=process.metrics.observe_call, options=options, gate=trust.gate
    )
    add(server)
    add_health(server, process.readiness)
    names = (*services, "grpc.health.v1.Health", reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    address = bind(server, listen, trust.server)
    await server.start()
    log.info("listening", extra={"address": address})
    try:
        yield address
    finally:
        await server.stop(STOP_GRACE_S)


def _run_loop(life: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await life()

    try:
        import uvloop
    except ImportError:  # not to be had on every platform
        asyncio.run(main())
    else:
        uvloop.run(main())
