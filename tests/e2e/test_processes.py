"""The three services as processes, with the fake executor: order of start, loss, drain, exit codes."""

import asyncio
import json
import signal
from pathlib import Path

import pytest
from processes import Processes, Running, fake_chain, processes

import tercet

pytestmark = pytest.mark.model

ORDERS = (
    ("tokenizer", "scheduler", "executor"),
    ("executor", "tokenizer", "scheduler"),
)


async def start(started: Processes, name: str, model: Path) -> Running:
    flags = {
        "executor": ("--model", str(model), "--fake", "hash"),
        "scheduler": ("--executors", started.socket("executor")),
        "tokenizer": ("--model", str(model), "--scheduler", started.socket("scheduler")),
    }
    return await started.start(name, *flags[name])


async def text_of(target: str, prompt: str, tokens: int) -> str:
    async with tercet.AsyncClient(target) as client:
        async with client.generate(prompt, temperature=0, max_tokens=tokens) as stream:
            return "".join([delta.text async for delta in stream])


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
async def test_any_order_of_start_ends_ready_and_sigterm_ends_with_0(
    order: tuple[str, ...], default_model_path: Path
) -> None:
    async with processes() as started:
        running = {}
        for name in order:
            running[name] = await start(started, name, default_model_path)
            await asyncio.sleep(0.7)
        await running["tokenizer"].ready()
        assert await text_of(running["tokenizer"].target, "hello", 5)
        for name in ("tokenizer", "scheduler", "executor"):
            assert await running[name].end() == 0, running[name].log.read_text()


async def test_every_log_line_is_json_and_the_request_is_told_once_by_each_service(default_model_path: Path) -> None:
    async with processes() as started:
        edge = await fake_chain(started, default_model_path)
        async with tercet.AsyncClient(edge.target) as client:
            async with client.generate("hello", temperature=0, max_tokens=5) as stream:
                async for _ in stream:
                    pass
        for one in reversed(started.running):
            assert await one.end() == 0
        told = []
        for one in started.running:
            lines = [json.loads(line) for line in one.log.read_text().splitlines()]
            assert lines[0]["config_hash"]
            told += [line for line in lines if line["message"] == "request"]
        assert sorted(line["service"] for line in told) == ["scheduler", "tokenizer"]
        assert {line["request_id"] for line in told} == {stream.request_id}
        assert {line["outcome"] for line in told} == {"length"}


async def test_an_executor_killed_in_mid_stream_costs_no_token(default_model_path: Path) -> None:
    async with processes() as started:
        edge = await fake_chain(started, default_model_path, "--fake-delay-s", "0.01")
        whole = await text_of(edge.target, "hello", 60)
        executor = started.running[0]
        async with tercet.AsyncClient(edge.target) as client:
            heard = []
            async with client.generate("hello", temperature=0, max_tokens=60) as stream:
                async for delta in stream:
                    heard.append(delta.text)
                    if len(heard) == 10:
                        executor.process.kill()
                        await executor.process.wait()
                        await start(started, "executor", default_model_path)
        assert "".join(heard) == whole


async def test_without_an_executor_the_refusal_is_quick_and_says_why(default_model_path: Path) -> None:
    async with processes() as started:
        await start(started, "scheduler", default_model_path)
        edge = await start(started, "tokenizer", default_model_path)
        async with tercet.AsyncClient(edge.target, retry=tercet.RetryPolicy(attempts=1)) as client:
            for _ in range(100):
                refusal = await refusal_of(client)
                if "executor" in refusal:
                    break
                await asyncio.sleep(0.1)
        assert "executor" in refusal


async def refusal_of(client: tercet.AsyncClient) -> str:
    try:
        async for _ in client.generate("hello", timeout=5):
            pass
    except tercet.UnavailableError as error:
        return str(error)
    raise AssertionError("it was not refused")


async def test_sigterm_lets_a_stream_finish(default_model_path: Path) -> None:
    async with processes() as started:
        edge = await fake_chain(started, default_model_path, "--fake-delay-s", "0.02")
        task = asyncio.create_task(text_of(edge.target, "hello", 50))
        await asyncio.sleep(0.3)
        edge.process.send_signal(signal.SIGTERM)
        assert await task
        assert await edge.end() == 0


@pytest.mark.parametrize(
    ("name", "flags", "says"),
    [
        ("scheduler", ("--steps-in-flight", "9"), "--steps-in-flight"),
        ("executor", ("--model", "no-such-model"), "no-such-model"),
        ("tokenizer", ("--model", "no-such-model"), "no-such-model"),
        ("tokenizer", ("--no-such-flag", "1"), "--no-such-flag"),
    ],
)
async def test_settings_that_are_refused_are_named_and_exit_with_2(
    name: str, flags: tuple[str, ...], says: str
) -> None:
    async with processes() as started:
        one = await started.start(name, *flags)
        async with asyncio.timeout(60):
            assert await one.process.wait() == 2
        assert says in one.log.read_text()


async def test_a_socket_path_too_long_is_refused_by_name() -> None:
    async with processes() as started:
        one = await started.start("scheduler", target="unix:/tmp/" + "x" * 120)
        async with asyncio.timeout(60):
            assert await one.process.wait() == 2
        assert "107" in one.log.read_text()
