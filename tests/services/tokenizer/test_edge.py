"""The text edge over real sockets, real tokenizer, fake executor that plays a text: what callers see and count."""

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import pytest
from chain import TextChain, text_chain
from fake_stack import until
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import tercet
from tercet.v1 import tokenizer_pb2

pytestmark = pytest.mark.model

QUESTION = [{"role": "user", "content": "Say something."}]
HARD_TEXT = "Grüße, 世界! 👩‍👩‍👧 é ﷽ — tabs\tand\nlines, 1234567 and   spaces."


async def ask(chain: TextChain, **options: object) -> tercet.AsyncStream:
    """The stream, read to its end; its text is `stream.answers[0].text`."""
    async with tercet.AsyncClient(chain.target) as client:
        stream = client.chat(QUESTION, **{"temperature": 0, **options})  # type: ignore[arg-type]
        async with stream:
            deltas = [delta async for delta in stream]
        stream.heard = "".join(delta.text for delta in deltas)  # type: ignore[attr-defined]
        stream.ids = [one for delta in deltas for one in delta.token_ids]  # type: ignore[attr-defined]
        return stream


async def test_an_answer_arrives_whole_with_its_usage_and_times(default_model_path: Path) -> None:
    async with text_chain(default_model_path, HARD_TEXT) as chain:
        stream = await ask(chain)
        assert stream.heard == HARD_TEXT
        assert stream.finish_reason is tercet.FinishReason.STOP
        assert stream.usage.delivered_tokens == len(stream.ids)
        assert stream.usage.sampled_tokens == stream.usage.delivered_tokens + stream.usage.discarded_tokens
        assert stream.ids[-1] in chain.model.eos_ids
        assert 0 < stream.timings.first_token <= stream.timings.total


@pytest.mark.parametrize(
    ("stop", "include", "expected"),
    [
        ("世界", False, "Grüße, "),
        ("世界", True, "Grüße, 世界"),
        ("never there", False, HARD_TEXT),
        ("spaces.", False, HARD_TEXT.removesuffix("spaces.")),
    ],
)
async def test_a_stop_string_ends_the_text_and_the_work(
    default_model_path: Path, stop: str, include: bool, expected: str
) -> None:
    async with text_chain(default_model_path, HARD_TEXT) as chain:
        stream = await ask(chain, stop=stop, include_stop=include)
        assert stream.heard == expected
        assert stream.finish_reason is tercet.FinishReason.STOP
        assert stream.usage.delivered_tokens == len(stream.ids)
        assert stream.usage.sampled_tokens == stream.usage.delivered_tokens + stream.usage.discarded_tokens


async def test_a_stop_string_stops_the_executor_within_a_few_steps(default_model_path: Path) -> None:
    async with text_chain(default_model_path, "one two three " * 60, ends=False) as chain:
        chain.runner.faults = replace(chain.runner.faults, delay_s=0.01)
        stream = await ask(chain, stop="three", max_tokens=150)
        assert stream.heard == "one two "
        assert stream.usage.sampled_tokens <= 3 + 8


async def test_a_stop_id_that_is_a_word_is_not_part_of_the_text(default_model_path: Path) -> None:
    async with text_chain(default_model_path, "one two three four") as chain:
        three = chain.model.encode(" three", add_special=False)
        assert len(three) == 1
        stream = await ask(chain, stop_token_ids=three)
        assert stream.heard == "one two"
        assert stream.usage.delivered_tokens == 3


async def test_length_and_logprobs(default_model_path: Path) -> None:
    async with text_chain(default_model_path, HARD_TEXT) as chain:
        async with tercet.AsyncClient(chain.target) as client:
            stream = client.chat(QUESTION, temperature=0, max_tokens=9, logprobs=2)
            async with stream:
                deltas = [delta async for delta in stream]
        assert stream.finish_reason is tercet.FinishReason.LENGTH
        ids = [one for delta in deltas for one in delta.token_ids]
        rows = [row for delta in deltas for row in delta.logprobs]
        assert len(ids) == len(rows) == 9
        assert [row.drawn.token_id for row in rows] == ids
        assert all(row.drawn.bytes == chain.model.token_bytes(row.drawn.token_id) for row in rows)
        assert all(len(row.top) == 2 for row in rows)


async def test_wrong_input_is_refused_by_name(default_model_path: Path) -> None:
    async with text_chain(default_model_path, max_prompt_bytes=10_000) as chain:
        async with tercet.AsyncClient(chain.target) as client:

            async def refused(kind: type[tercet.TercetError], field: str, call: tercet.AsyncStream) -> None:
                with pytest.raises(kind) as caught:
                    async for _ in call:
                        pass
                assert caught.value.details.field == field

            invalid = tercet.InvalidArgumentError
            await refused(invalid, "prompt_ids", client.generate(""))
            await refused(invalid, "text", client.generate("x" * 20_000))
            await refused(invalid, "prompt_ids", client.generate("word " * 600))
            await refused(invalid, "prompt_ids", client.generate([1, chain.model.vocab_size]))
            await refused(invalid, "sampling.max_tokens", client.generate("hi", max_tokens=100_000))
            await refused(tercet.NotFoundError, "model", client.generate("hi", model="gpt-4"))


async def test_a_prompt_too_long_names_both_numbers(default_model_path: Path) -> None:
    async with text_chain(default_model_path) as chain, tercet.AsyncClient(chain.target) as client:
        with pytest.raises(tercet.InvalidArgumentError, match=r"prompt_ids has 1200 tokens; the context holds 512"):
            async for _ in client.generate([5] * 1200):
                pass


async def test_the_tokenizers_own_verbs(default_model_path: Path) -> None:
    async with text_chain(default_model_path) as chain, tercet.AsyncClient(chain.target) as client:
        ids = await client.tokenize(HARD_TEXT)
        assert await client.detokenize(ids) == HARD_TEXT
        rendered = await client.render_chat([{"role": "user", "content": "<|im_end|> is text"}])
        assert rendered.token_ids.count(chain.model.eos_id) == 2  # system and user message end; the typed one is text
        with pytest.raises(tercet.InvalidArgumentError):
            await client.detokenize([chain.model.vocab_size])
        described = await client.describe()
        assert described.tokenizer_hash == chain.model.hash


async def test_a_client_that_leaves_ends_the_work(default_model_path: Path) -> None:
    async with text_chain(default_model_path, "word " * 200, ends=False) as chain:
        chain.runner.faults = replace(chain.runner.faults, delay_s=0.01)
        async with tercet.AsyncClient(chain.target) as client:
            stream = client.chat(QUESTION, temperature=0, max_tokens=200)
            async for delta in stream:
                if delta.text:
                    break
            stream.cancel()
        await chain.scheduler.drained()
        await asyncio.wait_for(chain.edge.drained(5), 6)
    outcomes = {
        sample.labels["outcome"]: sample.value
        for family in chain.registry.collect()
        for sample in family.samples
        if sample.name == "tercet_requests_total"
    }
    assert outcomes["cancelled"] == 1
    assert sum(outcomes.values()) == 1


async def test_another_models_tokenizer_is_refused_and_named(default_model_path: Path) -> None:
    async with text_chain(default_model_path, tokenizer_hash="0" * 64) as chain:
        async with tercet.AsyncClient(chain.target) as client:
            with pytest.raises(tercet.FailedPreconditionError, match="tokenizer 000000000000"):
                async for _ in client.generate("hi"):
                    pass


async def test_draining_refuses_new_requests_and_finishes_the_old(default_model_path: Path) -> None:
    async with text_chain(default_model_path, "word " * 30) as chain:
        chain.runner.faults = replace(chain.runner.faults, delay_s=0.01)
        old = asyncio.create_task(ask(chain))
        await until(lambda: bool(chain.scheduler.engine.live_requests()))
        chain.edge.drain()
        async with tercet.AsyncClient(chain.target, retry=tercet.RetryPolicy(attempts=1)) as client:
            with pytest.raises(tercet.UnavailableError, match="draining"):
                async for _ in client.generate("hi"):
                    pass
        assert (await old).heard == "word " * 30
        await chain.edge.drained(5)


async def test_one_trace_with_every_span(default_model_path: Path) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with text_chain(default_model_path, HARD_TEXT, tracer=provider.get_tracer("test")) as chain:
        async with tercet.AsyncClient(chain.target, tracer_provider=provider) as client:
            async with client.chat(QUESTION, temperature=0) as stream:
                async for _ in stream:
                    pass
        await until(lambda: any(span.name == "tercet.v1.TokenizerService/Generate" for span in done(exporter)))
    root = next(span for span in done(exporter) if span.parent is None and "chat" in span.name)
    spans = [span for span in done(exporter) if span.context.trace_id == root.context.trace_id]
    by_id = {span.context.span_id: span for span in spans}

    def path(span: object) -> list[str]:
        names = []
        while span is not None:
            names.append(span.name)  # type: ignore[attr-defined]
            parent = span.parent  # type: ignore[attr-defined]
            span = None if parent is None else by_id[parent.span_id]
        return names[::-1]

    paths = {"/".join(path(span)) for span in spans}
    edge = f"{root.name}/tercet.v1.TokenizerService/Generate"
    behind = f"{edge}/tercet.v1.SchedulerService/Generate/tercet.v1.SchedulerService/Generate"
    for expected in (
        f"{edge}/tokenize",
        f"{edge}/detokenize",
        f"{behind}/queue",
        f"{behind}/prefill",
        f"{behind}/decode",
    ):
        assert expected in paths, paths
    outcomes = [span.attributes["outcome"] for span in spans if span.attributes and "outcome" in span.attributes]
    assert set(outcomes) == {"stop"}


def done(exporter: InMemorySpanExporter) -> list[object]:
    return list(exporter.get_finished_spans())


async def test_the_gateway_answers_through_the_same_edge(default_model_path: Path) -> None:
    async with text_chain(default_model_path, HARD_TEXT) as chain, httpx.AsyncClient(base_url=chain.http) as client:
        reply = await client.post(
            "/v1/chat/completions", json={"model": "smollm2-135m", "messages": QUESTION, "temperature": 0}
        )
        assert reply.status_code == 200, reply.text
        body = reply.json()
        assert body["choices"][0]["message"]["content"] == HARD_TEXT
        assert body["choices"][0]["finish_reason"] == "stop"
        refused = await client.post(
            "/v1/chat/completions", json={"model": "other", "messages": QUESTION, "temperature": 0}
        )
        assert refused.status_code == 404
        assert (await client.get("/ready")).status_code == 200


async def test_invalid_utf8_never_reaches_the_edge(default_model_path: Path) -> None:
    async with text_chain(default_model_path) as chain:
        good = tokenizer_pb2.TokenizerServiceGenerateRequest(text="ab").SerializeToString()
        bad = good.replace(b"ab", b"\xff\xfe")
        async with grpc.aio.insecure_channel(chain.target) as channel:
            call = channel.unary_stream("/tercet.v1.TokenizerService/Generate")(bad)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_ten_megabytes_are_refused_and_nobody_else_waits(default_model_path: Path) -> None:
    async with text_chain(default_model_path, max_prompt_bytes=8 << 20) as chain:
        async with tercet.AsyncClient(chain.target) as client:
            with pytest.raises(tercet.InvalidArgumentError, match=r"text has 10000000 bytes; the limit is 8388608"):
                async for _ in client.generate("x" * 10_000_000):
                    pass
            assert await client.tokenize("hello")


async def test_a_client_that_leaves_in_prefill_ends_the_work(default_model_path: Path) -> None:
    async with text_chain(default_model_path) as chain:
        chain.runner.faults = replace(chain.runner.faults, delay_s=0.05)
        async with tercet.AsyncClient(chain.target) as client:
            stream = client.generate([5] * 400, temperature=0)
            await until(lambda: any(view.computed for _, view in chain.scheduler.engine.views()), "a chunk")
            stream.cancel()
        await until(lambda: not chain.scheduler.engine.live_requests(), "the request's end")
        assert len(chain.runner.steps) < 400 // 64
        await chain.scheduler.drained()
