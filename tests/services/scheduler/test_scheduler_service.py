"""The scheduler's service over a real socket, on the fake executor: streams, endings, refusals, losses."""

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import grpc
import pytest
from chain import CAPACITY, chain, scheduler
from fake_stack import running_executor, until

from services.errors import Unavailable
from services.executor.fake_tokens import expected_hash_tokens
from services.rpc_errors import from_rpc_error
from services.scheduler.core.calls import CoreConfig, Limits
from tercet.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc

SECOND = 1_000_000_000
if TYPE_CHECKING:
    Stub = scheduler_pb2_grpc.SchedulerServiceAsyncStub


def request(
    prompt: list[int], max_tokens: int | None = 8, request_id: str | None = None, **sampling: object
) -> scheduler_pb2.SchedulerServiceGenerateRequest:
    return scheduler_pb2.SchedulerServiceGenerateRequest(
        context=common_pb2.RequestContext(request_id=request_id),
        prompt_ids=prompt,
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling),  # type: ignore[arg-type]
    )


@dataclass(frozen=True)
class Reply:
    accepted: scheduler_pb2.SchedulerAccepted
    tokens: list[int]
    finished: scheduler_pb2.SchedulerFinished


async def collect(stub: "Stub", message: scheduler_pb2.SchedulerServiceGenerateRequest, **options: object) -> Reply:
    events = [event async for event in stub.Generate(message, **options)]  # type: ignore[arg-type]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "accepted"
    assert kinds[-1] == "finished"
    assert kinds.count("accepted") == kinds.count("finished") == 1
    tokens = [token for event in events[1:-1] for token in event.delta.token_ids]
    return Reply(events[0].accepted, tokens, events[-1].finished)


async def refusal(stub: "Stub", message: scheduler_pb2.SchedulerServiceGenerateRequest, **options: object) -> object:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub, message, **options)
    return from_rpc_error(caught.value)


def expected(prompt: list[int], count: int) -> list[int]:
    return list(expected_hash_tokens(prompt, count, CAPACITY.vocab_size))


def prompt_of(length: int, first: int = 3) -> list[int]:
    return [(first + 7 * index) % CAPACITY.vocab_size for index in range(length)]


async def test_tokens_are_the_executors_and_usage_adds_up() -> None:
    async with chain() as (running, _):
        prompt = prompt_of(11)
        reply = await collect(running.stub, request(prompt, 20))
        assert reply.tokens == expected(prompt, 20)
        assert reply.finished.reason == common_pb2.FINISH_REASON_LENGTH
        usage = reply.finished.usage
        assert (usage.prompt_tokens, usage.delivered_tokens) == (11, 20)
        assert usage.sampled_tokens == usage.delivered_tokens + usage.discarded_tokens
        assert reply.accepted.max_tokens == 20
        assert reply.finished.times.total_ns >= reply.finished.times.first_token_ns > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("blocks", [20, 64])
async def test_many_at_once_in_a_small_pool_get_what_each_gets_alone(depth: int, blocks: int) -> None:
    capacity = replace(CAPACITY, total_blocks=blocks, max_model_len=64)
    core = CoreConfig(steps_in_flight=depth, prefill_chunk=5, default_output_estimate=1)
    async with chain(capacity=capacity, core=core) as (running, _):
        prompts = [prompt_of(5 + 3 * index, index) for index in range(10)]
        replies = await asyncio.gather(*(collect(running.stub, request(prompt, None)) for prompt in prompts))
        for prompt, reply in zip(prompts, replies, strict=True):
            assert reply.tokens == expected(prompt, 64 - len(prompt))
            assert reply.finished.reason == common_pb2.FINISH_REASON_LENGTH
        assert sum(reply.finished.usage.preemptions for reply in replies) > 0


async def test_a_stop_id_ends_the_answer_and_counts_as_delivered() -> None:
    async with chain("positions") as (running, _):
        reply = await collect(running.stub, request(prompt_of(6), 12, stop_token_ids=[9]))
        assert reply.tokens == [5, 6, 7, 8, 9]
        assert reply.finished.reason == common_pb2.FINISH_REASON_STOP
        assert reply.finished.usage.delivered_tokens == 5
        assert reply.finished.usage.sampled_tokens <= 6


async def test_stop_ends_with_the_usage_that_the_edge_named() -> None:
    async with chain() as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.01)
        call = running.stub.Generate(request(prompt_of(6), 100, "one"))
        seen = 0
        stopped = False
        finished = None
        async for event in call:
            seen += len(event.delta.token_ids)
            if seen >= 5 and not stopped:
                stopped = True
                answer = await running.stub.Stop(
                    scheduler_pb2.SchedulerServiceStopRequest(
                        context=common_pb2.RequestContext(request_id="one"),
                        kept_tokens=4,
                        reason=scheduler_pb2.STOP_REASON_STOP_STRING,
                    )
                )
                assert answer.was_live
            if event.HasField("finished"):
                finished = event.finished
        assert finished is not None
        assert finished.reason == common_pb2.FINISH_REASON_STOP
        assert finished.usage.delivered_tokens == 4
        assert finished.usage.sampled_tokens < 20


async def test_refusals_name_the_field_and_the_limit() -> None:
    async with chain() as (running, _):
        cases = {
            "prompt_ids": [request([]), request([1000]), request(prompt_of(128))],
            "sampling.max_tokens": [request([1], 0), request([1], 128)],
        }
        for field, messages in cases.items():
            for message in messages:
                error = await refusal(running.stub, message)
                assert type(error).__name__ == "InvalidArgument"
                assert error.field == field  # type: ignore[attr-defined]
        for value in (float("nan"), float("inf"), -1.0):
            message = request([1], 1)
            message.sampling.temperature = value
            assert (await refusal(running.stub, message)).field == "sampling.temperature"  # type: ignore[attr-defined]
        message = request([1], 1)
        message.sampling.top_p = 0.0
        assert (await refusal(running.stub, message)).field == "sampling.top_p"  # type: ignore[attr-defined]


async def test_what_is_not_served_is_refused_by_name() -> None:
    async with chain(capabilities=()) as (running, _):
        grammar = request([1], 1)
        grammar.sampling.grammar.kind = common_pb2.GRAMMAR_KIND_JSON_OBJECT
        prompt_logprobs = request([1], 1, prompt_logprobs=1)
        for message, field in (
            (grammar, "sampling.grammar"),
            (prompt_logprobs, "sampling.prompt_logprobs"),
        ):
            error = await refusal(running.stub, message)
            assert type(error).__name__ == "Unimplemented"
            assert error.field == field  # type: ignore[attr-defined]


async def test_a_client_that_leaves_frees_everything_in_every_phase() -> None:
    capacity = replace(CAPACITY, max_sequences=1)
    async with chain(capacity=capacity) as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.02)
        decoding = running.stub.Generate(request(prompt_of(6), 100))
        async for event in decoding:
            if event.HasField("delta"):
                break
        queued = running.stub.Generate(request(prompt_of(6), 100))
        assert (await queued.read()).HasField("accepted")
        assert len(running.engine.live_requests()) == 2
        queued.cancel()
        await until(lambda: len(running.engine.live_requests()) == 1)
        decoding.cancel()
        await running.drained()


async def test_the_deadline_of_a_queued_request_costs_no_prefill() -> None:
    capacity = replace(CAPACITY, max_sequences=1)
    async with chain(capacity=capacity, limits=Limits(queue_ns=SECOND // 10)) as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.02)
        first = running.stub.Generate(request(prompt_of(6), 100))
        async for event in first:
            if event.HasField("delta"):
                break
        error = await refusal(running.stub, request(prompt_of(9, 500), 10))
        assert type(error).__name__ == "DeadlineExceeded"
        assert error.metadata["limit_kind"] == "queue"  # type: ignore[attr-defined]
        first.cancel()


async def test_a_total_limit_after_the_first_token_ends_with_what_there_is() -> None:
    async with chain() as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.02)
        message = request(prompt_of(6), 100)
        message.limits.total_ns = SECOND // 2
        reply = await collect(running.stub, message)
        assert reply.finished.reason == common_pb2.FINISH_REASON_TIME_LIMIT
        assert reply.finished.limit == common_pb2.TIME_LIMIT_KIND_TOTAL
        assert 0 < len(reply.tokens) < 100


async def test_the_calls_own_deadline_counts_and_the_answer_still_arrives() -> None:
    async with chain() as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.02)
        reply = await collect(running.stub, request(prompt_of(6), 100), timeout=0.6)
        assert reply.finished.reason == common_pb2.FINISH_REASON_TIME_LIMIT


async def test_a_full_queue_refuses_with_the_time_to_wait() -> None:
    capacity = replace(CAPACITY, max_sequences=1)
    core = CoreConfig(max_queued_requests=1)
    async with chain(capacity=capacity, core=core) as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.02)
        first = running.stub.Generate(request(prompt_of(6), 100))
        async for event in first:
            if event.HasField("delta"):
                break
        second = running.stub.Generate(request(prompt_of(6), 100))
        assert (await second.read()).HasField("accepted")
        error = await refusal(running.stub, request(prompt_of(6), 1))
        assert type(error).__name__ == "ResourceExhausted"
        assert error.retry_after_s > 0  # type: ignore[attr-defined]
        first.cancel()
        second.cancel()


async def test_a_live_id_is_refused_and_superseded_by_a_higher_attempt() -> None:
    async with chain() as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.02)
        first = aiter(running.stub.Generate(request(prompt_of(6), 100, "same")))
        assert (await anext(first)).HasField("accepted")
        error = await refusal(running.stub, request(prompt_of(6), 1, "same"))
        assert type(error).__name__ == "AlreadyExists"
        again = request(prompt_of(6), 3, "same")
        again.context.attempt = 2
        reply = await collect(running.stub, again)
        assert len(reply.tokens) == 3
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in first:
                pass
        assert caught.value.code() is grpc.StatusCode.ABORTED


async def test_abort_ends_a_request_and_may_overtake_it() -> None:
    async with chain() as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.02)
        call = aiter(running.stub.Generate(request(prompt_of(6), 100, "one")))
        assert (await anext(call)).HasField("accepted")
        message = scheduler_pb2.SchedulerServiceAbortRequest(context=common_pb2.RequestContext(request_id="one"))
        assert (await running.stub.Abort(message)).was_live
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        early = scheduler_pb2.SchedulerServiceAbortRequest(context=common_pb2.RequestContext(request_id="two"))
        assert not (await running.stub.Abort(early)).was_live
        assert type(await refusal(running.stub, request(prompt_of(6), 1, "two"))).__name__ == "Cancelled"


async def test_a_row_that_fails_fails_alone() -> None:
    async with chain() as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.005)
        healthy = asyncio.create_task(collect(running.stub, request(prompt_of(6), 30)))
        await until(lambda: any(live.output_tokens for live in running.engine.live_requests()))
        call = running.stub.Generate(request(prompt_of(9, 300), 100, "sick"))
        async for event in call:
            if event.HasField("delta"):
                break
        fake.runner.faults = replace(fake.runner.faults, nan_slots=frozenset({1}))  # the second to be admitted
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        fake.runner.faults = replace(fake.runner.faults, nan_slots=frozenset())
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert len((await healthy).tokens) == 30


async def test_no_executor_is_told_at_once_and_work_goes_on_when_one_returns() -> None:
    prompt = prompt_of(6)
    async with running_executor("hash", CAPACITY, eos_token_ids=()) as placeholder:
        target = placeholder.target
    async with scheduler(target) as running:
        error = await refusal(running.stub, request(prompt, 5))
        assert type(error).__name__ == "Unavailable"
        async with running_executor("hash", CAPACITY, listen=target, eos_token_ids=()):
            await until(lambda: running.lease.state.reason == "", "the lease")
            reply = await collect(running.stub, request(prompt, 5))
            assert reply.tokens == expected(prompt, 5)


async def test_a_stream_survives_the_loss_of_its_executor_token_for_token() -> None:
    prompt = prompt_of(9)
    async with running_executor("hash", CAPACITY, eos_token_ids=()) as first:
        first.runner.faults = replace(first.runner.faults, delay_s=0.01)
        target = first.target
        async with scheduler(target) as running:
            await until(lambda: running.lease.state.reason == "", "the lease")
            task = asyncio.create_task(collect(running.stub, request(prompt, 60)))
            await until(lambda: any(live.output_tokens > 5 for live in running.engine.live_requests()))
            first.service.evict(Unavailable("gone"))
            await until(lambda: running.lease.state.epoch > 1 and running.lease.state.reason == "", "a new lease")
            reply = await task
            assert reply.tokens == expected(prompt, 60)
            assert reply.finished.usage.recomputed_tokens > 0
            await running.drained()


async def test_load_list_and_describe_tell_what_is_there() -> None:
    async with chain() as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.02)
        call = running.stub.Generate(request(prompt_of(6), 100, "one"))
        async for event in call:
            if event.HasField("delta"):
                break
        load = await running.stub.GetLoad(scheduler_pb2.SchedulerServiceGetLoadRequest())
        assert load.running_requests == 1
        assert load.lanes[0].total_blocks == CAPACITY.total_blocks
        listed = await running.stub.ListRequests(scheduler_pb2.SchedulerServiceListRequestsRequest())
        assert [row.request_id for row in listed.requests] == ["one"]
        assert listed.requests[0].state == scheduler_pb2.REQUEST_STATE_DECODE
        described = await running.stub.Describe(scheduler_pb2.SchedulerServiceDescribeRequest())
        assert described.model.vocab_size == CAPACITY.vocab_size
        call.cancel()


async def test_drain_refuses_new_work_and_finishes_the_old() -> None:
    async with chain() as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.01)
        old = asyncio.create_task(collect(running.stub, request(prompt_of(6), 30)))
        await until(lambda: len(running.engine.live_requests()) == 1)
        draining = running.stub.Drain(scheduler_pb2.SchedulerServiceDrainRequest())
        await until(lambda: running.engine.draining)
        assert type(await refusal(running.stub, request(prompt_of(6), 1))).__name__ == "Unavailable"
        assert len((await old).tokens) == 30
        assert (await draining).cancelled_requests == 0
