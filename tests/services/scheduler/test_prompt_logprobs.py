"""Logprobs of a prompt through the scheduler: all of them once and in order, before any token, whatever happens."""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import pytest
from chain import CAPACITY, Chain, chain, scheduler
from fake_stack import running_executor, until

from services import errors
from services.executor.fake import At, FakeRunner, Faults
from services.executor.fake_tokens import expected_hash_tokens, fake_prompt_logprobs
from services.rpc_errors import from_rpc_error
from services.scheduler.core.calls import CoreConfig
from services.wire import logprobs_from_proto
from tercet.v1 import common_pb2, scheduler_pb2

if TYPE_CHECKING:
    from tercet.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub as Stub

Message = scheduler_pb2.SchedulerServiceGenerateRequest
PROMPT = [(5 + 11 * index) % CAPACITY.vocab_size for index in range(37)]
ROWS = [fake_prompt_logprobs(PROMPT[:at], PROMPT[at], 3) for at in range(1, len(PROMPT))]


def request(n: int = 1, max_tokens: int = 6, top: int = 3, prompt: list[int] = PROMPT) -> Message:
    sampling = common_pb2.SamplingParams(n=n, max_tokens=max_tokens, seed=7, prompt_logprobs=top)
    return Message(prompt_ids=prompt, sampling=sampling)


async def collect(stub: "Stub", message: Message) -> tuple[list[object], dict[int, list[int]], common_pb2.Usage]:
    """Rows, tokens by answer, and answer 0's usage."""
    rows: list[object] = []
    tokens: dict[int, list[int]] = {}
    usage = common_pb2.Usage()
    async for event in stub.Generate(message, timeout=30):
        match event.WhichOneof("event"):
            case "prompt_logprobs":
                assert not tokens, "behind a token"
                assert 1 <= len(event.prompt_logprobs.logprobs) <= 512
                rows += [logprobs_from_proto(row) for row in event.prompt_logprobs.logprobs]
            case "delta":
                tokens.setdefault(event.delta.index, []).extend(event.delta.token_ids)
            case "finished" if event.finished.index == 0:
                usage = event.finished.usage
    return rows, tokens, usage


def expected(count: int, prompt: list[int] = PROMPT) -> list[int]:
    return list(expected_hash_tokens(prompt, count, CAPACITY.vocab_size))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [1, 5, 256])
async def test_all_come_once_and_in_order_and_nothing_is_taken_from_the_cache(chunk: int, depth: int) -> None:
    async with chain(core=CoreConfig(prefill_chunk=chunk, steps_in_flight=depth)) as (running, _):
        neighbour = asyncio.create_task(collect(running.stub, request(prompt=PROMPT[::-1])))
        for _ in range(2):
            rows, tokens, usage = await collect(running.stub, request())
            assert rows == ROWS
            assert tokens == {0: expected(6)}
            assert usage.cached_tokens == 0
        rows, _, _ = await neighbour
        assert len(rows) == len(PROMPT) - 1
        plain = request()
        plain.sampling.ClearField("prompt_logprobs")
        rows, _, usage = await collect(running.stub, plain)
        assert (rows, usage.cached_tokens) == ([], 36)


async def test_of_several_answers_one_computes_them_and_they_come_once() -> None:
    async with chain() as (running, fake):
        rows, tokens, _ = await collect(running.stub, request(4))
        assert rows == ROWS
        assert sorted(tokens) == [0, 1, 2, 3]
        asked = [piece.new for step in fake.runner.steps for piece in step.slices if piece.new is not None]
        assert [new.sampling.prompt_logprobs for new in asked] == [3, None, None, None]


async def test_a_prompt_of_one_token_has_none() -> None:
    async with chain() as (running, _):
        rows, tokens, _ = await collect(running.stub, request(prompt=[5]))
        assert (rows, tokens) == ([], {0: expected(6, [5])})


async def test_a_lost_executor_makes_none_come_twice() -> None:
    capacity = replace(CAPACITY, max_batched_tokens=4)
    async with running_executor("hash", capacity, eos_token_ids=()) as fake:
        fake.runner.faults = Faults(delay_s=0.02)
        async with scheduler(fake.target) as running:
            await until(lambda: running.lease.state.reason == "", "the lease")
            task = asyncio.create_task(collect(running.stub, request(max_tokens=20)))
            for at in (8, 20, 36):
                await until(lambda at=at: any(live.scored >= at for live in running.engine.live_requests()))
                fake.service.evict(errors.Unavailable("gone"))
                await until(lambda: not running.lease.state.epoch or running.lease.state.reason != "")
            rows, tokens, _ = await task
            assert rows == ROWS
            assert tokens == {0: expected(20)}
            await running.drained()
        assert fake.runner.resets == 4


async def test_preemption_makes_none_come_twice() -> None:
    """Two in a pool that holds both prompts and not both answers: the younger computes its prompt again."""
    capacity = replace(CAPACITY, total_blocks=22)
    core = CoreConfig(prefill_chunk=4, default_output_estimate=1, watermark=0.0)
    async with chain(capacity=capacity, core=core) as (running, _):
        first, second = request(), request(prompt=PROMPT[::-1])
        for message in (first, second):
            message.sampling.ClearField("max_tokens")
        (rows, tokens, _), (others, _, _) = await asyncio.gather(
            collect(running.stub, first), collect(running.stub, second)
        )
        assert rows == ROWS
        assert len(others) == len(PROMPT) - 1
        assert tokens == {0: expected(4 * 22 + 1 - len(PROMPT))}
        assert running.core.totals().preemptions > 0


async def test_a_prompt_that_fails_in_its_middle_fails_its_request() -> None:
    runner = FakeRunner("hash", CAPACITY, faults=Faults(nan_slots=frozenset({0}), nan_at=At(count=2)))
    async with chain(runner=runner, core=CoreConfig(prefill_chunk=8)) as (running, _):
        both = asyncio.create_task(collect(running.stub, request(prompt=PROMPT[::-1])))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await both
        error = from_rpc_error(caught.value)
        assert (type(error), error.reason) == (errors.Internal, "NAN_LOGITS")
        assert error.metadata["prompt_tokens"] == str(len(PROMPT))


async def test_an_executor_that_gives_none_is_asked_for_none() -> None:
    async def refused(running: Chain) -> errors.ServiceError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(running.stub, request())
        return from_rpc_error(caught.value)

    async with chain(capabilities=()) as (running, _):
        error = await refused(running)
        assert (type(error), error.field) == (errors.Unimplemented, "sampling.prompt_logprobs")
    async with chain() as (running, _):
        over = request(top=21)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(running.stub, over)
        assert from_rpc_error(caught.value).field == "sampling.prompt_logprobs"
