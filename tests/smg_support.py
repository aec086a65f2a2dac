"""VllmEngine doors for tests, and the real gateway `smg` in front of them."""

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from chain import TextChain, text_chain
from conftest import missing
from opentelemetry.trace import NoOpTracer, Tracer
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from services.gate import OPEN_GATE, Gate
from services.rpc import ServerOptions, bind, make_channel, make_server
from services.tokenizer.adapter_vllm import vllm_engine
from services.tokenizer.export import pack, tokenizer_files
from services.tokenizer.templates import load_chat_template

ROOT = Path(__file__).parent.parent
MODEL = "smollm2-135m"
START_S = 60.0


@asynccontextmanager
async def vllm_door(
    chain: TextChain, model_path: Path, tracer: Tracer | None = None, gate: Gate = OPEN_GATE
) -> AsyncIterator[str]:
    """Where VllmEngine is served over the chain's edge."""
    archive = cache(lambda: pack(_files(chain, model_path)))
    async with vllm_engine(chain.edge, chain.model, chain.schedulers, archive) as add:
        server = make_server(tracer or NoOpTracer(), options=ServerOptions(any_pings=True), gate=gate)
        add(server)
        target = bind(server, "127.0.0.1:0")
        await server.start()
        try:
            yield target
        finally:
            await server.stop(0)


def _files(chain: TextChain, model_path: Path) -> dict[str, bytes]:
    from executor.loading.gguf import open_gguf

    with open_gguf(model_path) as file:
        return tokenizer_files(chain.model, load_chat_template(file.metadata, chain.model), 512)


@asynccontextmanager
async def vllm_chain(
    model_path: Path, answer: str = "Hello.", tracer: Tracer | None = None, gate: Gate = OPEN_GATE, **options: Any
) -> AsyncIterator[tuple[TextChain, Any, str]]:
    """The chain, a stub of its VllmEngine, and where that is."""
    async with AsyncExitStack() as stack:
        chain = await stack.enter_async_context(text_chain(model_path, answer, tracer=tracer, **options))
        target = await stack.enter_async_context(vllm_door(chain, model_path, tracer, gate))
        channel = await stack.enter_async_context(make_channel(target))
        yield chain, vllm_engine_pb2_grpc.VllmEngineStub(channel), target


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def smg_program() -> str:
    found = shutil.which("smg") or shutil.which("smg", path=str(ROOT / ".venv-tools" / "bin"))
    if found is None:
        missing("smg (make .venv-tools/installed)")
    return str(found)


@asynccontextmanager
async def smg(*workers: str, flags: tuple[str, ...] = ()) -> AsyncIterator[str]:
    """The base URL of an `smg` that has its workers, all of them ready, and their tokenizer."""
    program, port, metrics = smg_program(), free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="tercet-smg-") as directory:
        log = Path(directory) / "log"
        with log.open("wb") as stream:
            process = await asyncio.create_subprocess_exec(
                *(program, "launch", "--worker-urls", *(f"grpc://{one}" for one in workers)),
                *("--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1"),
                *("--prometheus-port", str(metrics), "--health-check-interval-secs", "1", *flags),
                stdout=stream,
                stderr=stream,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
        url = f"http://127.0.0.1:{port}"
        try:
            async with httpx.AsyncClient(base_url=url, timeout=5.0) as client:
                problem = await _not_ready(client, len(workers), process)
            if problem is not None:
                raise AssertionError(f"{problem}\n{log.read_text()[-4000:]}")
            yield url
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _not_ready(client: httpx.AsyncClient, workers: int, process: asyncio.subprocess.Process) -> str | None:
    """None as soon as it is ready."""
    said = "nothing"
    for _ in range(round(START_S / 0.1)):
        if process.returncode is not None:
            return f"smg ended with {process.returncode}"
        try:
            listed = (await client.get("/workers")).json()
            said = str(listed)
            healthy = [one for one in listed.get("workers", ()) if one.get("is_healthy")]
            tokenizers = (await client.get("/v1/tokenizers")).json()
            models = (await client.get("/v1/models")).json().get("data")
            if len(healthy) == workers and tokenizers.get("tokenizers") and models:
                return None
        except (httpx.HTTPError, ValueError) as error:
            said = repr(error)
        await asyncio.sleep(0.1)
    return f"smg is not ready after {START_S:g} s: {said}"
