"""What real users met: long messages that change their code, handlers that outlive their clients."""

import asyncio
import gc
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from opentelemetry.trace import SpanKind
from rpc_bench import SERVICE, Bench, start

from services import names
from services.errors import InvalidArgument


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with start() as made:
        yield made


async def test_long_message_keeps_its_code(bench: Bench) -> None:
    async def handler(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        if request == b"abort":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "é" * 30_000)
        if request == b"set":
            context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
            context.set_details("é" * 30_000)
            return b""
        raise InvalidArgument(
            "\N{PILE OF POO}" * 30_000, field="x" * 30_000, limit="y" * 30_000, metadata={"k" * 9000: "v" * 9000}
        )

    bench.handlers["unary_unary"] = handler
    for request in (b"abort", b"set", b"raise"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bench.call("unary_unary")(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        details = caught.value.details() or ""
        assert details.endswith("[cut]")
        assert 900 < len(details.encode()) <= 1024


async def test_no_handler_stays_parked_after_its_client_left(bench: Bench) -> None:
    """Cancels at random points, before and after messages, and while the handler emits nothing."""
    closed = 0
    entered = 0

    async def handler(request: bytes, context: Any) -> AsyncIterator[bytes]:
        nonlocal closed, entered
        entered += 1
        try:
            while True:
                yield request
                await asyncio.sleep(3600 if request == b"silent" else 0.0005)
        finally:
            closed += 1

    bench.handlers["unary_stream"] = handler
    rng = random.Random(4)
    before = len(asyncio.all_tasks())

    async def one(number: int) -> None:
        call = bench.call("unary_stream")(b"silent" if number % 3 == 0 else b"busy")
        await asyncio.sleep(rng.random() * 0.05)
        for _ in range(rng.randrange(0, 2) if number % 3 == 0 else rng.randrange(0, 4)):
            await call.read()
        call.cancel()

    for round_ in range(5):
        await asyncio.gather(*(one(round_ * 100 + number) for number in range(100)))
    async with asyncio.timeout(10):
        while closed < entered or len(asyncio.all_tasks()) > before:  # noqa: ASYNC110 - tasks have no event
            await asyncio.sleep(0.01)
    assert entered > 100
    spans = [span for span in bench.exporter.get_finished_spans() if span.name.startswith(SERVICE)]
    assert sum(span.kind is SpanKind.CLIENT for span in spans) == 500
    assert sum(span.kind is SpanKind.SERVER for span in spans) == entered
    codes = {(span.attributes or {})[names.RPC_STATUS_CODE] for span in spans}
    assert codes == {"CANCELLED"}


@pytest.mark.parametrize("leave", ["break", "cancel", "deadline", "fail"])
async def test_generator_is_closed_without_the_garbage_collector(bench: Bench, leave: str) -> None:
    closed = asyncio.Event()
    complaints: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))

    async def handler(request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                yield object() if leave == "fail" else b"m"
                await asyncio.sleep(0.001)
        finally:
            await asyncio.sleep(0)  # a lease is given back by awaiting
            closed.set()

    bench.handlers["unary_stream"] = handler
    gc.collect()
    gc.disable()
    try:
        stream = bench.call("unary_stream")
        if leave == "break":
            async for _ in stream(b""):
                break
        elif leave == "cancel":
            call = stream(b"")
            await call.read()
            call.cancel()
        else:
            with pytest.raises(grpc.aio.AioRpcError):
                async for _ in stream(b"", timeout=0.1 if leave == "deadline" else 5):
                    pass
        async with asyncio.timeout(1):
            await closed.wait()
        await bench.spans("unary_stream")
    finally:
        gc.enable()
        loop.set_exception_handler(None)
    assert complaints == []
