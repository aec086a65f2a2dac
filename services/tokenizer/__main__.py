"""The tokenizer process, with the gateway in it if asked for: wiring only."""

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final

from executor.loading.gguf import GgufError, open_gguf
from services.address import parse_address
from services.catalogue import CatalogueError, cache_directory, resolve
from services.config import TokenizerConfig
from services.gateway.app import make_app
from services.gateway.server import serve as serve_http
from services.metrics import TokenizerMetrics
from services.process import Process, StartError, leave, run, serving, unless_stopped
from services.rpc import make_channel
from services.tokenizer.chain import Chain
from services.tokenizer.edge import EdgeIdentity, TextEdge
from services.tokenizer.invalid import InvalidTokenizer
from services.tokenizer.prompts import PromptLimits, Prompts
from services.tokenizer.report import EdgeReport
from services.tokenizer.service import TokenizerServicer
from services.tokenizer.templates import ChatTemplate, load_chat_template
from services.tokenizer.text import TextModel, load_tokenizer
from tercet.v1 import tokenizer_pb2_grpc

HTTP_GRACE_S: Final = 1.0  # the answers are complete by then; this is for their last bytes
SERVICE: Final = "tercet.v1.TokenizerService"


def load_text_model(source: str) -> tuple[str, TextModel, ChatTemplate | None]:
    """Name, tokenizer and chat template of a model. Raises StartError."""
    try:
        resolved = resolve(source, cache_directory(os.environ))
        with open_gguf(resolved.path) as file:
            model = load_tokenizer(file.metadata)
            return resolved.name, model, load_chat_template(file.metadata, model)
    except (CatalogueError, GgufError, InvalidTokenizer, OSError) as error:
        raise StartError(f"model {source}: {error}") from error


async def serve(config: TokenizerConfig, process: Process) -> None:
    name, model, template = load_text_model(config.model)
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
        servicer = TokenizerServicer(edge, model, prompts)
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
