"""Requests as clients of the first release sent them, byte for byte, at today's text edge; and every request of the
released contract at every service."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import pytest
from chain import CAPACITY, scheduler
from fake_stack import running_executor, until
from resumable import running_edge
from tiny_tokenizer import tiny_model

import services
from services.executor.fake import FakeRunner
from services.executor.fake_tokens import expected_hash_tokens
from services.rpc import make_channel
from tercet.v1 import executor_pb2, scheduler_pb2, tokenizer_pb2

GOLDEN: dict[str, dict[str, Any]] = json.loads(
    (Path(services.__file__).parents[1] / "tests" / "golden" / "wire_v1.json").read_text()
)
MODEL = tiny_model()
PROMPT = (5, 6, 7)
EDGE = "/tercet.v1.TokenizerService/"

GENERATE = bytes.fromhex(
    "0a080a06676f6c64656e"  # context: request_id "golden"
    "22050a03050607"  # token_ids: 5, 6, 7
    "2a0b38014d0000000068097008"  # sampling: ignore_eos, temperature 0, seed 9, max_tokens 8
    "6801"  # return_prompt_ids
)
TEXT = b"12 hello"
TOKENIZE = b"\x0a" + bytes([len(TEXT)]) + TEXT + b"\x18\x01"  # text, return_pieces
CHAT = bytes.fromhex("0a0d0a0b0a04757365721203") + b"hi!"  # one message of a user
RESPONSES = {
    f"tercet.v1.{service.name}": {method.name: method for method in service.methods}
    for module in (tokenizer_pb2, scheduler_pb2, executor_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
}


def raw(value: bytes) -> bytes:
    return value


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at


def fields(data: bytes) -> dict[int, list[Any]]:
    """Number to values, read without any generated code: numbers, or bytes."""
    found: dict[int, list[Any]] = {}
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        match tag & 7:
            case 0:
                value: Any
                value, at = varint(data, at)
            case 1:
                value, at = data[at : at + 8], at + 8
            case 2:
                size, at = varint(data, at)
                value, at = data[at : at + size], at + size
            case 5:
                value, at = data[at : at + 4], at + 4
            case kind:
                raise AssertionError(f"wire type {kind}")
        found.setdefault(tag >> 3, []).append(value)
    return found


def packed(values: list[bytes]) -> list[int]:
    numbers = []
    for data in values:
        at = 0
        while at < len(data):
            number, at = varint(data, at)
            numbers.append(number)
    return numbers


@asynccontextmanager
async def stack() -> AsyncIterator[dict[str, grpc.aio.Channel]]:
    """Channels by service."""
    runner = FakeRunner("hash", replace(CAPACITY, vocab_size=MODEL.vocab_size))
    async with (
        running_executor(runner=runner, tokenizer_hash=MODEL.hash, eos_token_ids=(1,)) as fake,
        scheduler(fake.target) as back,
    ):
        await until(lambda: not back.lease.state.reason, "the lease")
        async with (
            running_edge(MODEL, back.target) as edge,
            make_channel(edge.target) as at_edge,
            make_channel(back.target) as at_scheduler,
            make_channel(fake.target) as at_executor,
        ):
            names = ("TokenizerService", "SchedulerService", "ExecutorService")
            yield dict(zip((f"tercet.v1.{name}" for name in names), (at_edge, at_scheduler, at_executor), strict=True))
        await back.drained()
    assert not runner.violations


async def test_the_edge_serves_a_released_generate() -> None:
    expected = expected_hash_tokens(PROMPT, 8, MODEL.vocab_size)
    async with stack() as channels:
        call = channels["tercet.v1.TokenizerService"].unary_stream(f"{EDGE}Generate", raw, raw)
        events = [fields(bytes(event)) async for event in call(GENERATE)]
    assert [list(event) for event in events] == [[1], *([2] for _ in events[2:]), [3]]
    accepted = fields(events[0][1][0])
    assert accepted[1] == [b"golden"]
    assert accepted[3] == [9]  # the seed
    assert accepted[6] == [3]  # tokens of the prompt
    assert packed(accepted[7]) == list(PROMPT)
    deltas = [fields(event[2][0]) for event in events[1:-1]]
    assert packed([part for delta in deltas for part in delta.get(3, [])]) == list(expected)
    text = b"".join(part for delta in deltas for part in delta.get(2, []))
    assert text.decode() == MODEL.decode(expected)
    finished = fields(events[-1][3][0])
    assert finished[2] == [2]  # length
    assert fields(finished[4][0])[1] == [3]  # usage: tokens of the prompt


async def test_the_edge_serves_released_calls_about_text() -> None:
    async with stack() as channels:
        channel = channels["tercet.v1.TokenizerService"]

        async def ask(method: str, request: bytes) -> dict[int, list[Any]]:
            return fields(bytes(await channel.unary_unary(EDGE + method, raw, raw)(request)))

        tokens = await ask("Tokenize", TOKENIZE)
        ids = packed(tokens[1])
        assert ids == list(MODEL.encode(TEXT.decode(), add_special=False))
        assert b"".join(tokens[2]) == TEXT
        detokenize = b"\x0a" + bytes([len(tokens[1][0])]) + tokens[1][0]
        assert (await ask("Detokenize", detokenize))[1] == [TEXT]
        described = await ask("Describe", b"")
        assert fields(described[1][0])
        assert described[2] == [1]  # the revision of the contract
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask("RenderChat", CHAT)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION  # this model has no template
        archive = channel.unary_stream(f"{EDGE}GetTokenizer", raw, raw)
        chunks = [fields(bytes(chunk)) async for chunk in archive(b"")]
    data = b"".join(chunk[1][0] for chunk in chunks)
    assert chunks[-1][2] == [sha256(data).hexdigest().encode()]


async def test_every_released_request_gets_an_answer_of_the_contract() -> None:
    """Its fields are all set, to values that mostly can't be: it is refused for them, or served, and never a defect."""
    asked, defects = 0, {}
    async with stack() as channels:
        for key, entry in GOLDEN.items():
            kind = key.partition("/")[0].removeprefix("tercet.v1.")
            for service, methods in RESPONSES.items():
                method = methods.get(kind.removeprefix(service.rpartition(".")[2]).removesuffix("Request"))
                if method is None or method.input_type.name != kind or method.name in ("Drain", "WatchKvEvents"):
                    continue  # the one ends the server, the other never ends
                asked += 1
                code = await code_of(channels[service], f"/{service}/{method.name}", method, entry["bytes"])
                if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
                    defects[key] = code.name
    assert not defects
    assert asked > 20


async def code_of(channel: grpc.aio.Channel, path: str, method: Any, data: str) -> grpc.StatusCode:
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, True): channel.stream_stream,
    }
    multi: Any = kinds[method.client_streaming, method.server_streaming](path, raw, raw)
    request = bytes.fromhex(data)
    call: Any = multi(timeout=20) if method.client_streaming else multi(request, timeout=20)
    try:
        if method.client_streaming:
            await call.write(request)
            await call.done_writing()
        if method.server_streaming:
            async for _ in call:
                pass
    except grpc.aio.AioRpcError:
        pass
    code: grpc.StatusCode = await call.code()
    return code
