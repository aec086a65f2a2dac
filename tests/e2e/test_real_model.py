"""The whole chain as `tercet up` runs it, on the real model: answer, trace, gateway, readiness."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

import tercet
from services import names
from services.config import TelemetryConfig
from services.otlp_sink import OtlpSink
from services.spans import SpanRecord
from services.stack import Stack, StackOptions
from services.telemetry import open_telemetry

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

PARIS = "The capital of France is Paris."
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass
class Up:
    stack: Stack
    sink: OtlpSink
    http: str


@pytest.fixture(scope="module")
async def up(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Up]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        http = f"127.0.0.1:{probe.getsockname()[1]}"
    async with OtlpSink() as sink:
        options = StackOptions(str(default_model_path), http=http, otlp_endpoint=sink.endpoint, log_level="warning")
        async with Stack(options, os.environ) as stack:
            await stack.ready(240)
            yield Up(stack, sink, f"http://{http}")


async def test_the_capital_of_france(up: Up) -> None:
    async with tercet.AsyncClient(up.stack.target) as client:
        async with client.chat(QUESTION, temperature=0, max_tokens=40) as stream:
            assert "".join([delta.text async for delta in stream]) == PARIS
        assert stream.finish_reason is tercet.FinishReason.STOP


async def test_the_sync_client_gets_the_same(up: Up) -> None:
    def ask() -> str:
        with tercet.Client(up.stack.target) as client, client.chat(QUESTION, temperature=0, max_tokens=40) as stream:
            return "".join(delta.text for delta in stream)

    assert await asyncio.to_thread(ask) == PARIS


async def test_the_openai_package_gets_the_same(up: Up) -> None:
    async with AsyncOpenAI(base_url=f"{up.http}/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(
            model="smollm2", messages=QUESTION, temperature=0, max_tokens=40, extra_body={"model": None}
        )
        assert whole.choices[0].message.content == PARIS
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 8
        chunks = await client.chat.completions.create(
            model=whole.model,
            messages=QUESTION,
            temperature=0,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, usage = "", None
        async for chunk in chunks:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        assert text == PARIS
        assert usage is not None
        assert usage.completion_tokens == 8


async def test_the_gateways_pages(up: Up) -> None:
    async with httpx.AsyncClient(base_url=up.http) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        models = (await client.get("/v1/models")).json()
        assert len(models["data"]) == 1
        metrics = (await client.get("/metrics")).text
        assert "gen_ai_server_time_to_first_token_seconds_bucket" in metrics


async def test_one_trace_tells_the_requests_whole_life(up: Up) -> None:
    telemetry = open_telemetry(
        TelemetryConfig(otlp_endpoint=up.sink.endpoint), service="caller", instance="test", version="0"
    )
    async with tercet.AsyncClient(up.stack.target, tracer_provider=telemetry.provider) as client:
        async with client.chat(QUESTION, temperature=0, max_tokens=40) as stream:
            async for _ in stream:
                pass
    await asyncio.to_thread(telemetry.close)
    wanted = {
        "tercet.v1.TokenizerService/Generate",
        names.SPAN_TOKENIZE,
        "tercet.v1.SchedulerService/Generate",
        names.SPAN_QUEUE,
        names.SPAN_PREFILL,
        names.SPAN_DECODE,
        names.SPAN_DETOKENIZE,
    }

    def of_request(spans: object) -> list[SpanRecord]:
        root = next((span for span in spans if span.service == "caller"), None)  # type: ignore[attr-defined]
        return [] if root is None else [span for span in spans if span.trace_id == root.trace_id]  # type: ignore[attr-defined]

    def steps(spans: object, mine: list[SpanRecord]) -> list[SpanRecord]:
        ids = {span.trace_id for span in mine}
        return [
            span
            for span in spans  # type: ignore[attr-defined]
            if span.name == names.SPAN_EXECUTOR_STEP and any(link.trace_id in ids for link in span.links)
        ]

    spans = await up.sink.wait_for(
        lambda spans: wanted <= {span.name for span in of_request(spans)} and len(steps(spans, of_request(spans))) >= 8,
        20,
    )
    mine = of_request(spans)
    assert {span.attributes[names.OUTCOME] for span in mine if names.OUTCOME in span.attributes} == {"stop"}
    assert not [span for span in mine if span.failed]
    text = " ".join(str(value) for span in spans for value in span.attributes.values())
    assert "Paris" not in text
    assert "capital" not in text


async def test_an_executor_killed_in_mid_answer_is_restarted_and_the_answer_is_the_same(up: Up) -> None:
    async with tercet.AsyncClient(up.stack.target) as client:
        options = {"temperature": 0, "max_tokens": 48, "ignore_eos": True}
        async with client.chat(QUESTION, **options) as stream:  # type: ignore[arg-type]
            whole = "".join([delta.text async for delta in stream])
        heard = ""
        killed = False
        async with client.chat(QUESTION, **options) as stream:  # type: ignore[arg-type]
            async for delta in stream:
                heard += delta.text
                if len(heard) > 20 and not killed:
                    killed = True
                    pid = up.stack.supervisor.pid("executor")
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)
        assert heard == whole
