"""Clients who leave, stop reading, or send too slowly; and the end of the server: nothing is left behind."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_support import (
    CHAT,
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
from starlette.types import Message

from services import names
from services.config import HttpLimits
from services.names import HTTP_RESPONSE_STATUS_CODE


class Peer:
    """The client's end of one ASGI exchange, without a server between."""

    def __init__(self, body: Any, *, chunks: int = 1) -> None:
        raw = json.dumps(body).encode()
        size = -(-len(raw) // chunks)
        self._parts = [raw[i : i + size] for i in range(0, len(raw), size)]
        self.gone = asyncio.Event()
        self.reads = True
        self.sent: list[Message] = []
        self.first_body = asyncio.Event()

    async def receive(self) -> Message:
        if self._parts:
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body":
            self.first_body.set()
            if not self.reads:
                await asyncio.Event().wait()

    @property
    def status(self) -> int | None:
        return next((message["status"] for message in self.sent if "status" in message), None)

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    async def ask(self, gateway: Gateway, path: str = CHAT) -> None:
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": []}
        await gateway.app({**scope, "query_string": b"", "root_path": ""}, self.receive, self.send)


@contextlib.asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    assert asyncio.all_tasks() - before == set()


def never() -> asyncio.Event:
    return asyncio.Event()


PHASES: list[tuple[str, list[Item]]] = [
    ("before anything", []),
    ("once accepted", [accepted()]),
    ("in decode", [accepted(), delta("a"), delta("b")]),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("phase", "before"), PHASES, ids=[name for name, _ in PHASES])
async def test_a_client_who_leaves_ends_the_work(stream: bool, phase: str, before: list[Item]) -> None:
    gateway = Gateway(ScriptedEngine([*before, never()]))
    peer = Peer(chat_body(stream=stream))
    async with nothing_left():
        exchange = asyncio.ensure_future(peer.ask(gateway))
        await gateway.engine.begun.wait()
        for _ in range(50):
            await asyncio.sleep(0)
        assert gateway.engine.yielded == len(before)
        assert gateway.engine.live == 1
        peer.gone.set()
        await exchange
        assert gateway.engine.live == 0
    assert gateway.engine.released.is_set()
    (span,) = gateway.exporter.get_finished_spans()
    attributes = dict(span.attributes or {})
    assert attributes[names.OUTCOME] == "cancelled"
    assert attributes[HTTP_RESPONSE_STATUS_CODE] == 499
    assert attributes[names.OUTPUT_TOKENS] == max(0, len(before) - 1)
    assert gateway.observed() == {(CHAT, "client_gone"): 1.0}
    if not (stream and phase == "in decode"):
        assert peer.sent == []


async def test_leaving_while_the_engine_never_pauses_ends_it_within_a_step() -> None:
    gateway = Gateway(ScriptedEngine([accepted(), *(delta("a") for _ in range(100_000))]))
    peer = Peer(chat_body(stream=True))
    exchange = asyncio.ensure_future(peer.ask(gateway))
    await peer.first_body.wait()
    peer.gone.set()
    at_leaving = gateway.engine.yielded
    await exchange
    assert gateway.engine.yielded <= at_leaving + 8


async def test_leaving_before_the_body_is_there_never_reaches_the_engine() -> None:
    gateway = Gateway(ScriptedEngine(answer("a")))

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    peer = Peer({})
    scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": b"", "headers": [], "query_string": b""}
    await gateway.app({**scope, "root_path": ""}, receive, peer.send)
    assert gateway.engine.calls == []
    assert gateway.observed() == {(CHAT, "client_gone"): 1.0}


async def test_leaving_exactly_at_the_end_has_one_outcome() -> None:
    for spins in range(40):
        gateway = Gateway(ScriptedEngine(answer("a")))
        peer = Peer(chat_body(stream=spins % 2 == 0))
        async with nothing_left():
            exchange = asyncio.ensure_future(peer.ask(gateway))
            for _ in range(spins):
                await asyncio.sleep(0)
            peer.gone.set()
            await exchange
        assert gateway.engine.live == 0
        assert len(gateway.exporter.get_finished_spans()) == 1
        (observed,) = gateway.observed()
        assert observed in {(CHAT, "2xx"), (CHAT, "client_gone")}


async def test_many_clients_who_leave_leave_nothing_behind() -> None:
    gateway = Gateway(ScriptedEngine([accepted(), *(delta("a") for _ in range(20)), never()]))
    async with nothing_left():

        async def one(i: int) -> None:
            peer = Peer(chat_body(stream=i % 2 == 0))
            exchange = asyncio.ensure_future(peer.ask(gateway))
            for _ in range(i):
                await asyncio.sleep(0)
            peer.gone.set()
            await exchange

        await asyncio.gather(*(one(i) for i in range(100)))
    assert gateway.engine.live == 0
    assert sum(gateway.observed().values()) == 100
    assert len(gateway.exporter.get_finished_spans()) == 100


async def test_a_client_who_stops_reading_is_given_up() -> None:
    gateway = Gateway(ScriptedEngine([accepted(), *(delta("a") for _ in range(100))]), HttpLimits(write_timeout_s=0.05))
    peer = Peer(chat_body(stream=True))
    peer.reads = False
    async with nothing_left():
        await peer.ask(gateway)
    assert gateway.engine.live == 0
    assert gateway.engine.yielded <= 3
    (span,) = gateway.exporter.get_finished_spans()
    assert dict(span.attributes or {})[names.OUTCOME] == "slow_reader"


async def test_a_body_that_comes_too_slowly_is_refused() -> None:
    gateway = Gateway(ScriptedEngine(answer("a")), HttpLimits(body_timeout_s=0.05))
    peer = Peer(chat_body(), chunks=2)

    async def receive() -> Message:
        if len(peer._parts) > 1:
            return await Peer.receive(peer)
        await asyncio.Event().wait()
        raise AssertionError

    scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": b"", "headers": [], "query_string": b""}
    await gateway.app({**scope, "root_path": ""}, receive, peer.send)
    assert peer.status == 408
    assert "0.05 s" in json.loads(peer.text)["error"]["message"]
    assert gateway.engine.calls == []


async def test_a_body_is_not_read_beyond_the_limit() -> None:
    gateway = Gateway(ScriptedEngine(answer("a")), HttpLimits(max_body_bytes=1024))
    taken = 0

    async def receive() -> Message:
        nonlocal taken
        taken += 1
        return {"type": "http.request", "body": b" " * 500, "more_body": True}

    peer = Peer({})
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": CHAT, "raw_path": b"", "query_string": b""}
    await gateway.app({**scope, "root_path": "", "headers": []}, receive, peer.send)
    assert peer.status == 413
    assert taken == 3
    peer = Peer({})
    announced = [(b"content-length", b"99999999999")]
    await gateway.app({**scope, "root_path": "", "headers": announced}, receive, peer.send)
    assert peer.status == 413
    assert taken == 3


@pytest.mark.parametrize("begun", [False, True], ids=["before the first delta", "in the stream"])
async def test_the_end_of_the_server_is_told_to_the_client(begun: bool) -> None:
    gateway = Gateway(ScriptedEngine([accepted(), *([delta("a")] if begun else []), never()]))
    peer = Peer(chat_body(stream=True))
    async with nothing_left():
        exchange = asyncio.ensure_future(peer.ask(gateway))
        await (peer.first_body if begun else gateway.engine.begun).wait()
        exchange.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange
    assert gateway.engine.live == 0
    if begun:
        assert sse(peer.text)[-1]["error"]["code"] == "shutting_down"
    else:
        assert peer.status == 503
        assert json.loads(peer.text)["error"]["code"] == "shutting_down"
    assert gateway.observed() == {(CHAT, "5xx"): 1.0}


async def test_an_engine_that_gives_up_by_itself_is_a_failure() -> None:
    gateway = Gateway(ScriptedEngine([accepted(), asyncio.CancelledError()]))
    peer = Peer(chat_body())
    await peer.ask(gateway)
    assert peer.status == 500
    assert json.loads(peer.text)["error"]["code"] == "engine_cancelled"


async def test_the_last_write_is_not_cut_by_the_watcher() -> None:
    """A server reports `http.disconnect` once the response is complete, also to a client who stays."""
    gateway = Gateway(ScriptedEngine([accepted(), finished(tokens=0)]))
    peer = Peer(chat_body(stream=True))

    async def send(message: Message) -> None:
        peer.sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            peer.gone.set()
            for _ in range(5):
                await asyncio.sleep(0)

    scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": b"", "headers": [], "query_string": b""}
    await gateway.app({**scope, "root_path": ""}, peer.receive, send)
    assert gateway.observed() == {(CHAT, "2xx"): 1.0}
