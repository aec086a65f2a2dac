"""`tercet conform` against our services as they run, with the real model too, and against the toy executor for Node."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from chain import scheduler
from conftest import missing
from fake_stack import until
from processes import fake_chain, processes

import services
from services.conform.__main__ import conform
from services.conform.kit import Outcome, Result
from tercet.v1 import common_pb2, scheduler_pb2

PACKAGE = Path(services.__file__).parents[1] / "clients" / "node"


def not_passed(results: list[Result]) -> dict[str, str]:
    return {one.name: f"{one.outcome.value}: {one.detail}" for one in results if one.outcome is not Outcome.PASS}


@pytest.mark.model
@pytest.mark.timeout(180)
async def test_our_services_as_processes(default_model_path: Path) -> None:
    async with processes() as started:
        edge = await fake_chain(started, default_model_path, "--fake-delay-s", "0.002")
        for kind, target in (("scheduler", started.socket("scheduler")), ("tokenizer", edge.target)):
            assert not_passed(await conform(kind, target)) == {}, kind


@pytest.mark.model
@pytest.mark.timeout(240)
async def test_the_executor_with_the_real_model(default_model_path: Path) -> None:
    async with processes() as started:
        flags = ("--model", str(default_model_path), "--kv-memory-mib", "160", "--max-model-len", "1024")
        executor = await started.start("executor", *flags)
        await executor.ready()
        assert set(not_passed(await conform("executor", executor.target))) == {"row-error"}
        assert await executor.end() == 0


@asynccontextmanager
async def toy() -> AsyncIterator[str]:
    """The toy executor's address."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None or not (PACKAGE / "node_modules").is_dir():
        missing("npm with the Node SDK's packages (npm ci in clients/node)")
    built = await asyncio.to_thread(
        subprocess.run, [str(npm), "run", "build"], cwd=PACKAGE, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    process = await asyncio.create_subprocess_exec(
        str(node), "dist/examples/toy-executor.js", "127.0.0.1:0", cwd=PACKAGE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            told = json.loads(await process.stdout.readline())
        yield f"127.0.0.1:{told['port']}"
    finally:
        process.terminate()
        async with asyncio.timeout(10):
            await process.wait()


@pytest.mark.timeout(180)
async def test_an_executor_in_another_language() -> None:
    async with toy() as target:
        assert set(not_passed(await conform("executor", target))) == {"logprobs", "row-error"}
        # Our scheduler serves with it.
        async with scheduler(target) as back:
            await until(lambda: not back.lease.state.reason, "the lease")
            message = scheduler_pb2.SchedulerServiceGenerateRequest(
                prompt_ids=[5, 6, 7], sampling=common_pb2.SamplingParams(temperature=0, max_tokens=20)
            )

            async def tokens() -> list[int]:
                return [one async for event in back.stub.Generate(message) for one in event.delta.token_ids]

            alone = await tokens()
            assert len(alone) == 20
            assert await asyncio.gather(*(tokens() for _ in range(6))) == [alone] * 6
            await back.drained()
