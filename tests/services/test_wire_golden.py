"""Bytes of the released contract: still read as what they meant, still written so, still served.

Changing a field's number, type or name, or taking one away, fails here. Adding one does not.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest
from chain import CAPACITY, chain
from fake_stack import running_executor
from google.protobuf.message import Message

import services
from services.executor.fake_tokens import expected_hash_tokens
from services.rpc import make_channel
from tercet.v1 import common_pb2, executor_pb2, scheduler_pb2, tokenizer_pb2

ROOT = Path(services.__file__).parents[1]
FOLDER = ROOT / "tests" / "golden"
GOLDEN: dict[str, dict[str, Any]] = json.loads((FOLDER / "wire_v1.json").read_text())

# Requests as clients of the first release sent them.
SCHEDULER_GENERATE = bytes.fromhex("0a080a06676f6c64656e12030506071a0b38014d0000000068097008")
EXECUTOR_CLAIM_MODEL = "f" * 64
PROMPT = (5, 6, 7)


def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_wire_golden", FOLDER / "make_wire_golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKER = maker()


def read(key: str) -> Message:
    kind: Any = None
    for module in (common_pb2, tokenizer_pb2, scheduler_pb2, executor_pb2):
        kind = kind or getattr(module, key.partition("/")[0].rpartition(".")[2], None)
    assert kind is not None, f"the message {key} is gone"
    message: Message = kind.FromString(bytes.fromhex(GOLDEN[key]["bytes"]))
    return message


@pytest.mark.parametrize("key", GOLDEN)
def test_released_bytes_mean_what_they_meant(key: str) -> None:
    message = read(key)
    assert MAKER.meaning(message) == GOLDEN[key]["means"]
    assert message.SerializeToString(deterministic=True).hex() == GOLDEN[key]["bytes"]


def test_every_message_has_its_bytes() -> None:
    present = {
        f"{kind.full_name}/{name}" if name else kind.full_name
        for kind in MAKER.descriptors()
        for name in MAKER.samples(kind)
    }
    assert present <= GOLDEN.keys(), "run tests/golden/make_wire_golden.py"


def test_a_changed_number_is_noticed() -> None:
    """Bytes in which two fields of one type have changed places decode to another meaning."""
    key = "tercet.v1.Usage"
    message = common_pb2.Usage.FromString(bytes.fromhex(GOLDEN[key]["bytes"]))
    message.prompt_tokens, message.cached_tokens = message.cached_tokens, message.prompt_tokens
    assert MAKER.meaning(message) != GOLDEN[key]["means"]


def test_the_contract_breaks_nothing_released(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "buf"), "breaking", "--against", str(FOLDER / "contract_v1.binpb")]
    kept = subprocess.run([*command[:2], "protos", *command[2:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (kept.returncode, kept.stdout) == (0, ""), kept.stdout + kept.stderr
    for path in (ROOT / "protos").rglob("*.*"):
        target = tmp_path / path.relative_to(ROOT / "protos")
        target.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text()
        target.write_text(text.replace("uint64 elapsed_ns = 5;", "uint64 elapsed_ns = 15;"))
    broken = subprocess.run(
        [*command[:2], str(tmp_path), *command[2:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert broken.returncode != 0
    assert "elapsed_ns" in broken.stdout


def raw(value: bytes) -> bytes:
    return value


async def test_the_scheduler_serves_a_released_request() -> None:
    """Bytes in, and the tokens looked for in the bytes that come out."""
    expected = expected_hash_tokens(PROMPT, 8, CAPACITY.vocab_size)
    async with chain() as (scheduler, _), make_channel(scheduler.target) as channel:
        call = channel.unary_stream("/tercet.v1.SchedulerService/Generate", raw, raw)
        answers = [bytes(answer) async for answer in call(SCHEDULER_GENERATE)]
    assert answers[0][:1] == b"\x0a"  # accepted = 1
    assert b"\x2a\x06golden" in answers[0]  # its request_id = 5
    deltas = [answer for answer in answers if answer[:1] == b"\x12"]  # delta = 2
    tokens: list[int] = []
    for delta in deltas:
        body = delta[2:]
        assert body[:1] == b"\x12"  # token_ids = 2, packed
        tokens += _varints(body[2 : 2 + body[1]])
    assert tuple(tokens) == expected
    assert answers[-1][:1] == b"\x1a"  # finished = 3


async def test_the_executor_serves_a_released_claim_and_step() -> None:
    sampling = bytes.fromhex(
        "15 0000803f 1d 00000000 25 00000000 28 00 4d 00000000 50 00 5d 0000803f 65 00000000 68 01"
    )
    new = b"\x0a" + bytes([len(sampling)]) + sampling + b"\x10\x03"
    piece = b"\x18\x03" + b"\x22\x03\x05\x06\x07" + b"\x2a\x01\x00" + b"\x30\x01" + b"\x3a" + bytes([len(new)]) + new
    claim = b"\x0a\x01a" + b"\x1a\x40" + EXECUTOR_CLAIM_MODEL.encode() + b"\x20\x01"
    async with running_executor() as fake, make_channel(fake.target) as channel:
        call = channel.stream_stream("/tercet.v1.ExecutorService/Run", raw, raw)()
        await call.write(b"\x0a" + bytes([len(claim)]) + claim)
        granted = bytes(await call.read())
        assert granted[:1] == b"\x0a"  # granted = 1
        epoch = granted[-1]
        step = b"\x08\x01" + b"\x10" + bytes([epoch]) + b"\x1a" + bytes([len(piece)]) + piece
        await call.write(b"\x12" + bytes([len(step)]) + step)
        result = bytes(await call.read())
        while result[:1] == b"\x1a":  # heartbeat = 3
            result = bytes(await call.read())
        call.cancel()
    assert result[:1] == b"\x12"  # result = 2
    told = executor_pb2.ExecutorServiceRunResponse.FromString(result).result
    assert told.step_id == 1
    assert [tuple(one.token_ids) for one in told.results] == [expected_hash_tokens(PROMPT, 1, 1000)]


async def test_what_is_no_message_is_refused() -> None:
    async with chain() as (scheduler, _), make_channel(scheduler.target) as channel:
        call = channel.unary_stream("/tercet.v1.SchedulerService/Generate", raw, raw)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call(b"\xff\xff"):
                pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def _varints(data: bytes) -> list[int]:
    found, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            found.append(value)
            value = shift = 0
    return found
