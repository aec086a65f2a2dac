"""The Node SDK: its own tests, its types against the contract, the Python SDK's answers, also over edges that die."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chain import CAPACITY, scheduler
from conftest import missing
from fake_stack import running_executor, until
from resumable import running_edge
from tiny_tokenizer import tiny_model

import services
import tercet
from services.executor.fake import FakeRunner

PACKAGE = Path(services.__file__).parents[1] / "clients" / "node"
MODEL = tiny_model()
ROOMY = replace(CAPACITY, vocab_size=MODEL.vocab_size, total_blocks=256)
PROMPTS = ["hello 123", "he said hello", "äöü 世界"]
COUNT = 6


@pytest.fixture(scope="module")
def npm() -> str:
    """The package built, with npm to run its scripts."""
    found = shutil.which("npm")
    if found is None or not (PACKAGE / "node_modules").is_dir():
        missing("npm with the Node SDK's packages (npm ci in clients/node)")
    run(str(found), "run", "build")
    return str(found)


def run(*command: str) -> None:
    ended = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]


@pytest.mark.timeout(180)
def test_its_own_tests(npm: str) -> None:
    run(shutil.which("node") or "node", "--test", "dist/test")


def test_its_types_are_those_of_the_contract(npm: str, tmp_path: Path) -> None:
    made = PACKAGE / "src" / "generated"
    command = json.loads((PACKAGE / "package.json").read_text())["scripts"]["types"]
    options = command.replace("--outDir=src/generated", f"--outDir={tmp_path}").split()
    run(str(PACKAGE / "node_modules" / ".bin" / options[0]), *options[1:])
    kept = {path.relative_to(made): path.read_text() for path in made.rglob("*.ts")}
    assert kept == {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.ts")}


def options(number: int) -> dict[str, Any]:
    """JSON has no integers of 64 bits: seeds are small here, and the large ones are `client.test.ts`'s."""
    drawn: dict[str, Any] = {"temperature": 0.0}
    if number % 2:
        drawn = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}
    return {"max_tokens": 60 + number, "seed": number, "min_tokens": 5, **drawn}


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def lines() -> bytes:
    rows = []
    for number in range(COUNT):
        given = {camel(name): value for name, value in options(number).items()}
        rows.append(json.dumps({"prompt": PROMPTS[number % len(PROMPTS)], "options": given}))
    return "\n".join(rows).encode() + b"\n"


@asynccontextmanager
async def node(target: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        "node", "examples/batch.mjs", target, cwd=PACKAGE,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def answers(process: asyncio.subprocess.Process) -> list[dict[str, Any]]:
    out, errors = await process.communicate(lines())
    assert process.returncode == 0, errors.decode()
    return [json.loads(line) for line in out.splitlines()]


async def python_answers(target: str) -> list[tuple[str, list[int]]]:
    async with tercet.AsyncClient(target) as client:
        streams = [client.generate(PROMPTS[number % len(PROMPTS)], **options(number)) for number in range(COUNT)]
        return [(answer.text, list(answer.token_ids)) for stream in streams for answer in await stream.collect()]


async def test_it_says_what_the_python_sdk_says_though_edges_die(npm: str) -> None:
    runner = FakeRunner("hash", ROOMY, eos_every=300)
    async with (
        running_executor(runner=runner, tokenizer_hash=MODEL.hash, eos_token_ids=(1,)) as fake,
        scheduler(fake.target) as back,
    ):
        await until(lambda: not back.lease.state.reason, "the lease")
        async with running_edge(MODEL, back.target) as edge:
            whole = await python_answers(edge.target)
            async with node(edge.target) as process:
                undisturbed = await answers(process)
        assert [(one["text"], one["tokenIds"]) for one in undisturbed] == whole
        assert {one["tries"] for one in undisturbed} == {1}

        runner.faults = replace(runner.faults, delay_s=0.01)
        async with node(edge.target) as process:
            asking = asyncio.ensure_future(answers(process))
            async with running_edge(MODEL, back.target, listen=edge.target):
                steps = runner.count
                await until(lambda: runner.count > steps + 20, "progress")
            async with running_edge(MODEL, back.target, listen=edge.target):
                disturbed = await asking
        assert [(one["text"], one["tokenIds"]) for one in disturbed] == whole
        assert max(one["tries"] for one in disturbed) > 1
        await back.drained()
        assert not runner.violations
