"""Addresses, binding and the options that both sides of a connection agree on."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from rpc_bench import count_forever, start

from services import names
from services.errors import FailedPrecondition, InvalidArgument
from services.rpc import (
    CLIENT_PING_S,
    SERVER_MIN_PING_S,
    ServerOptions,
    _server_options,
    bind,
    make_channel,
    make_server,
)
from services.rpc_server import call_context


async def test_unix_socket_and_a_server_that_lives_keeps_its_path(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    async with start(f"unix:{path}") as bench:

        async def handler(request: bytes, context: Any) -> bytes:
            return b"mine"

        bench.handlers["unary_unary"] = handler
        other = make_server(bench.provider.get_tracer("test"))
        with pytest.raises(FailedPrecondition, match="another process is listening there"):
            bind(other, f"unix:{path}")
        assert await bench.call("unary_unary")(b"") == b"mine"
    # What a killed process leaves behind is no obstacle.
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead.sock"))
    async with start(f"unix:{tmp_path / 'dead.sock'}") as bench:
        bench.handlers["unary_unary"] = handler
        assert await bench.call("unary_unary")(b"") == b"mine"


async def test_addresses_that_cannot_be_had_are_named(tmp_path: Path) -> None:
    async with start() as bench:
        taken = bench.channel._peer[names.SERVER_PORT]
        server = make_server(bench.provider.get_tracer("test"))
        with pytest.raises(FailedPrecondition, match=rf"127.0.0.1:{taken}: Address already in use"):
            bind(server, f"127.0.0.1:{taken}")
        with pytest.raises(FailedPrecondition, match="Cannot assign requested address"):
            bind(server, "192.0.2.1:0")
        with pytest.raises(FailedPrecondition, match="no address"):
            bind(server, "no-such-host.invalid:0")
        with pytest.raises(FailedPrecondition, match="does not exist"):
            bind(server, f"unix:{tmp_path}/none/s.sock")
        (tmp_path / "file").write_text("x")
        with pytest.raises(FailedPrecondition, match="no socket"):
            bind(server, f"unix:{tmp_path}/file")
        long = f"{tmp_path}/" + "x" * 120
        with pytest.raises(InvalidArgument, match=r"has \d+ bytes, the limit is 107"):
            bind(server, f"unix:{long}")
        with pytest.raises(InvalidArgument, match="the limit is 107"):
            make_channel(f"unix:{long}")
        for bad in ("", "host", ":1", "host:", "host:-1", "host:65536", "::1:80", "host:१", "unix:"):
            with pytest.raises(InvalidArgument) as caught:
                make_channel(bad)
            assert caught.value.field == "address"


async def test_pings_at_our_rate_do_not_break_the_connection() -> None:
    """Both sides' options agree: the client's interval is allowed by the server's minimum."""
    assert CLIENT_PING_S >= 2 * SERVER_MIN_PING_S
    options = dict(_server_options(ServerOptions(max_connection_age_s=1.5, max_connection_age_grace_s=2)))
    assert options["grpc.http2.min_ping_interval_without_data_ms"] == SERVER_MIN_PING_S * 1000
    assert options["grpc.so_reuseport"] == 0
    assert options["grpc.max_connection_age_ms"] == 1500
    assert options["grpc.max_connection_age_grace_ms"] == 2000


async def test_message_size_limit_is_a_named_status() -> None:
    async def handler(request: bytes, context: Any) -> bytes:
        return b"x" * int(request)

    async with start(options=ServerOptions(max_message_bytes=1000)) as bench:
        bench.handlers["unary_unary"] = handler
        assert len(await bench.call("unary_unary")(b"900")) == 900
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bench.call("unary_unary")(b"9" * 1001)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_connection_age_moves_clients_without_breaking_streams() -> None:
    async with start(options=ServerOptions(max_connection_age_s=0.2)) as bench:
        bench.handlers["unary_stream"] = count_forever
        call = bench.call("unary_stream")(b"")
        async with asyncio.timeout(10):
            for _ in range(300):
                assert await call.read() is not grpc.aio.EOF
        call.cancel()


async def test_a_context_of_another_server_is_refused() -> None:
    with pytest.raises(TypeError, match="make_server"):
        call_context(object())
