"""The text edge at wrong moments: a scheduler that dies, freezes, drains or changes its model; refusals that count."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from chain import TextChain, text_chain
from fake_stack import until
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import tercet
from services.errors import Internal, Unavailable
from services.rpc import make_channel
from services.tokenizer import chain as chain_module
from services.tokenizer.chain import NOT_READY, Chain, ChainState
from tercet.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc

pytestmark = pytest.mark.model

ONCE = tercet.RetryPolicy(attempts=1)
WORDS = "one two three four five six seven eight nine ten"


def counted(chain: TextChain, name: str) -> dict[str, float]:
    """The series of a metric by their one label; "" where there is none."""
    return {
        next(iter(sample.labels.values()), ""): sample.value
        for family in chain.registry.collect()
        for sample in family.samples
        if sample.name == name and sample.value
    }


async def text_of(target: str, **options: object) -> tuple[str, tercet.AsyncStream]:
    async with tercet.AsyncClient(target, retry=ONCE) as client:
        stream = client.generate("hello", **{"temperature": 0, **options})  # type: ignore[arg-type]
        async with stream:
            return "".join([delta.text async for delta in stream]), stream


async def test_every_request_that_comes_is_counted_once_also_those_refused(default_model_path: Path) -> None:
    async with text_chain(default_model_path, WORDS, max_prompt_bytes=1000) as chain:
        await text_of(chain.target)
        with pytest.raises(tercet.InvalidArgumentError):
            await text_of(chain.target, max_tokens=0)
        with pytest.raises(tercet.NotFoundError):
            await text_of(chain.target, model="another")
        async with make_channel(chain.target) as channel:
            request = tokenizer_pb2.TokenizerServiceGenerateRequest(
                context=common_pb2.RequestContext(tenant="one"), text="hello"
            )
            call = tokenizer_pb2_grpc.TokenizerServiceStub(channel).Generate(
                request, metadata=(("tercet-tenant", "other"),)
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        async with tercet.AsyncClient(chain.target, retry=ONCE) as client:
            with pytest.raises(tercet.InvalidArgumentError, match="token_ids has"):
                async for _ in client.generate([5] * 2000):
                    pass
            with pytest.raises(tercet.InvalidArgumentError, match="token_ids has"):
                await client.detokenize([5] * 2000)
        chain.edge.drain()
        with pytest.raises(tercet.UnavailableError):
            await text_of(chain.target)
        outcomes = counted(chain, "tercet_requests_total")
        assert outcomes == {"stop": 1, "rejected": 4, "unavailable": 1}
        assert counted(chain, "tercet_requests_received_total") == {"": 6}
        assert counted(chain, "tercet_requests_running") == {}
        assert counted(chain, "tercet_prompt_bytes_sum") == {"": 10}
        assert counted(chain, "tercet_detokenize_seconds_count") == {"": 1}


async def test_a_stop_that_the_scheduler_does_not_take_costs_time_and_not_the_answer(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with text_chain(default_model_path, WORDS) as chain:

        def fail(*_: object) -> bool:
            raise Internal("a defect")

        monkeypatch.setattr(chain.scheduler.engine, "stop", fail)
        text, stream = await text_of(chain.target, stop="three")
        assert text == "one two "
        assert stream.finish_reason is tercet.FinishReason.STOP
        assert stream.usage is not None
        assert stream.usage.sampled_tokens == stream.usage.delivered_tokens + stream.usage.discarded_tokens
        assert stream.usage.discarded_tokens > 0


async def test_the_call_that_stops_the_scheduler_is_part_of_the_requests_trace(default_model_path: Path) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with text_chain(default_model_path, WORDS * 5, tracer=provider.get_tracer("test")) as chain:
        chain.runner.faults = replace(chain.runner.faults, delay_s=0.01)
        await text_of(chain.target, stop="three")
    stops = [span for span in exporter.get_finished_spans() if span.name.endswith("/Stop")]
    edges = [span for span in exporter.get_finished_spans() if span.name.endswith("TokenizerService/Generate")]
    assert stops
    assert {span.context.trace_id for span in stops} == {span.context.trace_id for span in edges}


async def test_a_callers_deadline_leaves_time_for_the_answer_over_both_hops(default_model_path: Path) -> None:
    async with text_chain(default_model_path, WORDS * 20, ends=False) as chain:
        chain.runner.faults = replace(chain.runner.faults, delay_s=0.02)
        _, stream = await text_of(chain.target, max_tokens=300, timeout=1.0)
        assert stream.finish_reason is tercet.FinishReason.TIME_LIMIT
        assert stream.timings is not None
        assert stream.timings.total < 0.95


async def test_a_prompt_encoded_for_another_model_is_not_served(default_model_path: Path) -> None:
    async with text_chain(default_model_path, WORDS) as chain:
        chain.watch.state = replace(chain.watch.state, numerics="of yesterday")
        with pytest.raises(tercet.UnavailableError, match="changed"):
            await text_of(chain.target)
        chain.watch.state = await chain.watch.look()
        assert (await text_of(chain.target))[0] == WORDS


async def test_what_is_left_at_the_end_of_a_drain_ends_as_unavailable(default_model_path: Path) -> None:
    async with text_chain(default_model_path, WORDS * 20, ends=False) as chain:
        chain.runner.faults = replace(chain.runner.faults, delay_s=0.02)
        task = asyncio.create_task(text_of(chain.target, max_tokens=300))
        await until(lambda: any(live.output_tokens > 5 for live in chain.scheduler.engine.live_requests()))
        await chain.edge.cut()
        with pytest.raises(tercet.UnavailableError, match="drained"):
            await task
        assert counted(chain, "tercet_requests_total") == {"unavailable": 1}


async def test_an_executor_that_is_lost_for_now_leaves_the_decision_to_the_scheduler(default_model_path: Path) -> None:
    async with text_chain(default_model_path, WORDS) as chain:
        known = chain.watch.state
        lost = Unavailable("the executor is lost", reason=NOT_READY)
        chain.watch.state = replace(known, problem=lost)
        assert (await text_of(chain.target))[0] == WORDS
        chain.watch.state = ChainState(lost)
        with pytest.raises(tercet.UnavailableError, match="lost"):
            await text_of(chain.target)


async def test_watching_the_chain_outlives_a_defect(default_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_module, "POLL_S", 0.01)
    async with text_chain(default_model_path, WORDS) as chain:
        looks: list[int] = []
        look = Chain.look

        async def failing(self: Chain) -> ChainState:
            looks.append(1)
            if len(looks) == 1:
                raise KeyError("a defect")
            return await look(self)

        monkeypatch.setattr(Chain, "look", failing)
        watching = asyncio.create_task(chain.watch.watch())
        await until(lambda: len(looks) > 2, "another look")
        assert chain.watch.state.problem is None
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a_slow_request_is_told_with_its_surroundings(
    default_model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with text_chain(default_model_path, WORDS) as chain:
        chain.edge._report._slow_request_s = 0.0
        with caplog.at_level(logging.INFO):
            await text_of(chain.target)
        slow = [record for record in caplog.records if record.message == "slow request"]
        assert len(slow) == 1
        assert slow[0].__dict__["running"] == 1
        assert slow[0].__dict__["rss_bytes"] > 0
