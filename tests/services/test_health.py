"""Readiness over the real protocol, and the container's check as a process."""

import asyncio
import sys
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.trace import NoOpTracer

from services.health import LIVENESS, Readiness, add_health, check
from services.rpc import bind, make_channel, make_server

SERVICE = "tercet.v1.SchedulerService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def served() -> AsyncIterator[tuple[str, Readiness]]:
    readiness = Readiness([SERVICE])
    server = make_server(NoOpTracer())
    add_health(server, readiness)
    target = bind(server, "127.0.0.1:0")
    await server.start()
    yield target, readiness
    await server.stop(None)


async def test_three_names_and_their_reasons(served: tuple[str, Readiness]) -> None:
    target, readiness = served
    assert await check(target, LIVENESS) is None
    for name in ("", SERVICE):
        assert await check(target, name) == "NOT_SERVING: starting"
    readiness.set_ready()
    for name in ("", SERVICE, LIVENESS):
        assert await check(target, name) is None
    readiness.set_not_ready("no executor: ünreachable\nhost")
    assert await check(target) == "NOT_SERVING: no executor: ünreachable\nhost"
    assert await check(target, "other") == "NOT_FOUND: no service 'other' here"


async def test_draining_is_final(served: tuple[str, Readiness]) -> None:
    target, readiness = served
    readiness.set_ready()
    readiness.close("draining")
    readiness.set_ready()
    readiness.set_not_ready("something else")
    assert await check(target) == "NOT_SERVING: draining"
    assert await check(target, LIVENESS) is None


async def test_watchers_outlive_each_other(served: tuple[str, Readiness]) -> None:
    target, readiness = served
    async with make_channel(target) as channel, asyncio.timeout(5):
        stub = health_pb2_grpc.HealthStub(channel)
        first, second, unknown = (
            stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", "", "nobody")
        )
        assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        assert [(await call.read()).status for call in (first, second)] == [NOT_SERVING] * 2
        first.cancel()
        await asyncio.sleep(0.05)
        for _ in range(3):
            readiness.set_ready()
            assert (await second.read()).status == SERVING
            readiness.set_not_ready("again")
            assert (await second.read()).status == NOT_SERVING
        second.cancel()
        unknown.cancel()


async def test_nobody_there_and_a_server_that_does_not_answer() -> None:
    reason = await check("127.0.0.1:1", timeout=2)
    assert reason is not None
    assert reason.startswith("UNAVAILABLE")

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    reason = await check(f"127.0.0.1:{port}", timeout=0.2)
    assert reason is not None
    assert reason.startswith("DEADLINE_EXCEEDED")
    server.close()


async def test_the_command_of_the_container_check(served: tuple[str, Readiness]) -> None:
    target, readiness = served

    async def run(*arguments: str) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.health", *arguments, stderr=asyncio.subprocess.PIPE
        )
        _, errors = await process.communicate()
        return process.returncode, errors.decode()

    assert await run(target) == (1, "NOT_SERVING: starting\n")
    readiness.set_ready()
    assert await run(target, SERVICE) == (0, "")
    code, errors = await run("nonsense")
    assert code == 1
    assert "is no address" in errors


async def test_a_reason_is_required() -> None:
    with pytest.raises(ValueError, match="reason"):
        Readiness([]).set_not_ready("")


async def test_a_channel_is_a_grpc_channel() -> None:
    async with make_channel("127.0.0.1:1") as channel:
        assert isinstance(channel, grpc.aio.Channel)
        assert channel.get_state() is grpc.ChannelConnectivity.IDLE
