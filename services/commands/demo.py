"""`tercet demo`: fetch the default model, run the chain, ask one question, show the request's trace, drain."""

import argparse
import asyncio
import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Final

import tercet
from services.catalogue import DEFAULT_MODEL, CatalogueError, cache_directory, pull
from services.commands.ask import Question, ask
from services.config import TelemetryConfig
from services.otlp_sink import OtlpSink
from services.process import VERSION
from services.progress import TerminalProgress
from services.spans import SpanRecord
from services.stack import NotReady, Stack, StackOptions
from services.supervisor import ChildRefused
from services.telemetry import open_telemetry
from services.waterfall import waterfall

READY_S: Final = 300.0
TRACE_S: Final = 10.0
PROMPT: Final = "What is the capital of France?"
ROOTS: Final = ("tercet-client", "tercet-tokenizer", "tercet-scheduler")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tercet demo", allow_abbrev=False)
    parser.add_argument("--prompt", default=PROMPT, help=f"default {PROMPT!r}")
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"of the catalogue; default {DEFAULT_MODEL}")
    chosen = parser.parse_args(argv)
    try:
        with TerminalProgress(sys.stderr) as progress:
            pull(chosen.model, cache_directory(os.environ), progress)
        asyncio.run(_demo(chosen.model, chosen.prompt))
    except (CatalogueError, NotReady, ChildRefused, tercet.TercetError, TimeoutError) as error:
        print(f"tercet demo: {error}", file=sys.stderr)
        return 1
    return 0


async def _demo(model: str, prompt: str) -> None:
    async with OtlpSink() as sink:
        telemetry = open_telemetry(
            TelemetryConfig(otlp_endpoint=sink.endpoint), service=ROOTS[0], instance="demo", version=VERSION
        )
        try:
            options = StackOptions(model, otlp_endpoint=sink.endpoint, log_level="error")
            began = time.monotonic()
            print("starting tokenizer, scheduler and executor", flush=True)
            async with Stack(options, os.environ) as stack:
                await stack.ready(READY_S)
                print(f"ready after {time.monotonic() - began:.1f} s\n\n> {prompt}\n", flush=True)
                question = Question(prompt, tercet.SamplingParams(temperature=0, max_tokens=256))
                told = await ask(stack.target, question, sys.stdout, telemetry.provider)
                await asyncio.to_thread(telemetry.close)
                print("\ndraining\n", flush=True)
            _show(await _trace(sink), told.request_id)
        finally:
            await asyncio.to_thread(telemetry.close)


async def _trace(sink: OtlpSink) -> list[SpanRecord]:
    """The one request's spans. The processes have sent theirs when they have drained."""

    def complete(spans: Sequence[SpanRecord]) -> bool:
        return set(ROOTS) <= {span.service for span in _of_request(spans)}

    return _of_request(await sink.wait_for(complete, TRACE_S))


def _of_request(spans: Sequence[SpanRecord]) -> list[SpanRecord]:
    root = next((span for span in spans if span.service == ROOTS[0]), None)
    return [] if root is None else [span for span in spans if span.trace_id == root.trace_id]


def _show(spans: Sequence[SpanRecord], request_id: str | None) -> None:
    print(f"the trace of request {request_id}, {len(spans)} spans:\n")
    for line in waterfall(spans, shutil.get_terminal_size((150, 24)).columns):
        print(line)
