"""The gateway alone: a tokenizer that is killed in mid-answer costs its HTTP clients a pause and nothing else."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from fake_stack import until
from processes import Processes, Running, processes

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

STREAMS = 12
URL = "/v1/completions"


def body(number: int) -> dict[str, object]:
    """Some draw with penalties, some end at stop strings."""
    drawn = {"temperature": 0.8, "frequency_penalty": 0.3, "repetition_penalty": 1.1, "seed": number}
    return {
        "prompt": [5 + number, 7, 9 * number + 1],
        "max_tokens": 70 + number,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": 1,
        **(drawn if number % 2 else {"temperature": 0}),
    }


async def ask(client: httpx.AsyncClient, number: int, heard: list[int]) -> list[object]:
    """What a client is told, but for ids and times. heard: one entry a chunk, as it comes."""
    told: list[object] = []
    async with client.stream("POST", URL, json=body(number)) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line:
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                told.append(data)
                continue
            chunk = json.loads(data)
            assert "error" not in chunk, chunk
            heard.append(number)
            choices = [(one["text"], one["logprobs"], one["finish_reason"]) for one in chunk["choices"]]
            told.append((choices, chunk["usage"]))
    return told


def joined(told: list[object]) -> tuple[str, list[float], list[object]]:
    """Text, logprobs, and the end: how they were cut into chunks may differ."""
    chunks = [one for one in told if isinstance(one, tuple)]
    choices = [choice for choices, _ in chunks for choice in choices]
    text = "".join(piece for piece, _, _ in choices)
    logprobs = [value for _, row, _ in choices if row is not None for value in row["token_logprobs"]]
    reasons = [reason for _, _, reason in choices if reason is not None]
    usages = [(usage["prompt_tokens"], usage["completion_tokens"]) for _, usage in chunks if usage is not None]
    return text, logprobs, [*reasons, *usages, *(one for one in told if isinstance(one, str))]


@asynccontextmanager
async def gateway(*tokenizers: str) -> AsyncIterator[httpx.AsyncClient]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.gateway", "--http", "127.0.0.1:0", "--tokenizer", ",".join(tokenizers)),
        stderr=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(30):
            line = b""
            while b'"listening"' not in line:
                line = await process.stderr.readline()
                assert line, "the gateway ended before it served"
        reading = asyncio.ensure_future(process.stderr.read())
        async with httpx.AsyncClient(base_url=f"http://{json.loads(line)['address']}", timeout=60) as client:
            yield client
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
        assert b'"level": "error"' not in await reading
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def behind(started: Processes, model: Path) -> str:
    await started.start("executor", "--model", str(model), "--fake", "hash", "--fake-delay-s", "0.02")
    return (await started.start("scheduler", "--executors", started.socket("executor"))).target


async def tokenizer(started: Processes, model: Path, scheduler: str, name: str) -> Running:
    target = f"unix:{started.directory}/{name}.sock"
    return await started.start("tokenizer", "--model", str(model), "--scheduler", scheduler, target=target)


async def progress(heard: list[int], chunks: int) -> None:
    """Every stream has told so many more chunks."""
    had = [heard.count(number) for number in range(STREAMS)]
    await until(
        lambda: all(heard.count(number) >= before + chunks for number, before in enumerate(had)), "progress", 30
    )


async def all_of(client: httpx.AsyncClient) -> list[tuple[str, list[float], list[object]]]:
    return [joined(told) for told in await asyncio.gather(*(ask(client, number, []) for number in range(STREAMS)))]


async def test_a_tokenizer_that_is_killed_and_started_again(default_model_path: Path) -> None:
    async with processes() as started:
        scheduler = await behind(started, default_model_path)
        edge = await tokenizer(started, default_model_path, scheduler, "one")
        await edge.ready()
        async with gateway(edge.target) as client:
            whole = await all_of(client)
            heard: list[int] = []
            asking = [asyncio.ensure_future(ask(client, number, heard)) for number in range(STREAMS)]
            await progress(heard, 3)
            edge.process.send_signal(signal.SIGKILL)
            await edge.process.wait()
            await tokenizer(started, default_model_path, scheduler, "one")
            assert [joined(told) for told in await asyncio.gather(*asking)] == whole


async def test_a_tokenizer_that_is_killed_beside_another(default_model_path: Path) -> None:
    async with processes() as started:
        scheduler = await behind(started, default_model_path)
        edges = [await tokenizer(started, default_model_path, scheduler, name) for name in ("one", "two")]
        for edge in edges:
            await edge.ready()
        async with gateway(*(edge.target for edge in edges)) as client:
            whole = await all_of(client)
            heard: list[int] = []
            asking = [asyncio.ensure_future(ask(client, number, heard)) for number in range(STREAMS)]
            await progress(heard, 3)
            edges[0].process.send_signal(signal.SIGKILL)
            await edges[0].process.wait()
            assert [joined(told) for told in await asyncio.gather(*asking)] == whole
            assert (await client.get("/ready")).status_code == 200
            assert await all_of(client) == whole
