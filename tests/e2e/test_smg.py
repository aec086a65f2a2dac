"""The real gateway `smg` in front of our VllmEngine: what its callers get, and what is left behind when they go."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from chain import TextChain
from fake_stack import until
from processes import Processes, Running, processes
from smg_support import MODEL, free_port, smg, vllm_chain

from services import names
from services.config import TelemetryConfig
from services.otlp_sink import OtlpSink
from services.telemetry import open_telemetry

pytestmark = [pytest.mark.model, pytest.mark.external, pytest.mark.timeout(120)]

ANSWER = "One two three four five."
PLAIN = ("--disable-retries", "--disable-circuit-breaker")
LONG = "and so on " * 60
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Count."}], **more}


def prompt(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Count.", **more}


def sse(text: str) -> list[Any]:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


@asynccontextmanager
async def gateway(model_path: Path, answer: str = ANSWER, **options: Any) -> AsyncIterator[Any]:
    """The chain and a client of the smg in front of it."""
    async with (
        vllm_chain(model_path, answer, **options) as (chain, _, target),
        smg(target, flags=PLAIN) as url,
        httpx.AsyncClient(base_url=url, timeout=20.0) as client,
    ):
        yield chain, client


def cancelled(chain: TextChain) -> float:
    return chain.registry.get_sample_value("tercet_requests_total", {"outcome": "cancelled"}) or 0.0


async def test_chat_completions_streams_stop_strings_and_logprobs(default_model_path: Path) -> None:
    async with gateway(default_model_path) as (chain, client):
        whole = (await client.post(CHAT, json=chat())).json()
        count = len(chain.model.encode(ANSWER, add_special=False)) + 1  # with the id that ends it
        assert whole["choices"][0]["message"]["content"] == ANSWER
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert whole["usage"]["completion_tokens"] == count
        assert whole["usage"]["prompt_tokens"] > 20  # the template's words are there

        short = (await client.post(COMPLETIONS, json=prompt(max_tokens=2))).json()
        assert short["choices"][0]["text"] == "One two"
        assert short["choices"][0]["finish_reason"] == "length"
        assert short["usage"]["completion_tokens"] == 2

        body = chat(stream=True, stream_options={"include_usage": True})
        events = sse((await client.post(CHAT, json=body)).text)
        texts = [one["choices"][0]["delta"].get("content") or "" for one in events if one["choices"]]
        assert "".join(texts) == ANSWER
        assert len([text for text in texts if text]) > 3
        assert events[-1]["usage"]["completion_tokens"] == count

        stopped = (await client.post(CHAT, json=chat(stop=["ee fo"]))).json()
        assert stopped["choices"][0]["message"]["content"] == "One two thr"
        assert stopped["choices"][0]["finish_reason"] == "stop"
        assert stopped["usage"]["completion_tokens"] < count  # found here, so no more was drawn for it

        drawn = (await client.post(CHAT, json=chat(logprobs=True, top_logprobs=2))).json()
        rows = drawn["choices"][0]["logprobs"]["content"]
        assert "".join(row["token"] for row in rows[: count - 1]) == ANSWER
        assert all(row["logprob"] == pytest.approx(-0.6931, abs=1e-3) for row in rows)
        assert all(len(row["top_logprobs"]) == 2 for row in rows)
        assert cancelled(chain) == 0


async def test_two_answers_to_one_prompt(default_model_path: Path) -> None:
    async with gateway(default_model_path) as (_, client):
        answer = await client.post(CHAT, json=chat(n=2))
        choices = answer.json()["choices"]
        assert [one["index"] for one in choices] == [0, 1]
        assert [one["message"]["content"] for one in choices] == [ANSWER, ANSWER]
        events = sse((await client.post(CHAT, json=chat(n=2, stream=True))).text)
        for index in range(2):
            parts = [one for event in events for one in event["choices"] if one["index"] == index]
            assert "".join(one["delta"].get("content") or "" for one in parts) == ANSWER


async def test_a_reader_who_leaves_a_stream_is_aborted_by_name(default_model_path: Path) -> None:
    async with gateway(default_model_path, LONG) as (chain, client):
        chain.runner.faults = replace(chain.runner.faults, delay_s=0.02)
        aborts = _heard(chain)
        async with client.stream("POST", CHAT, json=chat(stream=True)) as answer:
            async for line in answer.aiter_lines():
                if "so" in line:
                    break
        await until(lambda: cancelled(chain) == 1, "the end of the request")
        await until(lambda: len(aborts) > 0, "the abort")
        await until(lambda: not chain.scheduler.engine.live_requests(), "the request is let go")


async def test_a_caller_who_leaves_before_the_answer_cancels_the_call(default_model_path: Path) -> None:
    async with gateway(default_model_path, LONG) as (chain, client):
        chain.runner.faults = replace(chain.runner.faults, delay_s=0.02)
        aborts = _heard(chain)
        asking = asyncio.ensure_future(client.post(CHAT, json=chat()))
        await until(lambda: len(chain.scheduler.engine.live_requests()) == 1, "the request")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: cancelled(chain) == 1, "the end of the request")
        await until(lambda: not chain.scheduler.engine.live_requests(), "the request is let go")
        assert aborts == []  # no message was sent, so the gateway could cancel the call itself


def _heard(chain: TextChain) -> list[str]:
    heard: list[str] = []
    abort = chain.edge.abort

    def noting(tenant: str, request_id: str) -> bool:
        heard.append(request_id)
        return abort(tenant, request_id)

    chain.edge.abort = noting  # type: ignore[method-assign]
    return heard


async def test_overload_is_429_and_the_rest_are_served(default_model_path: Path) -> None:
    async with gateway(default_model_path, max_requests=2) as (chain, client):
        chain.runner.faults = replace(chain.runner.faults, delay_s=0.02)
        answers = await asyncio.gather(*(client.post(CHAT, json=chat()) for _ in range(6)))
        by_status = sorted(one.status_code for one in answers)
        assert by_status == [200, 200, 429, 429, 429, 429]
        refused = next(one for one in answers if one.status_code == 429)
        assert refused.json()["error"]["message"].endswith("2 requests are at this server already")


async def test_what_is_not_served_and_what_is_wrong_are_told_apart(default_model_path: Path) -> None:
    async with gateway(default_model_path) as (_, client):
        wrong = await client.post(CHAT, json=chat(max_tokens=100_000))
        assert wrong.status_code == 400
        models = (await client.get("/v1/models")).json()
        assert [one["id"] for one in models["data"]] == [MODEL]
        tokens = (await client.post("/v1/tokenize", json={"model": MODEL, "prompt": "Hello 2024"})).json()
        assert tokens["tokens"] == [19556, 216, 34, 32, 34, 36]


async def test_the_callers_trace_goes_through_the_gateway_into_ours(default_model_path: Path) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    long_id = "mine" * 30  # and the gateway adds some more: beyond our limit of 128
    async with OtlpSink() as sink:
        telemetry = open_telemetry(
            TelemetryConfig(otlp_endpoint=sink.endpoint), service="tercet-test", instance="i", version="0"
        )
        endpoint = sink.endpoint.removeprefix("http://")
        flags = (*PLAIN, "--enable-trace", "--otlp-traces-endpoint", endpoint)
        try:
            async with (
                vllm_chain(default_model_path, ANSWER, tracer=telemetry.tracer) as (_, _, target),
                smg(target, flags=flags) as url,
                httpx.AsyncClient(base_url=url, timeout=20.0) as client,
            ):
                headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01", "x-request-id": long_id}
                assert (await client.post(CHAT, json=chat(), headers=headers)).status_code == 200
        finally:
            await asyncio.to_thread(telemetry.close)
        mine = [span for span in sink.spans if span.trace_id == trace_id and span.service == "tercet-test"]
        by_name = {span.name: span for span in mine}
        assert {"vllm.grpc.engine.VllmEngine/Generate", "tercet.v1.SchedulerService/Generate", "queue"} <= set(by_name)
        served = by_name["vllm.grpc.engine.VllmEngine/Generate"]
        assert str(served.attributes[names.REQUEST_ID]).startswith("vllm-")
        assert str(served.attributes[names.ORIGINAL_REQUEST_ID]).startswith(long_id)
        assert served.attributes[names.OUTCOME] == "stop"


async def two_of_each(started: Processes) -> tuple[list[Running], list[Running], list[str]]:
    """Schedulers, each with an executor of its own; edges, each over both; where the edges serve VllmEngine."""
    flags = ("--model", MODEL, "--fake", "hash", "--fake-delay-s", "0.02")
    schedulers, edges, workers = [], [], []
    for number in range(2):
        executor = f"unix:{started.directory}/executor{number}.sock"
        await started.start("executor", *flags, target=executor)
        target = f"unix:{started.directory}/scheduler{number}.sock"
        schedulers.append(await started.start("scheduler", "--executors", executor, target=target))
    for one in schedulers:
        await one.ready()
    both = ",".join(one.target for one in schedulers)
    for number in range(2):
        port = free_port()
        target = f"unix:{started.directory}/edge{number}.sock"
        options = ("--model", MODEL, "--scheduler", both, "--vllm-grpc-port", str(port))
        edges.append(await started.start("tokenizer", *options, target=target))
        workers.append(f"127.0.0.1:{port}")
    for one in edges:
        await one.ready()
    return schedulers, edges, workers


def story(number: int, tokens: int) -> dict[str, Any]:
    return prompt(prompt=f"Story {number}. " + f"There were {number} of them. " * 12, max_tokens=tokens, temperature=0)


async def listen(client: httpx.AsyncClient, body: dict[str, Any], heard: list[str]) -> None:
    """Every text of a stream; an error in it fails."""
    async with client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                heard.append(event["choices"][0]["text"])


async def test_cache_aware_routing_and_a_scheduler_and_an_edge_that_are_killed(default_model_path: Path) -> None:
    async with processes() as started:
        schedulers, edges, workers = await two_of_each(started)
        async with (
            smg(*workers, flags=("--policy", "cache_aware", "--disable-circuit-breaker")) as url,
            httpx.AsyncClient(base_url=url, timeout=60.0) as client,
        ):
            # One after the other: under load an edge sends some elsewhere, and the same ones later to their own place.
            first = [await client.post(COMPLETIONS, json=story(one, 4)) for one in range(8)]
            again = [await client.post(COMPLETIONS, json=story(one, 4)) for one in range(8)]
            for before, after in zip(first, again, strict=True):
                assert before.status_code == after.status_code == 200
                assert after.json()["choices"][0]["text"] == before.json()["choices"][0]["text"]
                assert after.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 32
                routed = [one.headers["x-smg-routed-worker-id"] for one in (before, after)]
                assert routed[0] == routed[1]

            heard: list[list[str]] = [[] for _ in range(8)]
            streams = [asyncio.ensure_future(listen(client, story(one, 80), heard[one])) for one in range(8)]
            await until(lambda: all(len(one) > 3 for one in heard), "all streams", limit_s=30)
            schedulers[0].process.send_signal(signal.SIGKILL)
            await asyncio.gather(*streams)
            for number, texts in enumerate(heard):
                undisturbed = await client.post(COMPLETIONS, json=story(number, 80))
                assert "".join(texts) == undisturbed.json()["choices"][0]["text"]

            edges[0].process.send_signal(signal.SIGKILL)
            after_all = await asyncio.gather(*(client.post(COMPLETIONS, json=story(one, 4)) for one in range(8)))
            assert [one.status_code for one in after_all] == [200] * 8
        assert await edges[1].end() == 0
