"""`tercet gateway`: the gateway alone, over a tokenizer's gRPC door. Wiring only."""

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

from services.address import parse_address
from services.config import GatewayConfig
from services.gateway.app import make_app
from services.gateway.remote import RemoteEngine
from services.gateway.server import HttpServer, serve
from services.process import Process, leave, run
from services.rpc import Door, make_channel
from services.trust import open_trust

log = logging.getLogger(__name__)


async def serve_gateway(config: GatewayConfig, process: Process) -> None:
    """Until SIGTERM or SIGINT, then until the last request has ended or `drain_s` is over."""
    trust = open_trust(config.trust, config.calls, config.keys.api_keys)
    trust.check_targets(config.tokenizer)
    http_tls = trust.http(config.http_trust.http_client_ca)
    trust.check_listen("--http", config.http, http_tls)
    tracer = process.telemetry.tracer
    async with AsyncExitStack() as stack:
        doors = [
            Door(
                target,
                await stack.enter_async_context(make_channel(target, tracer, outgoing=trust.outgoing)),
                await stack.enter_async_context(make_channel(target, outgoing=trust.outgoing)),
            )
            for target in config.tokenizer
        ]
        engine = RemoteEngine(doors, config.resume_grace_s)
        watching = asyncio.create_task(engine.watch())
        stack.callback(watching.cancel)
        await stack.enter_async_context(trust.kept_fresh())
        app = make_app(
            engine,
            config.limits,
            tracer=tracer,
            registry=process.metrics.registry,
            gate=trust.gate,
            cors_origins=config.http_trust.cors_origins,
        )
        server = await serve(app, parse_address(config.http), http_tls)
        log.info("listening", extra={"address": server.address.target, "tokenizer": config.tokenizer})
        await process.stop.wait()
        await _drain(server, config.drain_s, process.stop)


async def _drain(server: HttpServer, drain_s: float, stop: asyncio.Event) -> None:
    """Let requests end; a second signal cuts them short."""
    log.info("draining", extra={"limit_s": drain_s})
    stop.clear()
    draining = asyncio.ensure_future(server.close(drain_s))
    again = asyncio.ensure_future(stop.wait())
    await asyncio.wait({draining, again}, return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        await server.close(0.0)
    again.cancel()
    await draining


def main(argv: Sequence[str]) -> int:
    return run(GatewayConfig, serve_gateway, lambda config: config.telemetry, (), argv, os.environ)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
