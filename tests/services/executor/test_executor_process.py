"""The executor as a process of its own: readiness, signals, exit codes, faults that end a process."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_stack import until
from step_stream import Owner, first, further, stream_to

from executor.step import StepResult
from services import errors
from services.executor.__main__ import EXIT_HUNG
from services.executor.fake_tokens import expected_hash_tokens
from services.executor.loading import split_fake_flags
from services.health import LIVENESS, check
from services.rpc import make_channel
from services.rpc_errors import from_rpc_error
from tercet.v1 import executor_pb2, executor_pb2_grpc

PROMPT = (5, 6, 7)
FAKE = ("--fake", "hash", "--fake-vocab-size", "100")


@dataclass
class ExecutorProcess:
    process: asyncio.subprocess.Process
    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def target(self) -> str:
        return str(self.line("listening")["address"])

    def line(self, message: str) -> dict[str, Any]:
        """The log line with this message; empty if there is none yet."""
        return next((line for line in self.lines if line["message"] == message), {})

    async def said(self, message: str) -> dict[str, Any]:
        await until(lambda: bool(self.line(message)), f"the line {message!r}", limit_s=50)
        return self.line(message)

    async def model_hash(self) -> str:
        return str((await describe(self.target)).model.model_hash)

    async def drains(self) -> None:
        """Return when readiness tells that it drains."""
        for _ in range(500):
            reason = await check(self.target)
            if reason is not None:
                assert reason == "NOT_SERVING: draining"
                return
            await asyncio.sleep(0.01)
        raise AssertionError("still ready")

    def send(self, signum: int) -> None:
        self.process.send_signal(signum)

    async def code(self) -> int:
        async with asyncio.timeout(20):
            return await self.process.wait()


@asynccontextmanager
async def executor_process(*flags: str, environ: Sequence[tuple[str, str]] = ()) -> AsyncIterator[ExecutorProcess]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.executor",
        "--listen",
        "127.0.0.1:0",
        *flags,
        stderr=PIPE,
        env={**os.environ, **dict(environ)},
    )
    executor = ExecutorProcess(process)

    async def read() -> None:
        assert process.stderr is not None
        while line := await process.stderr.readline():
            if line.startswith(b"{"):
                executor.lines.append(json.loads(line))

    reading = asyncio.create_task(read())
    try:
        yield executor
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await reading


async def describe(target: str) -> Any:
    async with make_channel(target) as channel:
        stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
        try:
            return await stub.Describe(executor_pb2.ExecutorServiceDescribeRequest(), timeout=5)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


@asynccontextmanager
async def claimed(executor: ExecutorProcess) -> AsyncIterator[Owner]:
    async with stream_to(executor.target) as owner:
        yield await owner.claim(model_hash=await executor.model_hash())


def drawn(result: StepResult) -> int:
    return result.results[0].token_ids[0]


async def test_drains_on_sigterm_while_its_owner_goes_on() -> None:
    async with executor_process(*FAKE) as executor:
        started, _ = await executor.said("starting"), await executor.said("ready")
        assert await check(executor.target) is None
        assert (await describe(executor.target)).config_hash == started["config_hash"]
        async with claimed(executor) as owner:
            await owner.step(1, first(0, PROMPT, (0, 1)))
            tokens = [drawn(await owner.result())]
            executor.send(signal.SIGTERM)
            await executor.drains()
            assert await check(executor.target, LIVENESS) is None
            async with stream_to(executor.target) as other:
                with pytest.raises(errors.Unavailable, match="draining"):
                    await other.claim("b", model_hash=await executor.model_hash(), takeover=True)
            await owner.step(2, further(0, 3))
            tokens.append(drawn(await owner.result()))
            await owner.leave()
            with pytest.raises(EOFError):
                await owner.result()
        assert await executor.code() == 0
        assert tuple(tokens) == expected_hash_tokens(PROMPT, 2, 100)


async def test_drain_ends_at_its_limit() -> None:
    async with executor_process(*FAKE, "--drain-s", "0.2") as executor:
        await executor.said("ready")
        async with claimed(executor) as owner:
            executor.send(signal.SIGTERM)
            assert isinstance(await owner.end(), errors.Unavailable)
            assert await executor.code() == 0


async def test_second_signal_ends_the_drain() -> None:
    async with executor_process(*FAKE) as executor:
        await executor.said("ready")
        async with claimed(executor) as owner:
            executor.send(signal.SIGTERM)
            await executor.drains()
            executor.send(signal.SIGTERM)
            assert isinstance(await owner.end(), errors.Unavailable)
            assert await executor.code() == 0


async def test_listens_and_says_why_it_is_not_ready_while_loading() -> None:
    async with executor_process(*FAKE, "--fake-load-s", "3") as executor:
        await executor.said("listening")
        assert await check(executor.target) == "NOT_SERVING: loading the model"
        assert await check(executor.target, LIVENESS) is None
        with pytest.raises(errors.Unavailable, match="loading the model"):
            await describe(executor.target)
        await executor.said("ready")
        assert await check(executor.target) is None
        assert (await describe(executor.target)).model.vocab_size == 100


async def test_sigterm_while_loading_ends_at_once() -> None:
    async with executor_process(*FAKE, "--fake-load-s", "60") as executor:
        await executor.said("listening")
        executor.send(signal.SIGTERM)
        assert await executor.code() == 0


async def test_hung_step_ends_the_process_with_its_code() -> None:
    flags = (*FAKE, "--fake-hang-at", "1", "--fake-hang-floor-s", "0.1", "--heartbeat-s", "0.05")
    async with executor_process(*flags) as executor:
        await executor.said("ready")
        async with claimed(executor) as owner:
            await owner.step(1, first(0, PROMPT, (0,)))
            assert isinstance(await owner.end(), errors.Unavailable)
        assert await executor.code() == EXIT_HUNG
        told = next(line for line in executor.lines if line["level"] == "critical")
        assert told["batch"] == [{"slot": 0, "start": 0, "count": 3, "request_id": ""}]


async def test_process_that_dies_in_a_step_ends_the_stream() -> None:
    async with executor_process(*FAKE, "--fake-die-at", "2") as executor:
        await executor.said("ready")
        async with claimed(executor) as owner:
            await owner.step(1, first(0, PROMPT, (0, 1)))
            await owner.result()
            await owner.step(2, further(0, 3))
            assert isinstance(await owner.end(), errors.Unavailable)
        assert await executor.code() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "no-such-model"), "unknown model 'no-such-model'"),
        (("--fake", "hash", "--model", "/nowhere/x.gguf"), "does not exist"),
        (("--fake", "hash", "--fake-vocab-size", "2"), "--fake-vocab-size is 2"),
    ],
)
async def test_what_can_never_work_is_refused_with_code_2(flags: tuple[str, ...], message: str) -> None:
    async with executor_process(*flags) as executor:
        assert await executor.code() == 2
    assert message in executor.line("cannot start")["reason"]


async def test_a_broken_file_is_refused_with_code_2(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(60))
    async with executor_process("--model", str(broken)) as executor:
        assert await executor.code() == 2
    assert "model broken" in executor.line("cannot start")["reason"]


def test_fake_flags_are_apart_from_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    options, others = split_fake_flags(["--fake", "script", "--block-size", "4", "--fake-script", "3,4"])
    assert options is not None
    assert (options.mode, options.script, others) == ("script", (3, 4), ["--block-size", "4"])
    assert split_fake_flags(["--listen", "x"]) == (None, ["--listen", "x"])
    with pytest.raises(SystemExit):
        split_fake_flags(["--fake-delay-s", "1"])
    assert "--fake-delay-s needs --fake" in capsys.readouterr().err


@pytest.mark.model
async def test_real_model_is_served(default_model_path: Path) -> None:
    flags = ("--model", str(default_model_path), "--total-blocks", "8", "--max-batched-tokens", "64", "--threads", "1")
    async with executor_process(*flags) as executor:
        ready = await executor.said("ready")
        described = await describe(executor.target)
        assert described.numerics == ready["numerics"]
        assert described.model.model_hash == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
        assert (described.total_blocks, described.block_size, described.backend) == (8, 16, "cpu")
        assert described.weight_bytes > 80_000_000
        assert described.kv_bytes > 0
        assert described.kv_format == "bf16"
        async with claimed(executor) as owner:
            await owner.step(1, first(0, PROMPT, (0,), temperature=0.0, logprobs=2))
            result = await owner.result()
            assert drawn(result) == result.results[0].logprobs[0].top[0][0]
            await owner.step(2, further(5, 3))
            assert (await owner.end()).reason == "BAD_STEP"
        executor.send(signal.SIGTERM)
        assert await executor.code() == 0


@pytest.mark.model
async def test_fake_in_place_of_a_model_has_its_vocabulary(default_model_path: Path) -> None:
    async with executor_process("--fake", "hash", "--model", str(default_model_path)) as executor:
        await executor.said("ready")
        described = await describe(executor.target)
        assert (described.model.vocab_size, described.backend) == (49152, "fake")
        assert len(described.model.tokenizer_hash) == 64
        assert 2 in described.model.eos_token_ids
