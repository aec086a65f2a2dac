"""The tokenizer process, with the gateway in it if asked for: wiring only."""

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Final

from services.address import Address, parse_address
from services.config import TokenizerConfig
from services.errors import ResourceExhausted
from services.gateway.app import make_app
from services.gateway.server import serve as serve_http
from services.metrics import TokenizerMetrics
from services.process import Process, StartError, door, leave, run, serving, unless_stopped
from services.rpc import Door, ServerOptions, make_channel
from services.tokenizer.edge import EdgeIdentity, TextEdge
from services.tokenizer.export import pack, tokenizer_files
from services.tokenizer.grammar_check import GrammarCheck
from services.tokenizer.grammar_vocabulary import grammar_vocabulary
from services.tokenizer.loading import load_text
from services.tokenizer.prompts import PromptLimits, Prompts
from services.tokenizer.renderer import Renderer
from services.tokenizer.report import EdgeReport, SchedulerGauges
from services.tokenizer.schedulers import Schedulers
from services.tokenizer.service import TokenizerServicer
from services.tokenizer.speech_format import reasoning_format, tool_format
from services.trust import open_trust
from tercet.v1 import tokenizer_pb2_grpc

HTTP_GRACE_S: Final = 1.0  # the answers are complete by then; this is for their last bytes
SERVICE: Final = "tercet.v1.TokenizerService"


async def serve(config: TokenizerConfig, process: Process) -> None:
    if config.vllm_grpc_port is not None:
        _adapter_vllm()
    trust = open_trust(config.trust, config.calls, config.keys.api_keys)
    trust.check_targets(config.scheduler)
    http_tls = trust.http(config.http_trust.http_client_ca)
    if config.http is not None:
        trust.check_listen("--http", config.http, http_tls)
    if config.vllm_grpc_port is not None:
        trust.check_listen("--vllm-grpc-port", _vllm_listen(config), trust.certificates)
    text = load_text(config.model)
    name, model, template = text.name, text.model, text.template
    tracer = process.telemetry.tracer
    async with AsyncExitStack() as stack:
        metrics = TokenizerMetrics.make(process.metrics.registry, name, config.scheduler)
        doors = [
            Door(
                target,
                await stack.enter_async_context(make_channel(target, tracer, outgoing=trust.outgoing)),
                await stack.enter_async_context(make_channel(target, outgoing=trust.outgoing)),
            )
            for target in config.scheduler
        ]
        schedulers = Schedulers(doors, model.hash, process.readiness, SchedulerGauges(metrics))
        chats = None if template is None else Renderer(template)
        sample = None
        if chats is not None:
            stack.push_async_callback(chats.close)
            chats.warm()
            sample = await _sample(chats)
        prompts = Prompts(model, chats, PromptLimits(config.max_prompt_bytes), tracer)
        grammars = GrammarCheck((lambda: grammar_vocabulary(model)) if model.eos_ids else None)
        stack.push_async_callback(grammars.close)
        edge = TextEdge(
            model,
            prompts,
            schedulers,
            EdgeIdentity(
                name,
                template is not None,
                process.config_hash,
                tool_format(config.tool_format, template),
                reasoning_format(config.reasoning_format, template, sample),
            ),
            tracer,
            EdgeReport(metrics, name, config.slow_request_s),
            config.resume_grace_s,
            config.max_requests,
            grammars,
        )
        archive = cache(lambda: pack(tokenizer_files(model, template, text.context_length)))
        servicer = TokenizerServicer(edge, model, prompts, archive)
        watching = asyncio.create_task(schedulers.watch())
        stack.callback(watching.cancel)
        await stack.enter_async_context(
            serving(
                process,
                config.net,
                lambda server: tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(servicer, server),
                slow_reader_s=config.slow_reader_s,
                trust=trust,
            )
        )
        if config.vllm_grpc_port is not None:
            adapter = _adapter_vllm()
            add = await stack.enter_async_context(adapter.vllm_engine(edge, model, schedulers, archive))
            options = ServerOptions(slow_reader_s=config.slow_reader_s, any_pings=True)
            await stack.enter_async_context(
                door(process, _vllm_listen(config), add, (adapter.SERVICE,), options, trust)
            )
        http = None
        if config.http is not None:
            app = make_app(
                edge,
                config.http_limits,
                tracer=tracer,
                registry=process.metrics.registry,
                gate=trust.gate,
                cors_origins=config.http_trust.cors_origins,
            )
            http = await serve_http(app, parse_address(config.http), http_tls)
        await process.stop.wait()
        process.readiness.close("draining")
        edge.drain()
        process.stop.clear()
        await unless_stopped(process, edge.drained(config.net.drain_s))
        await edge.cut()
        if http is not None:
            await http.close(HTTP_GRACE_S)


async def _sample(chats: Renderer) -> str | None:
    try:
        return await chats.sample()
    except ResourceExhausted as error:
        raise StartError(error.message) from error


def _vllm_listen(config: TokenizerConfig) -> str:
    return Address(config.vllm_grpc_host, config.vllm_grpc_port).target


def _adapter_vllm() -> ModuleType:
    """Imported where it is asked for: nobody else needs the package that its messages come from."""
    try:
        return import_module("services.tokenizer.adapter_vllm")
    except (ImportError, RuntimeError) as error:  # the second: of generated code, where grpcio is too old for it
        raise StartError(
            f"--vllm-grpc-port needs the extra vllm-grpc, pip install 'tercet-server[vllm-grpc]': {error}"
        ) from error


def main(argv: Sequence[str]) -> int:
    return run(TokenizerConfig, serve, lambda config: config.telemetry, (SERVICE,), argv, os.environ)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
