"""The span of a generation: one, ended once, parent of the server's, without a word of the prompt."""

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from scripted_tokenizer import (
    CLIENTS,
    Driver,
    ScriptedTokenizer,
    accepted,
    delta,
    driving,
    fails,
    finished,
    plays,
    serving,
)

import tercet


@pytest.fixture
async def service() -> ScriptedTokenizer:
    return ScriptedTokenizer()


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


@pytest.fixture(params=sorted(CLIENTS))
async def driver(
    request: pytest.FixtureRequest, service: ScriptedTokenizer, provider: TracerProvider
) -> AsyncIterator[Driver]:
    policy = tercet.RetryPolicy(initial_backoff=0.01)
    async with (
        serving(service) as target,
        driving(request.param, target, tracer_provider=provider, retry=policy) as driver,
    ):
        yield driver


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


async def test_span_of_a_chat(
    driver: Driver,
    service: ScriptedTokenizer,
    exporter: InMemorySpanExporter,
    caplog: pytest.LogCaptureFixture,
) -> None:
    service.scripts.extend(
        [fails(grpc.StatusCode.UNAVAILABLE), plays(accepted(model="m"), delta("secret answer", 1), finished())]
    )
    messages = [{"role": "user", "content": "secret prompt"}]
    stream = await driver.call("chat", messages, temperature=0, seed=0, stop="secret", max_tokens=5, request_id="r")
    await driver.on(stream, "text")
    await driver.on(stream, "cancel")
    assert await driver.on(stream, "text") == "secret answer"
    # A second end is no more than a warning in OpenTelemetry.
    assert not caplog.records
    span = only(exporter)
    assert span.name == "chat m"
    assert span.kind is SpanKind.CLIENT
    assert span.status.status_code is StatusCode.UNSET
    attributes = dict(span.attributes or {})
    assert attributes.pop("gen_ai.response.time_to_first_chunk") > 0  # type: ignore[operator]
    assert attributes.pop("server.port")
    assert attributes == {
        "server.address": "127.0.0.1",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tercet",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0,
        "gen_ai.request.seed": 0,
        "tercet.request.id": "r",
        "gen_ai.response.id": "r",
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    assert [event.name for event in span.events] == ["retry"]
    assert "secret" not in span.to_json()  # neither prompt nor answer nor stop strings
    assert span.context is not None
    for metadata in service.metadata:
        _, trace_id, span_id, _ = metadata["traceparent"].split("-")
        assert (int(trace_id, 16), int(span_id, 16)) == (span.context.trace_id, span.context.span_id)
        assert stream.trace_id == trace_id


@pytest.mark.parametrize("how", ["failure", "cancel", "garbage", "deadline"])
async def test_the_span_ends_once_however_it_ends(
    driver: Driver, service: ScriptedTokenizer, exporter: InMemorySpanExporter, how: str
) -> None:
    async def hangs(request: Any, context: Any) -> AsyncIterator[Any]:
        yield accepted()
        await asyncio.Event().wait()

    service.scripts.append(fails(grpc.StatusCode.INTERNAL, "no", accepted()) if how == "failure" else hangs)
    stream = await driver.call("generate", "x", timeout=0.3 if how == "deadline" else 30)
    expected = "CANCELLED"
    if how == "failure":
        expected = "INTERNAL"
        with pytest.raises(tercet.InternalError):
            await driver.on(stream, "text")
    elif how == "deadline":
        expected = "DEADLINE_EXCEEDED"
        with pytest.raises(tercet.DeadlineExceededError):
            await driver.on(stream, "text")
    elif how == "cancel":
        await driver.on(stream, "cancel")
    del stream
    # The worker thread that made a sync stream may hold it a little longer.
    for _ in range(200):
        gc.collect()
        if exporter.get_finished_spans():
            break
        await asyncio.sleep(0.02)
    span = only(exporter)
    assert span.name == "generate"
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == expected


async def test_the_current_span_is_the_parent(
    driver: Driver, service: ScriptedTokenizer, exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    service.scripts.append(plays(accepted(), finished()))
    with provider.get_tracer("t").start_as_current_span("mine") as mine:
        await driver.on(await driver.call("generate", "x"), "text")
        await driver.call("tokenize", "x")
    generate, _ = exporter.get_finished_spans()
    assert generate.parent is not None
    assert generate.parent.span_id == mine.get_span_context().span_id
    assert int(service.metadata[1]["traceparent"].split("-")[2], 16) == mine.get_span_context().span_id


async def test_without_a_tracer_nothing_is_sent(service: ScriptedTokenizer) -> None:
    service.scripts.extend([plays(accepted(), finished())] * 2)
    for kind in CLIENTS:
        async with serving(service) as target, driving(kind, target) as driver:
            stream = await driver.call("generate", "x")
            await driver.on(stream, "text")
            assert stream.trace_id is None
    assert all("traceparent" not in metadata for metadata in service.metadata)


async def test_without_opentelemetry(service: ScriptedTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    service.scripts.extend([plays(accepted(), delta("a"), finished())] * 2)
    for kind in CLIENTS:
        async with serving(service) as target, driving(kind, target) as driver:
            stream = await driver.call("generate", "x")
            assert await driver.on(stream, "text") == "a"
            assert stream.trace_id is None
