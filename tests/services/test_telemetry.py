"""Spans on the real wire, and collectors that are absent, hang or refuse."""

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from services import names, trace_context
from services.config import TelemetryConfig
from services.otlp_sink import OtlpSink
from services.rpc import bind, make_channel, make_server
from services.rpc_server import call_context
from services.spans import flatten
from services.telemetry import QUEUE_LIMIT, Telemetry, links_to, open_telemetry


def opened(endpoint: str | None, ratio: float = 1.0, timeout_s: float = 5.0, max_links: int = 128) -> Telemetry:
    config = TelemetryConfig(otlp_endpoint=endpoint, trace_sample_ratio=ratio, otlp_timeout_s=timeout_s)
    return open_telemetry(config, service="tercet-test", instance="i-1", version="0.1.0", max_links=max_links)


@contextmanager
def hanging_collector() -> Iterator[str]:
    """Accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    taken.append(server.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=accept)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join()
    for connection in taken:
        connection.close()


def absent_collector() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_names_are_the_pinned_ones() -> None:
    """Dashboards, alerts and other people's tools read these."""
    pinned = (Path(__file__).parent / "telemetry_names.txt").read_text().splitlines()
    assert [f"{key} {value}" for key, value in sorted(vars(names).items()) if key.isupper()] == pinned
    values = [value for key, value in vars(names).items() if key.isupper() and key != "PROVIDER"]
    assert len(set(values)) == len(values)


async def test_everything_about_a_span_reaches_the_sink() -> None:
    async with OtlpSink() as sink:
        telemetry = opened(sink.endpoint)
        tracer = telemetry.tracer
        root = tracer.start_span("root", kind=SpanKind.SERVER, attributes={"s": "x", "i": 3, "f": 0.5, "b": True})
        child = tracer.start_span(names.SPAN_QUEUE, context=trace_context.context_of(root))
        child.add_event(names.EVENT_PREEMPTED, {names.REASON: "blocks"})
        child.set_attribute("list", ["a", "b"])
        child.set_status(Status(StatusCode.ERROR))
        link = trace_context.link_to(trace_context.traceparent(root), {names.STEP_PHASE: "prefill"})
        assert link is not None
        step = tracer.start_span(names.SPAN_EXECUTOR_STEP, context=trace.Context(), links=[link])
        for span in (child, root, step):
            span.end()
        spans = {span.name: span for span in await sink.wait_for(lambda spans: len(spans) == 3)}
        assert await asyncio.to_thread(telemetry.close)
    got_root, got_child, got_step = (spans[name] for name in ("root", "queue", "executor.step"))
    assert (got_root.service, got_root.instance, got_root.kind) == ("tercet-test", "i-1", "SERVER")
    assert dict(got_root.attributes) == {"s": "x", "i": 3, "f": 0.5, "b": True}
    assert (got_root.parent_id, got_root.failed) == ("", False)
    assert (got_child.parent_id, got_child.failed) == (got_root.span_id, True)
    assert got_child.attributes["list"] == ("a", "b")
    assert [(event.name, event.attributes[names.REASON]) for event in got_child.events] == [("preempted", "blocks")]
    assert got_step.trace_id != got_root.trace_id
    assert [(link.span_id, link.attributes[names.STEP_PHASE]) for link in got_step.links] == [
        (got_root.span_id, "prefill")
    ]
    assert [(depth, span.name) for depth, span in flatten(sink.trace(got_root.trace_id))] == [(0, "root"), (1, "queue")]
    assert (telemetry.counts().exported, telemetry.counts().pending) == (3, 0)


async def test_one_trace_over_two_services() -> None:
    async with OtlpSink() as sink:
        telemetry = opened(sink.endpoint)
        server = make_server(telemetry.tracer)

        async def handler(request: bytes, context: Any) -> bytes:
            telemetry.tracer.start_span(names.SPAN_PREFILL, context=call_context(context).context).end()
            return request

        behaviour = grpc.unary_unary_rpc_method_handler(handler)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("t.v1.S", {"M": behaviour})])
        target = bind(server, "127.0.0.1:0")
        await server.start()
        root = telemetry.tracer.start_span("edge")
        async with make_channel(target, telemetry.tracer) as channel:
            await channel.unary_unary("/t.v1.S/M")(b"", metadata=trace_context.inject(root))
        root.end()
        await sink.wait_for(lambda spans: len(spans) == 4)
        rows = flatten(sink.trace(trace_context.trace_id(root)))
        await server.stop(None)
        await asyncio.to_thread(telemetry.close)
    assert [(depth, span.name, span.kind) for depth, span in rows] == [
        (0, "edge", "INTERNAL"),
        (1, "t.v1.S/M", "CLIENT"),
        (2, "t.v1.S/M", "SERVER"),
        (3, "prefill", "INTERNAL"),
    ]


@pytest.mark.parametrize("kind", ["absent", "hanging"])
def test_a_dead_collector_costs_requests_nothing(kind: str) -> None:
    """More spans than the queue holds are started and ended while nobody takes them; closing is bounded."""
    with hanging_collector() if kind == "hanging" else _as_context(absent_collector()) as endpoint:
        telemetry = opened(endpoint, timeout_s=60.0)
        ended = 3 * QUEUE_LIMIT
        for number in range(ended):
            telemetry.tracer.start_span("s", attributes={"n": number}).end()
        counts = telemetry.counts()
        assert counts.exported == 0
        assert counts.dropped > 0
        assert counts.dropped + counts.failed + counts.pending == ended
        began = time.monotonic()
        telemetry.close(0.3)
        took = time.monotonic() - began
        assert took < 10  # the exporter alone would try for 60 s
        counts = telemetry.counts()
        assert counts.dropped + counts.failed + counts.pending == ended


@contextmanager
def _as_context(value: str) -> Iterator[str]:
    yield value


@pytest.mark.parametrize("kind", ["absent", "hanging"])
def test_a_dead_collector_does_not_hold_up_exit(kind: str) -> None:
    """A whole process, with the longest wait for the collector set, still leaves by itself."""
    program = (
        "import sys\n"
        "from services.config import TelemetryConfig\n"
        "from services.telemetry import open_telemetry\n"
        "config = TelemetryConfig(otlp_endpoint=sys.argv[1], otlp_timeout_s=60.0)\n"
        "telemetry = open_telemetry(config, service='s', instance='i', version='0')\n"
        "telemetry.tracer.start_span('x').end()\n"
        "telemetry.close(0.2)\n"
        "print('closed')\n"
    )
    with hanging_collector() if kind == "hanging" else _as_context(absent_collector()) as endpoint:
        done = subprocess.run(
            [sys.executable, "-c", program, endpoint], capture_output=True, text=True, timeout=30, check=False
        )
    assert (done.returncode, done.stdout) == (0, "closed\n")


async def test_a_collector_that_comes_late_gets_later_spans() -> None:
    endpoint = absent_collector()
    telemetry = opened(endpoint)
    telemetry.tracer.start_span("early").end()
    async with OtlpSink(listen=endpoint.removeprefix("http://")) as sink:
        telemetry.tracer.start_span("late").end()
        await sink.wait_for(lambda spans: any(span.name == "late" for span in spans), 10)
        await asyncio.to_thread(telemetry.close)


async def test_a_refusing_collector_is_counted() -> None:
    server = grpc.aio.server()  # no TraceService there: UNIMPLEMENTED
    target = bind(server, "127.0.0.1:0")
    await server.start()
    telemetry = opened(f"http://{target}")
    for _ in range(5):
        telemetry.tracer.start_span("s").end()
    await asyncio.to_thread(telemetry.close)
    assert telemetry.counts().failed == 5
    telemetry.tracer.start_span("after").end()
    assert telemetry.counts().dropped == 1
    assert telemetry.counts().pending == 0
    await server.stop(None)


def test_without_endpoint_nothing_is_recorded_and_context_passes() -> None:
    telemetry = opened(None)
    assert not telemetry.exporting
    header = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    span = telemetry.tracer.start_span("s", context=trace_context.extract([("traceparent", header)]))
    assert not span.is_recording()
    assert trace_context.traceparent(span) == header
    orphan = telemetry.tracer.start_span("s", context=trace.Context())
    assert trace_context.traceparent(orphan) == ""
    assert trace_context.trace_id(orphan) == ""
    assert telemetry.close()
    assert telemetry.counts().exported == 0


def test_no_global_provider_is_set() -> None:
    before = trace.get_tracer_provider()
    telemetry = opened(absent_collector())
    assert trace.get_tracer_provider() is before
    telemetry.close(0.1)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_sampling_follows_the_parent_then_links_then_ratio(ratio: float) -> None:
    telemetry = opened(absent_collector(), ratio=ratio)
    start = telemetry.tracer.start_span
    for flags, kept in (("01", True), ("00", False)):
        header = "00-" + "a" * 32 + "-" + "b" * 16 + "-" + flags
        child = start("child", context=trace_context.extract([("traceparent", header)]))
        assert child.is_recording() is kept
        links, cut = links_to([(header, None)], 10)
        assert cut == 0
        step = start("step", context=trace.Context(), links=links)
        assert step.is_recording() is kept
    assert start("root", context=trace.Context()).is_recording() is (ratio == 1.0)
    telemetry.close(0.1)


async def test_a_step_keeps_a_link_to_each_of_a_large_batch() -> None:
    headers = [f"00-{number:032x}-{number:016x}-01" for number in range(1, 301)]
    async with OtlpSink() as sink:
        telemetry = opened(sink.endpoint, max_links=256)
        links, cut = links_to([(header, {"n": n}) for n, header in enumerate([*headers, "", "junk"])], 256)
        assert (len(links), cut) == (256, 44)
        telemetry.tracer.start_span("step", context=trace.Context(), links=links).end()
        (span,) = await sink.wait_for(lambda spans: len(spans) == 1)
        await asyncio.to_thread(telemetry.close)
    assert len(span.links) == 256


async def test_the_sink_names_what_it_has_when_it_waits_in_vain() -> None:
    async with OtlpSink() as sink:
        with pytest.raises(TimeoutError, match="spans so far: none"):
            await sink.wait_for(lambda spans: bool(spans), 0.05)
