"""`tercet gateway`: the gateway alone, over a tokenizer's gRPC door. Wiring only."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from importlib.metadata import version

import uvloop

from services import logs
from services.address import parse_address
from services.errors import ServiceError
from services.gateway.app import make_app
from services.gateway.config import GatewayConfig
from services.gateway.remote import RemoteEngine
from services.gateway.server import HttpServer, serve
from services.process_metrics import ProcessMetrics
from services.rpc import make_channel
from services.settings import ConfigError, effective_hash, parse
from services.telemetry import open_telemetry

USAGE_EXIT = 2

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 after SIGTERM or SIGINT, 2 for a setting that cannot be, 1 when the address cannot be had."""
    try:
        config = parse(GatewayConfig, sys.argv[1:] if argv is None else argv, os.environ)
    except ConfigError as error:
        print(f"tercet gateway: {error.message}", file=sys.stderr)
        return USAGE_EXIT
    logs.setup("gateway", config.telemetry.log_level)
    try:
        uvloop.run(_run(config))
    except ServiceError as error:
        print(f"tercet gateway: {error.message}", file=sys.stderr)
        return 1
    return 0


async def _run(config: GatewayConfig) -> None:
    release, config_hash = version("tercet-server"), effective_hash(config)
    instance = f"{socket.gethostname()}:{os.getpid()}"
    stop = _stop_on_signals()
    async with AsyncExitStack() as stack:
        telemetry = open_telemetry(config.telemetry, service="tercet-gateway", instance=instance, version=release)
        stack.callback(telemetry.close)
        metrics = ProcessMetrics.make("gateway", release, config_hash, spans=telemetry.counts)
        root = logging.getLogger()
        stack.callback(root.removeHandler, metrics.count_exceptions(root))
        watching = asyncio.create_task(metrics.watch_loop(), name="loop-lag")
        stack.callback(watching.cancel)
        channel = await stack.enter_async_context(make_channel(config.tokenizer, telemetry.tracer))
        app = make_app(RemoteEngine(channel), config.limits, tracer=telemetry.tracer, registry=metrics.registry)
        server = await serve(app, parse_address(config.http))
        facts = {"address": server.address.target, "tokenizer": config.tokenizer, "config_hash": config_hash}
        log.info("gateway serves", extra=facts)
        await stop.wait()
        await _drain(server, config.drain_s, stop)
    log.info("gateway ends")


async def _drain(server: HttpServer, drain_s: float, stop: asyncio.Event) -> None:
    """Let requests end; a second signal cuts them short."""
    log.info("gateway drains", extra={"drain_s": drain_s})
    stop.clear()
    draining = asyncio.ensure_future(server.close(drain_s))
    again = asyncio.ensure_future(stop.wait())
    await asyncio.wait({draining, again}, return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        await server.close(0.0)
    again.cancel()
    await draining


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    return stop


if __name__ == "__main__":
    sys.exit(main())
