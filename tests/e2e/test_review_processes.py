"""Frozen, killed and impatiently ended processes, on the fake executor: who notices, what goes on, what is left."""

import asyncio
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest
from fake_stack import until
from processes import Processes, Running, processes

import tercet
from services.executor.fake_tokens import expected_hash_tokens
from services.health import check
from services.rpc import make_channel
from services.stack import Stack, StackOptions
from tercet.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc

VOCAB = 100
PROMPT = [5, 6, 7]
FAKE = ("--fake", "hash", "--fake-vocab-size", str(VOCAB), "--max-model-len", "2048")


@dataclass
class Stream:
    """A Generate that is read in the background."""

    tokens: list[int]
    task: "asyncio.Task[scheduler_pb2.SchedulerFinished]"


def expected(count: int) -> list[int]:
    return list(expected_hash_tokens(PROMPT, count, VOCAB))


async def generate(target: str, count: int, tokens: list[int]) -> scheduler_pb2.SchedulerFinished:
    request = scheduler_pb2.SchedulerServiceGenerateRequest(
        prompt_ids=PROMPT,
        sampling=common_pb2.SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True),
    )
    async with make_channel(target) as channel:
        async for event in scheduler_pb2_grpc.SchedulerServiceStub(channel).Generate(request, timeout=100):
            tokens += event.delta.token_ids
            if event.HasField("finished"):
                return event.finished
    raise AssertionError("no Finished came")


async def begin(target: str, count: int) -> Stream:
    tokens: list[int] = []
    task = asyncio.create_task(generate(target, count, tokens))
    await until(lambda: len(tokens) > 5 or task.done(), "the first tokens", limit_s=20)
    return Stream(tokens, task)


async def executor(started: Processes, *flags: str, name: str = "executor") -> Running:
    target = f"unix:{started.directory}/{name}.sock"
    return await started.start("executor", *FAKE, *flags, target=target)


async def scheduler(started: Processes, *targets: str, name: str = "scheduler", flags: tuple[str, ...] = ()) -> Running:
    target = f"unix:{started.directory}/{name}.sock"
    return await started.start("scheduler", "--executors", ",".join(targets), *flags, target=target)


async def not_ready(one: Running, because: str) -> None:
    reason: str | None = None
    for _ in range(300):
        reason = await check(one.target, timeout=2.0)
        if reason is not None and because in reason:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{one.name} says {reason!r}, not {because!r}")


async def test_a_frozen_scheduler_loses_the_lease_and_its_stream_goes_on_when_it_thaws() -> None:
    async with processes() as started:
        behind = await executor(started, "--fake-delay-s", "0.01", "--lease-ttl-s", "1", "--heartbeat-s", "0.2")
        first = await scheduler(started, behind.target)
        await first.ready()
        stream = await begin(first.target, 150)
        first.process.send_signal(signal.SIGSTOP)
        second = await scheduler(started, behind.target, name="second")
        await second.ready(20)
        heard: list[int] = []
        await generate(second.target, 20, heard)
        assert heard == expected(20)
        first.process.send_signal(signal.SIGCONT)
        await not_ready(first, "lease is held")
        assert await second.end() == 0
        assert (await stream.task).reason == common_pb2.FINISH_REASON_LENGTH
        assert stream.tokens == expected(150)


async def test_a_frozen_executor_is_noticed_and_its_stream_goes_on_when_it_thaws() -> None:
    async with processes() as started:
        behind = await executor(started, "--fake-delay-s", "0.01")
        front = await scheduler(started, behind.target)
        await front.ready()
        stream = await begin(front.target, 150)
        behind.process.send_signal(signal.SIGSTOP)
        await not_ready(front, "silent")
        behind.process.send_signal(signal.SIGCONT)
        await stream.task
        assert stream.tokens == expected(150)


async def test_the_stream_of_a_frozen_executor_goes_on_at_another_one() -> None:
    async with processes() as started:
        behind = await executor(started, "--fake-delay-s", "0.01")
        front = await scheduler(started, behind.target, f"unix:{started.directory}/other.sock")
        await front.ready()
        stream = await begin(front.target, 150)
        behind.process.send_signal(signal.SIGSTOP)
        await executor(started, "--fake-delay-s", "0.01", name="other")
        await stream.task
        assert stream.tokens == expected(150)


async def test_a_second_sigterm_ends_a_draining_scheduler_at_once() -> None:
    async with processes() as started:
        behind = await executor(started, "--fake-delay-s", "0.05")
        front = await scheduler(started, behind.target)
        await front.ready()
        stream = await begin(front.target, 1000)
        front.process.send_signal(signal.SIGTERM)
        await not_ready(front, "draining")
        front.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.task
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        async with asyncio.timeout(10):
            assert await front.process.wait() == 0


async def test_the_drain_limit_ends_streams_as_unavailable_and_the_process_with_0() -> None:
    async with processes() as started:
        behind = await executor(started, "--fake-delay-s", "0.05")
        front = await scheduler(started, behind.target, flags=("--drain-s", "0.5"))
        await front.ready()
        stream = await begin(front.target, 1000)
        front.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.task
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        async with asyncio.timeout(10):
            assert await front.process.wait() == 0


@pytest.mark.model
async def test_a_second_sigterm_ends_a_draining_tokenizer_at_once(default_model_path: Path) -> None:
    async with processes() as started:
        model = ("--model", str(default_model_path))
        behind = await started.start("executor", *model, "--fake", "hash", "--fake-delay-s", "0.05")
        front = await scheduler(started, behind.target)
        edge = await started.start("tokenizer", *model, "--scheduler", front.target)
        await edge.ready()
        async with tercet.AsyncClient(edge.target) as client:
            task = asyncio.create_task(read(client, 1000))
            await asyncio.sleep(0.5)
            edge.process.send_signal(signal.SIGTERM)
            await not_ready(edge, "draining")
            assert not task.done()
            edge.process.send_signal(signal.SIGTERM)
            with pytest.raises(tercet.UnavailableError):
                await task
        async with asyncio.timeout(10):
            assert await edge.process.wait() == 0


STACK = """
import asyncio, os, sys
from services.stack import Stack, StackOptions
async def main():
    options = StackOptions(sys.argv[1], executor=("--fake", "hash"), log_level="error")
    async with Stack(options, os.environ) as stack:
        await stack.ready(60)
        names = ("tokenizer", "scheduler", "executor")
        print(*(stack.supervisor.pid(name) for name in names), flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""


@pytest.mark.model
async def test_a_killed_supervisor_leaves_no_child(default_model_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STACK, str(default_model_path), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(90):
        children = [psutil.Process(int(pid)) for pid in (await process.stdout.readline()).split()]
    assert len(children) == 3
    try:
        # A Ctrl-C reaches the terminal's whole foreground group: the supervisor's children are ended by it alone.
        assert all(os.getpgid(child.pid) != os.getpgid(process.pid) for child in children)
        process.kill()
        await process.wait()
        gone, left = await asyncio.to_thread(psutil.wait_procs, children, 20)
        assert not left
        assert len(gone) == 3
    finally:
        for child in children:
            if child.is_running():
                child.kill()


@pytest.mark.model
async def test_the_supervisor_still_restarts_children_after_the_stack_was_ready(default_model_path: Path) -> None:
    options = StackOptions(str(default_model_path), executor=("--fake", "hash"), log_level="error")
    async with Stack(options, os.environ) as stack:
        await stack.ready(60)
        before = stack.supervisor.pid("executor")
        assert before is not None
        os.kill(before, signal.SIGKILL)
        await until(lambda: stack.supervisor.pid("executor") not in (None, before), "a new executor", limit_s=20)
        await stack.ready(60)


@pytest.mark.model
async def test_a_scheduler_killed_in_mid_stream_or_a_lost_executor_only_delays(
    default_model_path: Path,
) -> None:
    async with processes() as started:
        model = ("--model", str(default_model_path))
        flags = (*model, "--fake", "hash", "--fake-delay-s", "0.02")
        behind = await started.start("executor", *flags)
        front = await scheduler(started, behind.target)
        edge = await started.start("tokenizer", *model, "--scheduler", front.target)
        await edge.ready()
        async with tercet.AsyncClient(edge.target, retry=tercet.RetryPolicy(attempts=1)) as client:
            behind.process.kill()
            await not_ready(edge, "not ready")
            late = asyncio.create_task(read(client, 5))  # it waits, since the executor may come back within the grace
            await asyncio.sleep(0.3)
            assert not late.done()
            await started.start("executor", *flags)
            assert await late
            await edge.ready()
            whole = await read(client, 80)
            cut = asyncio.create_task(read(client, 80))
            await asyncio.sleep(0.5)
            front.process.kill()
            await front.process.wait()
            await scheduler(started, behind.target)
            assert await cut == whole


async def read(client: tercet.AsyncClient, tokens: int) -> str:
    async with client.generate("hello", temperature=0, max_tokens=tokens) as stream:
        return "".join([delta.text async for delta in stream])


UP = """
import asyncio, sys
from services.commands import up
from services.stack import StackOptions
flags = ("--fake", "hash", "--fake-delay-s", "0.05")
sys.exit(asyncio.run(up._run(StackOptions(sys.argv[1], listen=sys.argv[2], executor=flags, log_level="error"))))
"""


@pytest.mark.model
async def test_tercet_up_drains_at_the_first_signal_and_ends_at_the_second(default_model_path: Path) -> None:
    async with processes() as started:
        target = f"unix:{started.directory}/door.sock"
        up = await asyncio.create_subprocess_exec(
            sys.executable, "-c", UP, str(default_model_path), target, stdout=asyncio.subprocess.PIPE
        )
        assert up.stdout is not None
        try:
            async with asyncio.timeout(60), tercet.AsyncClient(target) as client:
                assert b"ready" in await up.stdout.readline()
                task = asyncio.create_task(read(client, 1000))
                await asyncio.sleep(0.5)
                up.send_signal(signal.SIGINT)
                while b"draining" not in await up.stdout.readline():
                    pass
                await asyncio.sleep(0.5)
                assert not task.done()
                up.send_signal(signal.SIGINT)
                with pytest.raises(tercet.UnavailableError):
                    await task
                assert await up.wait() == 0
        finally:
            if up.returncode is None:
                up.kill()
                await up.wait()
