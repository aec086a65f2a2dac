"""The interceptors on real sockets: every way a call can end, seen from both spans."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode, get_current_span
from rpc_bench import SERVICE, Bench, count_forever, start

from services import names, trace_context
from services.errors import InvalidArgument, ResourceExhausted
from services.rpc import (
    bind,
    make_channel,
    make_server,
)
from services.rpc_errors import from_rpc_error
from services.rpc_server import call_context


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with start() as made:
        yield made


async def wait_forever(request: bytes, context: Any) -> bytes:
    await asyncio.sleep(3600)
    return b""


def check(
    spans: dict[SpanKind, ReadableSpan],
    client: str,
    server: str,
    *,
    client_error: bool = True,
    server_error: bool,
) -> None:
    for kind, code, failed in (
        (SpanKind.CLIENT, client, client_error),
        (SpanKind.SERVER, server, server_error),
    ):
        span = spans[kind]
        attributes = span.attributes or {}
        assert attributes[names.RPC_SYSTEM_NAME] == "grpc"
        assert attributes[names.RPC_METHOD] == span.name
        assert attributes[names.RPC_STATUS_CODE] == code
        assert attributes.get(names.ERROR_TYPE) == (None if code == "OK" else code)
        assert span.status.status_code is (StatusCode.ERROR if failed else StatusCode.UNSET)
    parent = spans[SpanKind.SERVER].parent
    assert parent is not None
    assert parent.span_id == spans[SpanKind.CLIENT].get_span_context().span_id
    assert (spans[SpanKind.CLIENT].attributes or {})[names.SERVER_ADDRESS] == "127.0.0.1"


# ---- The eight cases that published instrumentation gets wrong


async def test_client_cancels_a_stream_after_three_messages(bench: Bench) -> None:
    bench.handlers["unary_stream"] = count_forever
    call = bench.call("unary_stream")(b"")
    got = [await call.read() for _ in range(3)]
    assert got == [b"0", b"1", b"2"]
    call.cancel()
    check(await bench.spans("unary_stream"), "CANCELLED", "CANCELLED", server_error=False)


async def test_stream_deadline(bench: Bench) -> None:
    bench.handlers["unary_stream"] = count_forever
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in bench.call("unary_stream")(b"", timeout=0.1):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    check(await bench.spans("unary_stream"), "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", server_error=True)


async def test_unary_deadline(bench: Bench) -> None:
    bench.handlers["unary_unary"] = wait_forever
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.call("unary_unary")(b"", timeout=0.1)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    check(await bench.spans("unary_unary"), "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", server_error=True)
    assert bench.observed == [(f"{SERVICE}/unary_unary", "DEADLINE_EXCEEDED")]


async def test_abort_with_status(bench: Bench) -> None:
    async def handler(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        yield b"one"
        status = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="full")
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="elsewhere"))
        await context.abort_with_status(rpc_status.to_status(status))

    bench.handlers["unary_stream"] = handler
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in bench.call("unary_stream")(b""):
            pass
    error = from_rpc_error(caught.value)
    assert isinstance(error, ResourceExhausted)
    assert error.reason == "QUEUE_FULL"
    check(await bench.spans("unary_stream"), "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED", server_error=False)


async def test_abort(bench: Bench) -> None:
    async def handler(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        except grpc.aio.AbortError:
            raise RuntimeError("replaces the abort, which was sent already") from None

    bench.handlers["unary_unary"] = handler
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.call("unary_unary")(b"")
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    check(await bench.spans("unary_unary"), "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED", server_error=False)


async def test_unexpected_exception_leaks_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    async def handler(request: bytes, context: Any) -> bytes:
        raise ValueError("secret path /srv/keys")

    bench.handlers["unary_unary"] = handler
    with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.call("unary_unary")(b"", metadata=[(names.MD_REQUEST_ID, "req-7")])
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == "internal error, see the server log under request id req-7"
    assert "secret" not in repr(caught.value) + str(caught.value.trailing_metadata())
    (record,) = [record for record in caplog.records if record.name == "services.rpc_server"]
    assert record.exc_info is not None
    assert "secret" in str(record.exc_info[1])
    assert record.__dict__["request_id"] == "req-7"
    check(await bench.spans("unary_unary"), "INTERNAL", "INTERNAL", server_error=True)


async def test_task_cancelled_by_wait_for(bench: Bench) -> None:
    bench.handlers["unary_unary"] = wait_forever
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(bench.call("unary_unary")(b""), 0.1)
    check(await bench.spans("unary_unary"), "CANCELLED", "CANCELLED", server_error=False)


async def test_stream_never_iterated(bench: Bench) -> None:
    """Without the garbage collector: dropping the last reference must be enough."""
    bench.handlers["unary_stream"] = count_forever
    gc.collect()
    gc.disable()
    try:
        call = bench.call("unary_stream")(b"")
        await call.initial_metadata()
        del call
        spans = await bench.spans("unary_stream")
    finally:
        gc.enable()
    check(spans, "CANCELLED", "CANCELLED", server_error=False)


# ---- The ways a call succeeds


async def test_all_four_arities_end_ok(bench: Bench) -> None:
    async def unary(request: bytes, context: Any) -> bytes:
        return request

    async def collect(requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([message async for message in requests])

    async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in requests:
            yield message

    async def write(request: bytes, context: grpc.aio.ServicerContext) -> None:
        await context.write(request)
        await context.write(request)

    bench.handlers |= {
        "unary_unary": unary,
        "stream_unary": collect,
        "stream_stream": echo,
        "unary_stream": write,
    }
    assert await bench.call("unary_unary")(b"a") == b"a"
    assert await bench.call("stream_unary")(iter([b"a", b"b"])) == b"ab"
    assert [m async for m in bench.call("unary_stream")(b"a")] == [b"a", b"a"]
    duplex = bench.call("stream_stream")()
    await duplex.write(b"x")
    assert await duplex.read() == b"x"
    await duplex.done_writing()
    assert await duplex.read() is grpc.aio.EOF
    assert await duplex.code() is grpc.StatusCode.OK
    for arity in bench.handlers:
        check(await bench.spans(arity), "OK", "OK", client_error=False, server_error=False)
    assert sorted(bench.observed) == sorted((f"{SERVICE}/{arity}", "OK") for arity in bench.handlers)


async def test_status_set_without_raising(bench: Bench) -> None:
    async def handler(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        context.set_code(grpc.StatusCode.NOT_FOUND)
        context.set_details("no such thing")
        return b""

    bench.handlers["unary_unary"] = handler
    with pytest.raises(grpc.aio.AioRpcError):
        await bench.call("unary_unary")(b"")
    check(await bench.spans("unary_unary"), "NOT_FOUND", "NOT_FOUND", server_error=False)


async def finish(call: Any, arity: str) -> None:
    if arity.endswith("unary"):
        await call
    else:
        async for _ in call:
            pass


async def test_domain_error_in_every_arity(bench: Bench) -> None:
    async def refuse(request: Any, context: Any) -> bytes:
        raise InvalidArgument("top_p must be above 0", field="top_p", limit="(0, 1]")

    async def refuse_stream(request: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"one"
        raise InvalidArgument("top_p must be above 0", field="top_p", limit="(0, 1]")

    bench.handlers |= {
        "unary_unary": refuse,
        "stream_unary": refuse,
        "unary_stream": refuse_stream,
        "stream_stream": refuse_stream,
    }
    for arity in bench.handlers:
        call = bench.call(arity)(iter([b""]) if arity.startswith("stream") else b"")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await finish(call, arity)
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidArgument)
        assert (error.field, error.limit, error.reason) == ("top_p", "(0, 1]", "INVALID_ARGUMENT")
        assert error.metadata["request_id"]
        check(await bench.spans(arity), "INVALID_ARGUMENT", "INVALID_ARGUMENT", server_error=False)


@pytest.mark.parametrize("cancelled", ["own", "inner"])
async def test_a_handlers_own_cancelled_error_is_a_defect(bench: Bench, cancelled: str) -> None:
    """grpc.aio would leave the caller without any status."""

    async def handler(request: bytes, context: Any) -> bytes:
        if cancelled == "own":
            raise asyncio.CancelledError
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future
        return b""

    bench.handlers["unary_unary"] = handler
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.call("unary_unary")(b"", timeout=5)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    check(await bench.spans("unary_unary"), "INTERNAL", "INTERNAL", server_error=True)


async def test_undecodable_request_and_unencodable_reply(bench: Bench) -> None:
    async def handler(request: str, context: Any) -> Any:
        return None

    def decode(raw: bytes) -> str:
        return raw.decode()

    exporter = bench.exporter

    class Typed(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(handler, decode, lambda text: text.encode())

    server = make_server(bench.provider.get_tracer("test"))
    server.add_generic_rpc_handlers([Typed()])
    target = bind(server, "127.0.0.1:0")
    await server.start()
    async with make_channel(target) as channel:
        call: Callable[..., Any] = channel.unary_unary(f"/{SERVICE}/Typed")
        for body, code in ((b"\xff", "INVALID_ARGUMENT"), (b"fine", "INTERNAL")):
            exporter.clear()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(body)
            assert caught.value.code().name == code
            (span,) = exporter.get_finished_spans()
            assert (span.attributes or {})[names.RPC_STATUS_CODE] == code
    await server.stop(None)


# ---- Identity


async def test_request_id_trace_and_context_reach_the_handler(bench: Bench) -> None:
    seen: list[Any] = []

    async def handler(request: bytes, context: Any) -> AsyncIterator[bytes]:
        seen.append(call_context(context))
        assert not get_current_span().get_span_context().is_valid
        with bench.provider.get_tracer("test").start_as_current_span("inside", context=seen[0].context):
            pass
        yield b""

    bench.handlers["unary_stream"] = handler
    root = bench.provider.get_tracer("test").start_span("root")
    metadata = [(names.MD_REQUEST_ID, "a:b"), (names.MD_TENANT, "t"), *trace_context.inject(root)]
    async for _ in bench.call("unary_stream")(b"", metadata=metadata):
        pass
    spans = await bench.spans("unary_stream")
    (call,) = seen
    assert (call.request_id, call.metadata[names.MD_TENANT], call.request_id_given) == ("a:b", "t", True)
    assert call.method == f"{SERVICE}/unary_stream"
    parent = spans[SpanKind.CLIENT].parent
    assert parent is not None
    assert parent.span_id == root.get_span_context().span_id
    assert (spans[SpanKind.SERVER].attributes or {})[names.REQUEST_ID] == "a:b"
    (inside,) = [span for span in bench.exporter.get_finished_spans() if span.name == "inside"]
    assert inside.parent is not None
    assert inside.parent.span_id == spans[SpanKind.SERVER].get_span_context().span_id
    assert inside.get_span_context().trace_id == root.get_span_context().trace_id


async def test_request_id_is_made_when_absent_and_refused_when_malformed(bench: Bench) -> None:
    async def handler(request: bytes, context: Any) -> bytes:
        return call_context(context).request_id.encode()

    bench.handlers["unary_unary"] = handler
    first, second = [await bench.call("unary_unary")(b"") for _ in range(2)]
    assert len(first) == len(second) == 32
    assert first != second
    for bad in ("", "a b", "x" * 129, "a/b"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bench.call("unary_unary")(b"", metadata=[(names.MD_REQUEST_ID, bad)])
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidArgument)
        assert (error.field, error.limit) == (names.MD_REQUEST_ID, "128")
        assert error.metadata["request_id"] != bad


async def test_metadata_that_comes_twice_is_refused_unless_it_says_the_same(bench: Bench) -> None:
    seen = []

    async def handler(request: bytes, context: Any) -> bytes:
        seen.append(call_context(context).metadata)
        return b""

    bench.handlers["unary_unary"] = handler
    for name in (names.MD_REQUEST_ID, names.MD_TENANT, names.MD_PRIORITY, names.MD_AUTHORIZATION):
        for values in (("1", "2"), ("2", "1")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await bench.call("unary_unary")(b"", metadata=[(name, value) for value in values])
            error = from_rpc_error(caught.value)
            assert isinstance(error, InvalidArgument)
            assert error.field == name
        await bench.call("unary_unary")(b"", metadata=[(name, "1"), (name, "1"), ("other", "1"), ("other", "2")])
    assert len(seen) == 4


async def test_malformed_trace_headers_start_a_new_trace(bench: Bench) -> None:
    async def handler(request: bytes, context: Any) -> bytes:
        return b""

    bench.handlers["unary_unary"] = handler
    for header in ("", "00-zz-11-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 2000):
        bench.exporter.clear()
        await bench.call("unary_unary")(b"", metadata=[(names.MD_TRACEPARENT, header)])
        spans = await bench.spans("unary_unary")
        assert spans[SpanKind.CLIENT].parent is None
