"""The tokenizer process, with the gateway in it if asked for: wiring only."""

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import cache
from typing import Final

from services.address import parse_address
from services.config import TokenizerConfig
from services.gateway.app import make_app
from services.gateway.server import serve as serve_http
from services.metrics import TokenizerMetrics
from services.process import Process, leave, run, serving, unless_stopped
from services.rpc import make_channel
from services.tokenizer.chain import Chain
from services.tokenizer.edge import EdgeIdentity, TextEdge
from services.tokenizer.export import pack, tokenizer_files
from services.tokenizer.loading import load_text
from services.tokenizer.prompts import PromptLimits, Prompts
from services.tokenizer.report import EdgeReport
from services.tokenizer.service import TokenizerServicer
from tercet.v1 import tokenizer_pb2_grpc

HTTP_GRACE_S: Final = 1.0  # the answers are complete by then; this is for their last bytes
SERVICE: Final = "tercet.v1.TokenizerService"


async def serve(config: TokenizerConfig, process: Process) -> None:
    text = load_text(config.model)
    name, model, template = text.name, text.model, text.template
    tracer = process.telemetry.tracer
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(make_channel(config.scheduler, tracer))
        asking = await stack.enter_async_context(make_channel(config.scheduler))
        chain = Chain(asking, model.hash, process.readiness)
        prompts = Prompts(model, template, PromptLimits(config.max_prompt_bytes), tracer)
        edge = TextEdge(
            model,
            prompts,
            channel,
            chain,
            EdgeIdentity(name, template is not None, process.config_hash),
            tracer,
            EdgeReport(TokenizerMetrics.make(process.metrics.registry, name), name, config.slow_request_s),
            config.resume_grace_s,
        )
        archive = cache(lambda: pack(tokenizer_files(model, template, text.context_length)))
        servicer = TokenizerServicer(edge, model, prompts, archive)
        watching = asyncio.create_task(chain.watch())
        stack.callback(watching.cancel)
        await stack.enter_async_context(
            serving(
                process,
                config.net,
                lambda server: tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(servicer, server),
            )
        )
        http = None
        if config.http is not None:
            app = make_app(edge, config.http_limits, tracer=tracer, registry=process.metrics.registry)
            http = await serve_http(app, parse_address(config.http))
        await process.stop.wait()
        process.readiness.close("draining")
        edge.drain()
        process.stop.clear()
        await unless_stopped(process, edge.drained(config.net.drain_s))
        await edge.cut()
        if http is not None:
            await http.close(HTTP_GRACE_S)


def main(argv: Sequence[str]) -> int:
    return run(TokenizerConfig, serve, lambda config: config.telemetry, (SERVICE,), argv, os.environ)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
