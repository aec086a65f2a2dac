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
from services.rpc import Outgoing
from services.settings import ConfigError
from services.stack import NotReady, Stack, StackOptions
from services.supervisor import ChildRefused
from services.trust import channel_credentials

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
    parser.add_argument("--api-keys", help="file of API keys, made by `tercet keys`: both doors then ask for one")
    parser.add_argument("--tls-cert", help="PEM file: the certificate that both doors show")
    parser.add_argument("--tls-key", help="PEM file: its private key")
    parser.add_argument("--tls-ca", help="PEM file: what signed it; needed to ask the chain whether it is ready")
    chosen = parser.parse_args(argv)
    front = _front(parser, chosen)
    try:
        resolve(chosen.model, cache_directory(os.environ))
    except CatalogueError as error:
        print(f"tercet up: {error}", file=sys.stderr)
        return 1
    try:
        probe = Outgoing(channel_credentials(chosen.tls_ca, chosen.tls_cert, chosen.tls_key))
    except ConfigError as error:
        parser.error(error.message)
    options = StackOptions(
        model=chosen.model,
        listen=chosen.listen,
        http=chosen.http,
        otlp_endpoint=chosen.otlp_endpoint,
        tokenizer=front,
        executor=("--backend", chosen.backend),
        probe=probe,
    )
    return asyncio.run(_run(options))


def _front(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> tuple[str, ...]:
    """Flags of the process that has the doors; behind it are Unix sockets that only this user may open."""
    if len({chosen.tls_cert is None, chosen.tls_key is None, chosen.tls_ca is None}) > 1:
        parser.error("--tls-cert, --tls-key and --tls-ca go together")
    given = {"--api-keys": chosen.api_keys, "--tls-cert": chosen.tls_cert, "--tls-key": chosen.tls_key}
    return tuple(part for flag, value in given.items() if value is not None for part in (flag, value))


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
                scheme = "https" if "--tls-cert" in options.tokenizer else "http"
                print(f"  OpenAI  {scheme}://{options.http}/v1", flush=True)
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
