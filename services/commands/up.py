"""`tercet up`: the whole chain on this machine until SIGTERM or Ctrl-C."""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence

from services.catalogue import DEFAULT_MODEL, CatalogueError, cache_directory, resolve
from services.config import BACKENDS
from services.stack import NotReady, Stack, StackOptions
from services.supervisor import ChildRefused

READY_S = 300.0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tercet up",
        allow_abbrev=False,
        epilog="Other settings come from the environment: `tercet config` lists the variables of each process.",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"catalogue name or GGUF file; default {DEFAULT_MODEL}")
    parser.add_argument("--listen", default="127.0.0.1:50051", help="gRPC address of the front door")
    parser.add_argument("--http", default="127.0.0.1:8000", help="address of the OpenAI gateway")
    parser.add_argument("--backend", choices=BACKENDS, default="cpu", help="which kernels run")
    parser.add_argument("--otlp-endpoint", help="OTLP/gRPC collector, for example http://127.0.0.1:4317")
    chosen = parser.parse_args(argv)
    try:
        resolve(chosen.model, cache_directory(os.environ))
    except CatalogueError as error:
        print(f"tercet up: {error}", file=sys.stderr)
        return 1
    options = StackOptions(
        model=chosen.model,
        listen=chosen.listen,
        http=chosen.http,
        otlp_endpoint=chosen.otlp_endpoint,
        executor=("--backend", chosen.backend),
    )
    return asyncio.run(_run(options))


async def _run(options: StackOptions) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    began = time.monotonic()
    stopping = asyncio.create_task(stop.wait())
    try:
        async with Stack(options, os.environ) as stack:
            starting = asyncio.create_task(stack.ready(READY_S))
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
                print(f"  gRPC    {stack.target}", flush=True)
                print(f"  OpenAI  http://{options.http}/v1", flush=True)
                failed = asyncio.create_task(stack.supervisor.failed())
                await asyncio.wait((failed, stopping), return_when=asyncio.FIRST_COMPLETED)
                if failed.done():
                    failed.result()
                failed.cancel()
            else:
                starting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await starting
            print("draining; a second signal ends it at once", flush=True)
            for signum in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(signum, stack.supervisor.hurry)
    except (NotReady, ChildRefused) as error:
        print(f"tercet up: {error}", file=sys.stderr)
        return 1
    finally:
        stopping.cancel()
    return 0
