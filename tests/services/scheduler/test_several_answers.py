"""Several answers to one prompt: each is what it would be alone, and the request lives and dies as one."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import grpc
import pytest
from chain import CAPACITY, Chain, chain, scheduler
from fake_stack import running_executor, until

from executor.step import SamplingParams, TokenLogprobs
from services import errors
from services.executor.fake import Faults
from services.executor.fake_tokens import expected_hash_tokens
from services.rpc_errors import from_rpc_error
from services.scheduler.core.calls import CoreConfig, Limits
from services.scheduler.core.limits import TenantQuota
from services.scheduler.outbox import Drawn, Outbox, Scored, Whole
from tercet.v1 import common_pb2, scheduler_pb2

if TYPE_CHECKING:
    from tercet.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub as Stub

Message = scheduler_pb2.SchedulerServiceGenerateRequest
PROMPT = [3, 10, 17, 24, 31, 38, 45, 52, 59, 66, 73]
LENGTH = common_pb2.FINISH_REASON_LENGTH


def request(n: int = 4, max_tokens: int | None = 12, name: str | None = None, **sampling: object) -> Message:
    params = common_pb2.SamplingParams(n=n, max_tokens=max_tokens, seed=7, **sampling)  # type: ignore[arg-type]
    return Message(context=common_pb2.RequestContext(request_id=name), prompt_ids=PROMPT, sampling=params)


def expected(choice: int, count: int = 12) -> list[int]:
    sampling = SamplingParams(choice=choice)
    return list(expected_hash_tokens(PROMPT, count, CAPACITY.vocab_size, sampling=sampling))


@dataclass
class Seen:
    accepted: scheduler_pb2.SchedulerAccepted = field(default_factory=scheduler_pb2.SchedulerAccepted)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, scheduler_pb2.SchedulerFinished] = field(default_factory=dict)

    def take(self, event: scheduler_pb2.SchedulerServiceGenerateResponse) -> None:
        match event.WhichOneof("event"):
            case "accepted":
                assert not self.accepted.seed, "Accepted came twice"
                self.accepted = event.accepted
            case "delta":
                assert event.delta.index not in self.finished, "an answer went on after its end"
                self.tokens.setdefault(event.delta.index, []).extend(event.delta.token_ids)
            case "finished":
                assert event.finished.index not in self.finished, "an answer ended twice"
                self.finished[event.finished.index] = event.finished
            case other:
                raise AssertionError(other)


async def collect(stub: "Stub", message: Message) -> Seen:
    seen = Seen()
    async for event in stub.Generate(message, timeout=30):
        seen.take(event)
    return seen


async def refusal(stub: "Stub", message: Message) -> errors.ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub, message)
    return from_rpc_error(caught.value)


@pytest.mark.parametrize(("depth", "blocks"), [(1, 64), (2, 64), (2, 14)])
async def test_each_is_what_it_is_alone_and_the_prompt_is_computed_once(depth: int, blocks: int) -> None:
    """With 14 blocks of 4 they preempt one another."""
    capacity = replace(CAPACITY, total_blocks=blocks)
    core = CoreConfig(steps_in_flight=depth, default_output_estimate=1, watermark=0.0)
    async with chain(capacity=capacity, core=core) as (running, _):
        count = 12 if blocks == 64 else 4 * blocks + 1 - len(PROMPT)
        seen = await collect(running.stub, request(max_tokens=12 if blocks == 64 else None))
        assert seen.accepted.n == 4
        assert seen.tokens == {index: expected(index, count) for index in range(4)}
        assert len({tuple(tokens) for tokens in seen.tokens.values()}) == 4
        assert [seen.finished[index].reason for index in range(4)] == [LENGTH] * 4
        usages = [seen.finished[index].usage for index in range(4)]
        assert [(usage.prompt_tokens, usage.delivered_tokens) for usage in usages] == [(len(PROMPT), count)] * 4
        if blocks == 64:
            assert [usage.cached_tokens for usage in usages] == [0, 8, 8, 8]
            assert running.core.totals().planned_tokens == 11 + 3 * 3 + 4 * (count - 1)
        else:
            assert sum(usage.preemptions for usage in usages) > 0


async def test_the_outcome_is_counted_once_with_the_prompt_counted_once() -> None:
    async with chain() as (running, _):
        await collect(running.stub, request())
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for metric in running.registry.collect()
            for sample in metric.samples
        }
        assert samples["tercet_requests_total", "length"] == 1
        assert samples["tercet_prompt_tokens_total",] == len(PROMPT)
        assert samples["tercet_delivered_tokens_total",] == 4 * 12


async def stop(running: Chain, index: int, kept: int) -> bool:
    message = scheduler_pb2.SchedulerServiceStopRequest(
        context=common_pb2.RequestContext(request_id="one"),
        index=index,
        kept_tokens=kept,
        reason=scheduler_pb2.STOP_REASON_STOP_STRING,
    )
    return (await running.stub.Stop(message)).was_live


async def test_a_stop_ends_one_and_the_others_go_on() -> None:
    async with chain() as (running, fake):
        fake.runner.faults = Faults(delay_s=0.1)
        seen = Seen()
        async for event in running.stub.Generate(request(max_tokens=100, name="one"), timeout=30):
            seen.take(event)
            if len(seen.tokens.get(2, ())) == 5 and 2 not in seen.finished:
                await stop(running, 2, 4)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stop(running, 4, 1)
                refused = from_rpc_error(caught.value)
                assert (refused.field, refused.limit) == ("index", "3")
            if event.HasField("finished") and len(seen.finished) == 1:
                assert not await stop(running, 2, 4)
                listed = await running.stub.ListRequests(scheduler_pb2.SchedulerServiceListRequestsRequest())
                assert [(row.request_id, row.index) for row in listed.requests] == [("one", 0), ("one", 1), ("one", 3)]
                fake.runner.faults = Faults()
        assert seen.finished[2].reason == common_pb2.FINISH_REASON_STOP
        assert seen.finished[2].usage.delivered_tokens == 4
        del seen.tokens[2]
        assert seen.tokens == {index: expected(index, 100) for index in (0, 1, 3)}


async def test_a_client_that_leaves_and_an_abort_end_all() -> None:
    async with chain(core=CoreConfig(prefill_chunk=2)) as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.005)
        for events in (1, 2, 9):
            call = running.stub.Generate(request(max_tokens=60))
            for _ in range(events):
                await call.read()
            call.cancel()
            await running.drained()
        call = running.stub.Generate(request(max_tokens=60, name="one"))
        async for event in call:
            if event.HasField("delta"):
                break
        abort = scheduler_pb2.SchedulerServiceAbortRequest(context=common_pb2.RequestContext(request_id="one"))
        assert (await running.stub.Abort(abort)).was_live
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert from_rpc_error(caught.value).reason == "ABORTED_BY_CALLER"
        assert running.core.sequences() == ()


async def test_one_that_fails_fails_the_request_with_the_usage_of_all() -> None:
    async with chain() as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.005)
        seen, call = Seen(), running.stub.Generate(request(max_tokens=60), timeout=30)

        async def read() -> None:
            async for event in call:
                seen.take(event)
                if len(seen.tokens) == 4:
                    fake.runner.faults = Faults(nan_slots=frozenset({2}))

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read()
        fake.runner.faults = Faults()
        error = from_rpc_error(caught.value)
        assert (type(error), error.reason) == (errors.Internal, "NAN_LOGITS")
        assert error.metadata["prompt_tokens"] == str(len(PROMPT))
        assert int(error.metadata["delivered_tokens"]) >= sum(map(len, seen.tokens.values())) >= 4
        assert not seen.finished


async def test_they_survive_the_loss_of_their_executor_token_for_token() -> None:
    async with running_executor("hash", CAPACITY, eos_token_ids=()) as first:
        first.runner.faults = replace(first.runner.faults, delay_s=0.005)
        async with scheduler(first.target) as running:
            await until(lambda: running.lease.state.reason == "", "the lease")
            task = asyncio.create_task(collect(running.stub, request(max_tokens=30)))
            for at in (6, 40, 80):
                await until(lambda at=at: any(live.output_tokens > at for live in running.engine.live_requests()))
                first.service.evict(errors.Unavailable("gone"))
            seen = await task
            assert seen.tokens == {index: expected(index, 30) for index in range(4)}
            await running.drained()
        assert not first.runner.violations


async def test_queue_and_quotas_count_each_answer() -> None:
    core = CoreConfig(
        max_queued_requests=5,
        max_queued_tokens=44,
        quotas={"a": TenantQuota(concurrency=3), "b": TenantQuota(tokens_per_minute=60)},
    )
    async with chain(capacity=replace(CAPACITY, max_sequences=1), core=core) as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.02)

        async def refused(n: int, tenant: str = "x", max_tokens: int = 12) -> tuple[type, str, str | None]:
            message = request(n, max_tokens)
            message.context.tenant = tenant
            error = await refusal(running.stub, message)
            return type(error), error.reason, error.field

        invalid = errors.InvalidArgument
        assert await refused(6) == (invalid, "INVALID_ARGUMENT", "prompt_ids")  # 66 tokens, the queue's are 44
        assert await refused(4, "a") == (invalid, "INVALID_ARGUMENT", "sampling.n")
        # The prompt once, and what each may draw: 11 + 4 * 12 is one less than 60.
        assert await refused(4, "b", 13) == (invalid, "INVALID_ARGUMENT", "sampling.max_tokens")
        running_one = running.stub.Generate(request(1, 100))
        async for event in running_one:
            if event.HasField("delta"):
                break
        waiting = running.stub.Generate(request(2, 12))
        await waiting.read()
        full = (errors.ResourceExhausted, "QUEUE_FULL")
        assert (await refused(3))[:2] == full
        assert running.core.load().waiting == 2
        waiting.cancel()
        await until(lambda: running.core.load().waiting == 0)
        message = request(3, 12)
        message.context.tenant = "a"
        waiting = running.stub.Generate(message)
        assert (await waiting.read()).accepted.n == 3
        assert (await refused(1, "a"))[:2] == (errors.ResourceExhausted, "QUOTA_EXCEEDED")
        for call in (waiting, running_one):
            call.cancel()


async def test_under_pressure_there_is_one_answer_and_accepted_says_so() -> None:
    async with chain() as (running, _):
        running.core._gate.ladder._level = 2  # how rungs are taken is tested with the core
        running.core._gate.ladder._config = replace(running.core._gate.ladder._config, protects=1)
        seen = await collect(running.stub, request())
        assert seen.accepted.n == 1
        assert scheduler_pb2.DEGRADE_RUNG_SINGLE_ANSWER in seen.accepted.degraded
        assert seen.tokens == {0: expected(0)}
        assert list(seen.finished) == [0]


async def test_a_limit_that_passes_before_any_token_ends_all_and_later_one_alone() -> None:
    capacity = replace(CAPACITY, max_sequences=2)
    limits = Limits(queue_ns=150_000_000)
    async with chain(capacity=capacity, limits=limits) as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.02)
        seen = await collect(running.stub, request(3, 20))
        assert [seen.finished[index].reason for index in range(3)] == [
            LENGTH,
            LENGTH,
            common_pb2.FINISH_REASON_TIME_LIMIT,
        ]
        assert seen.finished[2].limit == common_pb2.TIME_LIMIT_KIND_QUEUE
        assert seen.tokens == {0: expected(0, 20), 1: expected(1, 20)}
        busy = asyncio.create_task(collect(running.stub, request(2, 60)))
        await until(lambda: running.core.load().lanes[running.lease.lane].running == 2)
        error = await refusal(running.stub, request(3, 20))
        assert (type(error), error.metadata["limit_kind"]) == (errors.DeadlineExceeded, "queue")
        await busy


# Going on elsewhere


def resumed(running: Chain, outputs: Sequence[list[int]], told: Sequence[int] = (), count: int = 12) -> Message:
    assert running.engine.model is not None
    message = request(len(outputs), count)
    message.context.attempt = 2
    resume = common_pb2.Resume(
        prompt_ids=PROMPT, output_ids=outputs[0], numerics=running.engine.model.numerics, finished=0 in told
    )
    for index, output in enumerate(outputs[1:], 1):
        resume.others.add(output_ids=output, finished=index in told)
    message.resume.CopyFrom(resume)
    return message


async def test_each_goes_on_from_where_it_was() -> None:
    async with chain() as (running, _):
        cuts = [3, 0, 12, 7, 11]
        outputs = [expected(index)[:cut] for index, cut in enumerate(cuts)]
        seen = await collect(running.stub, resumed(running, outputs))
        assert seen.accepted.n == 5
        got = {index: outputs[index] + seen.tokens.get(index, []) for index in range(5)}
        assert got == {index: expected(index) for index in range(5)}
        assert [seen.finished[index].usage.delivered_tokens for index in range(5)] == [12] * 5
        told = await collect(running.stub, resumed(running, outputs, told=(0, 2)))
        assert sorted(told.finished) == [1, 3, 4]
        assert told.tokens == {index: expected(index)[cuts[index] :] for index in (1, 3, 4)}


async def test_a_resume_has_to_tell_of_each() -> None:
    async with chain() as (running, _):
        short = resumed(running, [[], []])
        short.sampling.n = 3
        assert (await refusal(running.stub, short)).field == "resume.others"
        assert (await refusal(running.stub, resumed(running, [[1], [1]], told=(0, 1)))).field == "resume.finished"
        wild = resumed(running, [[1], [1, CAPACITY.vocab_size]])
        assert (await refusal(running.stub, wild)).field == "resume.others[0].output_ids"


# What waits for the reader


def test_a_reader_who_falls_behind_gets_each_answers_tokens_in_order() -> None:
    outbox = Outbox(6, 100)
    row = TokenLogprobs(-1.0, ())
    outbox.put(Scored(0, (row,)), 0)
    for at in range(8):
        for index in range(3):
            outbox.put(Drawn((10 * index + at,), (row,), index), at)
    outbox.end(Whole.WHOLE)
    assert outbox.overdue(102)
    got: dict[int, list[int]] = {}
    count = 0
    assert isinstance(outbox.take(), Scored)
    while isinstance(event := outbox.take(), Drawn):
        assert len(event.logprobs) == len(event.token_ids)
        got.setdefault(event.index, []).extend(event.token_ids)
        count += 1
    assert event is outbox.take() is Whole.WHOLE
    assert got == {index: [10 * index + at for at in range(8)] for index in range(3)}
    assert count == 6
    assert not outbox.overdue(10_000)


def test_scored_rows_that_came_before_are_left_out() -> None:
    rows = tuple(TokenLogprobs(-float(at), ()) for at in range(5))
    assert Scored(3, rows).behind(3) == Scored(3, rows)
    assert Scored(3, rows).behind(5) == Scored(5, rows[2:])
    assert Scored(3, rows).behind(9).logprobs == ()


async def test_many_answers_of_many_priorities_in_a_tight_pool_leave_nothing_when_one_request_goes() -> None:
    capacity = replace(CAPACITY, total_blocks=20, max_sequences=8)
    core = CoreConfig(policy="priority", default_output_estimate=1, watermark=0.0)
    async with chain(capacity=capacity, core=core) as (running, _):

        def asked(name: str, priority: int) -> Message:
            message = request(16, 12, name)
            message.context.priority = priority
            return message

        others = [asyncio.create_task(collect(running.stub, asked(f"stays-{at}", at))) for at in (-1, 0, 1)]
        await until(lambda: running.core.load().waiting > 0, "all slots are taken by others")
        leaving = running.stub.Generate(asked("leaves", 2))
        deltas = 0
        while deltas < 3:
            deltas += (await leaving.read()).HasField("delta")
        leaving.cancel()
        for seen in await asyncio.gather(*others):
            assert seen.tokens == {index: expected(index) for index in range(16)}
            assert [one.reason for one in seen.finished.values()] == [LENGTH] * 16
        assert running.core.totals().preemptions > 0
