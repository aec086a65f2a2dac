"""A real server on loopback, asked by the openai package and by raw sockets."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gateway_support import (
    CHAT,
    CREATED,
    Gateway,
    Item,
    ScriptedEngine,
    accepted,
    answer,
    chat_body,
    delta,
    finished,
    sse,
)

from services import errors
from services.address import Address
from services.config import HttpLimits
from services.errors import FailedPrecondition
from services.gateway.server import HttpServer, serve
from tercet.v1 import common_pb2

ANY_PORT = Address("127.0.0.1", 0)
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@contextlib.asynccontextmanager
async def running(gateway: Gateway) -> AsyncIterator[tuple[HttpServer, openai.AsyncOpenAI]]:
    before = asyncio.all_tasks()
    server = await serve(gateway.app, ANY_PORT)
    try:
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=20
        ) as client:
            yield server, client
    finally:
        await server.close(0.0)
    assert gateway.engine.live == 0
    assert {task for task in asyncio.all_tasks() - before if not task.done()} == set()


async def test_openai_chat() -> None:
    async with running(Gateway(ScriptedEngine(answer("Hel", "lo", cached=2)))) as (_, client):
        got = await client.chat.completions.create(model="toy", messages=MESSAGES, temperature=0, seed=3)
        assert got.choices[0].message.content == "Hello"
        assert got.choices[0].finish_reason == "stop"
        assert got.usage is not None
        assert got.usage.total_tokens == 9
        assert got.usage.prompt_tokens_details is not None
        assert got.usage.prompt_tokens_details.cached_tokens == 2
        assert got.created == CREATED
        assert got.system_fingerprint == "abc123"


async def test_openai_chat_stream() -> None:
    script = answer("Hel", "lo", reason=common_pb2.FINISH_REASON_TIME_LIMIT)
    async with running(Gateway(ScriptedEngine(script))) as (_, client):
        stream = await client.chat.completions.create(
            model="toy", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello"
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == "time_limit"
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 2


async def test_openai_completions_and_models() -> None:
    async with running(Gateway(ScriptedEngine(answer("a", "b")))) as (_, client):
        got = await client.completions.create(model="toy", prompt="hi", extra_body={"ignore_eos": True, "top_k": 3})
        assert got.choices[0].text == "ab"
        stream = await client.completions.create(model="toy", prompt=[1, 2], stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "ab"
        assert [model.id async for model in client.models.list()] == ["toy"]
        assert (await client.models.retrieve("toy")).id == "toy"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.InvalidArgument("m", field="sampling.max_tokens"), openai.BadRequestError),
        (errors.Unauthenticated("m"), openai.AuthenticationError),
        (errors.PermissionDenied("m"), openai.PermissionDeniedError),
        (errors.NotFound("m"), openai.NotFoundError),
        (errors.AlreadyExists("m"), openai.ConflictError),
        (errors.ResourceExhausted("m", retry_after_s=2), openai.RateLimitError),
        (errors.Unavailable("m"), openai.InternalServerError),
        (errors.DeadlineExceeded("m"), openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_openai_error_classes(error: errors.ServiceError, kind: type[Exception], stream: bool) -> None:
    async with running(Gateway(ScriptedEngine([accepted(), error]))) as (_, client):
        with pytest.raises(kind) as caught:
            await client.chat.completions.create(model="toy", messages=MESSAGES, stream=stream)
        assert isinstance(caught.value, openai.APIStatusError)
        assert caught.value.request_id is not None
        if error.field is not None:
            assert caught.value.param == "max_tokens"


async def test_openai_reads_an_error_inside_a_stream() -> None:
    script: list[Item] = [accepted(), delta("a"), errors.Internal("row failed")]
    async with running(Gateway(ScriptedEngine(script))) as (_, client):
        stream = await client.chat.completions.create(model="toy", messages=MESSAGES, stream=True)
        assert (await anext(stream)).choices[0].delta.content == "a"
        with pytest.raises(openai.APIError, match="row failed"):
            await anext(stream)


async def test_openai_retries_after_a_full_queue() -> None:
    gateway = Gateway(ScriptedEngine([errors.ResourceExhausted("full", retry_after_s=0.1)]))
    async with running(gateway) as (server, _):
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=1, timeout=20
        ) as client:
            asking = asyncio.ensure_future(client.chat.completions.create(model="toy", messages=MESSAGES))
            await gateway.engine.released.wait()
            gateway.engine.script = answer("a")
            assert (await asking).choices[0].message.content == "a"
        assert len(gateway.engine.calls) == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("before", [[], [accepted()], [accepted(), delta("a")]], ids=["at once", "accepted", "decode"])
async def test_a_socket_that_closes_ends_the_work(stream: bool, before: list[Item]) -> None:
    gateway = Gateway(ScriptedEngine([*before, asyncio.Event()]))
    async with running(gateway) as (server, _):
        _, writer = await _ask(server, chat_body(stream=stream))
        await asyncio.wait_for(gateway.engine.begun.wait(), 5)
        writer.close()
        await writer.wait_closed()
        await asyncio.wait_for(gateway.engine.released.wait(), 5)
        assert gateway.engine.live == 0


async def test_one_connection_serves_many_requests() -> None:
    gateway = Gateway(ScriptedEngine(answer("a")))
    async with running(gateway) as (server, _), httpx.AsyncClient() as client:
        for stream in (True, False, True):
            url = f"http://127.0.0.1:{server.port}{CHAT}"
            response = await client.post(url, json=chat_body(stream=stream))
            assert response.status_code == 200
    assert gateway.observed() == {(CHAT, "2xx"): 3.0}


async def test_an_early_refusal_leaves_the_connection_usable() -> None:
    gateway = Gateway(ScriptedEngine(answer("a")), HttpLimits(max_body_bytes=4096))
    async with running(gateway) as (server, _), httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{server.port}{CHAT}"
        assert (await client.post(url, content=b" " * 3_000_000)).status_code == 413
        assert (await client.post(url, json=chat_body())).status_code == 200


async def test_a_head_beyond_the_limit_is_refused_and_others_are_served() -> None:
    gateway = Gateway(ScriptedEngine(answer("a")))
    async with running(gateway) as (server, client):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 100_000)
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 400")
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        got = await client.chat.completions.create(model="toy", messages=MESSAGES)
        assert got.choices[0].message.content == "a"


async def test_a_reader_who_stops_delays_nobody_and_is_given_up() -> None:
    big = delta("x" * 10_000)
    gateway = Gateway(ScriptedEngine([accepted(), *([big] * 4000), finished()]), HttpLimits(write_timeout_s=0.5))
    async with running(gateway) as (server, client):
        slow = socket.create_connection(("127.0.0.1", server.port or 0))
        slow.setblocking(False)
        raw = json.dumps(chat_body(stream=True)).encode()
        await asyncio.get_running_loop().sock_sendall(slow, _request(raw))
        await asyncio.wait_for(gateway.engine.begun.wait(), 5)
        gateway.engine.script = answer("a")
        got = await client.chat.completions.create(model="toy", messages=MESSAGES)
        assert got.choices[0].message.content == "a"
        gateway.engine.released.clear()
        await asyncio.wait_for(gateway.engine.released.wait(), 10)
        assert gateway.engine.yielded < 4000
        slow.close()


async def test_closing_lets_a_request_end() -> None:
    go_on = asyncio.Event()
    gateway = Gateway(ScriptedEngine([accepted(), delta("a"), go_on, delta("b"), finished()]))
    async with running(gateway) as (server, client):
        stream = await client.chat.completions.create(model="toy", messages=MESSAGES, stream=True)
        seen = [(await anext(stream)).choices[0].delta.content]
        closing = asyncio.ensure_future(server.close(10))
        await _refuses(server)
        go_on.set()
        seen += [chunk.choices[0].delta.content async for chunk in stream]
        assert "".join(part or "" for part in seen) == "ab"
        await closing


async def test_closing_cuts_a_request_that_does_not_end() -> None:
    gateway = Gateway(ScriptedEngine([accepted(), delta("a"), asyncio.Event()]))
    async with running(gateway) as (server, client):
        stream = await client.chat.completions.create(model="toy", messages=MESSAGES, stream=True)
        await anext(stream)
        closing = asyncio.ensure_future(server.close(0.2))
        with pytest.raises(openai.APIError, match="shutting down"):
            await anext(stream)
        await closing
        await server.close(0.2)
    assert gateway.engine.live == 0


async def test_a_port_in_use_is_named() -> None:
    gateway = Gateway(ScriptedEngine())
    async with running(gateway) as (server, _):
        assert server.port is not None
        with pytest.raises(FailedPrecondition, match=str(server.port)):
            await serve(gateway.app, Address("127.0.0.1", server.port))


async def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    gateway = Gateway(ScriptedEngine(answer("a")))
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = await serve(gateway.app, Address(str(path), None))
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        assert (await client.post(CHAT, json=chat_body())).status_code == 200
        with pytest.raises(FailedPrecondition):
            await serve(gateway.app, Address(str(path), None))
    await server.close(1)
    assert not path.exists()


def _request(body: bytes) -> bytes:
    return (f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n").encode() + body


async def _ask(server: HttpServer, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(_request(json.dumps(body).encode()))
    await writer.drain()
    return reader, writer


async def _refuses(server: HttpServer) -> None:
    """Returns once no new connection is taken."""
    for _ in range(1000):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        except OSError:
            return
        writer.close()
        await asyncio.sleep(0.01)
    raise AssertionError("the server goes on taking connections")


def test_the_helper_reads_events() -> None:
    assert sse('data: {"a":1}\n\ndata: [DONE]\n\n') == [{"a": 1}, "[DONE]"]
