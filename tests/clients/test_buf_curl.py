"""The recipes of the README for `buf curl`, run as they stand there but for the address."""

import asyncio
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from chain import text_chain
from conftest import missing

import services

ROOT = Path(services.__file__).parents[1]
BUF = Path(sys.executable).parent / "buf"


def recipes() -> list[list[str]]:
    text = (ROOT / "README.md").read_text()
    found = re.search(r"<!-- buf:begin -->\n```sh\n(.*?)```\n<!-- buf:end -->", text, re.DOTALL)
    assert found is not None
    first, *calls = found[1].replace("\\\n", " ").strip().split("\n\n")
    alias = re.fullmatch(r"alias call='(.*)'", first)
    assert alias is not None
    return [shlex.split(alias[1] + call.removeprefix("call")) for call in calls]


async def run(command: list[str], target: str, *more: str) -> tuple[int, str, str]:
    command = [part.replace("127.0.0.1:50051", target) for part in command]
    assert command[0] == ".venv/bin/buf"
    process = await asyncio.create_subprocess_exec(
        str(BUF), *command[1:], *more, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(30):
        out, errors = await process.communicate()
    return process.returncode or 0, out.decode(), errors.decode()


def objects(text: str) -> list[dict[str, object]]:
    decoder, found = json.JSONDecoder(), []
    while text := text.lstrip():
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:]
    return found


@pytest.mark.model
async def test_the_recipes_work(default_model_path: Path) -> None:
    if not BUF.exists():
        missing("buf (the wheel buf-bin)")
    told: dict[str, list[dict[str, object]]] = {}
    async with text_chain(default_model_path, "Paris.") as running:
        for command in recipes():
            code, out, errors = await run(command, running.target)
            path = next(part for part in command if part.startswith("http://"))
            if "Health" in path:  # this chain in process has no health service; a process has
                assert code != 0
                continue
            assert code == 0, errors
            told.setdefault(path.rpartition("/")[2], []).append(objects(out)[0] | {"all": objects(out)})
    assert {"Describe", "Generate", "Tokenize"} == told.keys()
    assert told["Describe"][0]["schemaRevision"] == "SCHEMA_REVISION_ONE"
    for answer in told["Generate"]:
        events = answer["all"]
        assert isinstance(events, list)
        assert "accepted" in events[0]
        assert "".join(event["delta"].get("text", "") for event in events if "delta" in event) == "Paris."
        assert events[-1]["finished"]["reason"] == "FINISH_REASON_STOP"
    assert told["Generate"][1]["all"][0]["accepted"]["requestId"] == "mine-1"  # type: ignore[index]
    assert told["Tokenize"][0]["tokenIds"]
