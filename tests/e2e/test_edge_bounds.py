"""What one edge takes: so many requests, and no client that never reads."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import httpx
import pytest
from chain import CAPACITY, Chain, scheduler
from fake_stack import running_executor, until
from opentelemetry.trace import NoOpTracer
from prometheus_client import CollectorRegistry
from resumable import RunningEdge, running_edge
from tiny_tokenizer import tiny_model

import tercet
from services.address import parse_address
from services.config import HttpLimits
from services.executor.fake import FakeRunner
from services.gateway.app import make_app
from services.gateway.server import serve
from services.rpc import make_channel
from tercet.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc

MODEL = tiny_model()
LONG = replace(CAPACITY, vocab_size=MODEL.vocab_size, max_model_len=4096, total_blocks=4096)
ONCE = tercet.RetryPolicy(attempts=1)
NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))  # so that little fits in between


@dataclass
class Behind:
    edge: RunningEdge
    chain: Chain
    runner: FakeRunner

    def counted(self, name: str, **labels: str) -> float:
        return self.edge.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def edge(*, most: int = 4096, slow_reader_s: float = 30.0) -> AsyncIterator[Behind]:
    runner = FakeRunner("hash", LONG)
    async with (
        running_executor(runner=runner, tokenizer_hash=MODEL.hash, eos_token_ids=(1,)) as fake,
        scheduler(fake.target) as behind,
    ):
        await until(lambda: not behind.lease.state.reason, "the lease")
        async with running_edge(MODEL, behind.target, most=most, slow_reader_s=slow_reader_s) as running:
            yield Behind(running, behind, runner)
        await behind.drained()


async def text_of(target: str, tokens: int) -> str:
    async with tercet.AsyncClient(target, retry=ONCE) as client:
        return await client.generate([5, 6], max_tokens=tokens, temperature=0, ignore_eos=True).text()


async def test_one_request_too_many_is_told_when_to_come_again() -> None:
    async with edge(most=2) as one:
        one.runner.faults = replace(one.runner.faults, delay_s=0.01)
        app = make_app(one.edge.edge, HttpLimits(), tracer=NoOpTracer(), registry=CollectorRegistry())
        http = await serve(app, parse_address("127.0.0.1:0"))
        try:
            busy = [asyncio.ensure_future(text_of(one.edge.target, 300)) for _ in range(2)]
            await until(lambda: len(one.chain.engine.live_requests()) == 2, "the two")
            with pytest.raises(tercet.ResourceExhaustedError) as refused:
                await text_of(one.edge.target, 1)
            assert (refused.value.reason, refused.value.retry_after) == ("EDGE_FULL", 1.0)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{http.port}") as client:
                response = await client.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})
            assert response.status_code == 429
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["code"] == "edge_full"
            await asyncio.gather(*busy)
            assert await text_of(one.edge.target, 1)
        finally:
            await http.close(0)
        assert one.counted("tercet_admission_rejections_total", reason="queue_full") == 2
        assert one.counted("tercet_requests_total", outcome="rejected") == 2
        assert one.counted("tercet_requests_running") == 0


async def test_a_client_that_never_reads_is_given_up_and_nobody_else_is_hurt() -> None:
    async with edge(most=2, slow_reader_s=0.5) as one, make_channel(one.edge.target, extra=NARROW) as channel:
        alone = await text_of(one.edge.target, 1500)
        request = tokenizer_pb2.TokenizerServiceGenerateRequest(
            sampling=common_pb2.SamplingParams(max_tokens=3000, temperature=0, ignore_eos=True, logprobs=20),
            token_ids=tokenizer_pb2.TokenIds(ids=[7, 8]),
        )
        call = tokenizer_pb2_grpc.TokenizerServiceStub(channel).Generate(request)
        await until(lambda: len(one.chain.engine.live_requests()) == 1, "the request")
        assert await text_of(one.edge.target, 1500) == alone
        await until(lambda: not one.chain.engine.live_requests(), "its end")
        await one.edge.edge.drained(5)
        assert one.counted("tercet_requests_total", outcome="slow_reader") == 1
        assert one.counted("tercet_requests_running") == 0
        # Its place is free.
        assert await asyncio.gather(*(text_of(one.edge.target, 1500) for _ in range(2))) == [alone] * 2
        # Who reads at last gets what was sent, and learns why it ends.
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async for _ in call:
                pass
        assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_client_that_reads_slowly_is_served_to_the_end() -> None:
    async with edge(slow_reader_s=0.5) as one, make_channel(one.edge.target, extra=NARROW) as channel:
        request = tokenizer_pb2.TokenizerServiceGenerateRequest(
            sampling=common_pb2.SamplingParams(max_tokens=400, temperature=0, ignore_eos=True, logprobs=20),
            token_ids=tokenizer_pb2.TokenIds(ids=[7, 8]),
        )
        tokens = 0
        async for event in tokenizer_pb2_grpc.TokenizerServiceStub(channel).Generate(request):
            tokens += len(event.delta.token_ids)
            if tokens % 40 == 0:
                await asyncio.sleep(0.1)
        assert tokens == 400
