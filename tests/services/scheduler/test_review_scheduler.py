"""The scheduler's shell at wrong moments: refusals that must count, attempts that cross, executors that come back as
others, requests that take their executor with them."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import pytest
from chain import CAPACITY, Chain, chain, scheduler
from fake_stack import running_executor, until
from opentelemetry.trace import NoOpTracer
from step_stream import owner_of

from services.errors import ServiceError
from services.executor.fake import At
from services.executor.fake_tokens import expected_hash_tokens
from services.health import check
from services.rpc import make_channel
from services.rpc_errors import from_rpc_error
from services.scheduler import __main__ as process
from services.scheduler import lease
from services.scheduler.core.calls import CoreConfig
from services.scheduler.engine import Engine, EngineConfig
from services.scheduler.grammars import Grammars
from services.scheduler.tombstones import KEPT_NS, MOST, Tombstones
from tercet.v1 import common_pb2, scheduler_pb2

if TYPE_CHECKING:
    from tercet.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub as Stub

Message = scheduler_pb2.SchedulerServiceGenerateRequest
PROMPT = [3, 10, 17, 24, 31, 38]


def request(prompt: list[int], max_tokens: int, name: str | None = None, attempt: int | None = None) -> Message:
    return scheduler_pb2.SchedulerServiceGenerateRequest(
        context=common_pb2.RequestContext(request_id=name, attempt=attempt),
        prompt_ids=prompt,
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0),
    )


async def tokens_of(stub: "Stub", message: Message, **options: object) -> list[int]:
    tokens: list[int] = []
    async for event in stub.Generate(message, **options):  # type: ignore[arg-type]
        tokens += event.delta.token_ids
    return tokens


async def refusal(stub: "Stub", message: Message, **options: object) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await tokens_of(stub, message, **options)
    return from_rpc_error(caught.value)


def expected(count: int) -> list[int]:
    return list(expected_hash_tokens(PROMPT, count, CAPACITY.vocab_size))


def counted(running: Chain, name: str) -> dict[str, float]:
    """The series of a metric by their one label; "" where there is none."""
    return {
        next(iter(sample.labels.values()), ""): sample.value
        for family in running.registry.collect()
        for sample in family.samples
        if sample.name == name and sample.value
    }


async def test_every_request_that_comes_is_counted_once_also_those_refused() -> None:
    capacity = replace(CAPACITY, max_sequences=1)
    core = CoreConfig(max_queued_requests=2, max_queued_tokens=30)
    async with chain(capacity=capacity, core=core, capabilities=()) as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.02)
        first = running.stub.Generate(request(PROMPT, 100, "first"))
        async for event in first:
            if event.HasField("delta"):
                break
        await refusal(running.stub, request([], 1))
        await refusal(running.stub, request(PROMPT, 1), metadata=(("tercet-priority", "much"),))
        unserved = request(PROMPT, 1)
        unserved.sampling.prompt_logprobs = 1
        await refusal(running.stub, unserved)
        await refusal(running.stub, request(PROMPT, 1, "first"))
        late = request(PROMPT, 1)
        late.limits.total_ns = 5
        late.elapsed_ns = 10
        await refusal(running.stub, late)
        await running.stub.Abort(
            scheduler_pb2.SchedulerServiceAbortRequest(context=common_pb2.RequestContext(request_id="early"))
        )
        await refusal(running.stub, request(PROMPT, 1, "early"))
        queued = [running.stub.Generate(request(PROMPT * 2, 1))]
        assert (await queued[0].read()).HasField("accepted")
        assert (await refusal(running.stub, request(PROMPT * 4, 1))).field == "queued_tokens"
        queued.append(running.stub.Generate(request(PROMPT * 2, 1)))
        assert (await queued[1].read()).HasField("accepted")
        await refusal(running.stub, request([1], 1))
        for call in (first, *queued):
            call.cancel()
        await running.drained()
        running.engine.draining = True
        await refusal(running.stub, request(PROMPT, 1))
        running.engine.draining = False
        assert counted(running, "tercet_admission_rejections_total") == {
            "invalid": 2,
            "unsupported": 1,
            "duplicate": 1,
            "queue_full": 1,
            "tokens_full": 1,
        }
        outcomes = counted(running, "tercet_requests_total")
        assert outcomes == {"rejected": 6, "deadline_exceeded": 1, "cancelled": 4, "unavailable": 1}
        assert counted(running, "tercet_requests_received_total") == {"": sum(outcomes.values())}


async def test_tokens_and_steps_are_counted() -> None:
    async with chain() as (running, _):
        await tokens_of(running.stub, request(PROMPT, 9))
        sampled = counted(running, "tercet_sampled_tokens_total")[""]
        discarded = sum(counted(running, "tercet_discarded_tokens_total").values())
        assert counted(running, "tercet_delivered_tokens_total") == {"": 9}
        assert sampled == 9 + discarded
        steps = counted(running, "tercet_step_tokens_count")[""]
        assert steps >= 9
        assert counted(running, "tercet_step_sequences_sum") == {"": steps}
        assert counted(running, "tercet_step_round_trip_seconds_count") == {"": steps}


async def test_a_stop_and_an_abort_of_a_superseded_attempt_leave_its_successor_alone() -> None:
    async with chain() as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.005)
        call = running.stub.Generate(request(PROMPT, 40, "same", attempt=2))
        tokens: list[int] = []
        async for event in call:
            tokens += event.delta.token_ids
            if len(tokens) == 5:
                earlier = common_pb2.RequestContext(request_id="same", attempt=1)
                stop = scheduler_pb2.SchedulerServiceStopRequest(
                    context=earlier, kept_tokens=3, reason=scheduler_pb2.STOP_REASON_STOP_STRING
                )
                assert not (await running.stub.Stop(stop)).was_live
                abort = scheduler_pb2.SchedulerServiceAbortRequest(context=earlier)
                assert not (await running.stub.Abort(abort)).was_live
        assert tokens == expected(40)


async def test_an_abort_that_comes_first_is_for_its_attempt_and_those_before() -> None:
    async with chain() as (running, _):
        context = common_pb2.RequestContext(request_id="one", attempt=1)
        await running.stub.Abort(scheduler_pb2.SchedulerServiceAbortRequest(context=context))
        assert await tokens_of(running.stub, request(PROMPT, 4, "one", attempt=2)) == expected(4)


async def test_what_the_pool_can_never_hold_is_refused_by_the_contracts_names() -> None:
    capacity = replace(CAPACITY, total_blocks=10)
    async with chain(capacity=capacity) as (running, _):
        assert (await refusal(running.stub, request([1] * 60, 1))).field == "prompt_ids"
        assert (await refusal(running.stub, request(PROMPT, 90))).field == "sampling.max_tokens"


async def test_an_executor_that_returns_as_another_ends_what_waits_and_serves_what_comes() -> None:
    async with AsyncExitStack() as before:
        old = await before.enter_async_context(running_executor("hash", CAPACITY, eos_token_ids=()))
        old.runner.faults = replace(old.runner.faults, delay_s=0.01)
        async with scheduler(old.target) as running:
            await until(lambda: not running.lease.state.reason, "the lease")
            begun = asyncio.create_task(refusal(running.stub, request(PROMPT, 100)))
            await until(lambda: any(live.output_tokens > 3 for live in running.engine.live_requests()))
            await before.aclose()
            await until(lambda: not running.engine.load().lanes, "the loss")
            fresh = asyncio.create_task(refusal(running.stub, request(PROMPT, 100)))
            await until(lambda: len(running.engine.live_requests()) == 2)
            async with running_executor("positions", CAPACITY, eos_token_ids=(), listen=old.target) as new:
                one, two = await begun, await fresh
                assert (type(one).__name__, one.reason) == ("Aborted", "NUMERICS_CHANGED")
                assert (type(two).__name__, two.reason) == ("Unavailable", "MODEL_CHANGED")
                assert await tokens_of(running.stub, request(PROMPT, 3)) == [5, 6, 7]
                told = await running.stub.Describe(scheduler_pb2.SchedulerServiceDescribeRequest())
                assert told.numerics == new.runner.numerics


async def test_an_executor_with_other_numerics_beside_one_that_serves_is_refused() -> None:
    async with chain() as (running, _), running_executor("positions", CAPACITY, eos_token_ids=()) as other:
        async with make_channel(other.target) as channel:
            second = lease.Lease(other.target, channel, running.engine, "test", lambda: None, Grammars(NoOpTracer()))
            holding = asyncio.create_task(second.run())
            await until(lambda: "numerics" in second.state.reason, "the refusal")
            assert await tokens_of(running.stub, request(PROMPT, 3)) == expected(3)
            holding.cancel()


async def test_a_refused_executor_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "REFUSED_S", 0.05)
    async with running_executor("hash", CAPACITY, eos_token_ids=(), opened=False) as fake:
        fake.service.open(replace(fake.description, schema_revision=99))
        async with scheduler(fake.target) as running:
            await until(lambda: "schema revision 99" in running.lease.state.reason, "the refusal")
            fake.service.open(fake.description)
            await until(lambda: not running.lease.state.reason, "the lease")
            assert await tokens_of(running.stub, request(PROMPT, 3)) == expected(3)


async def test_who_was_ousted_in_mid_stream_does_not_claim_again() -> None:
    async with running_executor("hash", CAPACITY, eos_token_ids=()) as fake:
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.002)
        async with scheduler(fake.target) as running:
            await until(lambda: not running.lease.state.reason, "the lease")
            busy = [asyncio.create_task(refusal(running.stub, request([n, *PROMPT], 100))) for n in range(4)]
            await until(lambda: any(live.output_tokens > 3 for live in running.engine.live_requests()))
            async with owner_of(fake) as owner:
                await owner.claim("other", takeover=True)
                await until(lambda: "ousted" in running.lease.state.reason, "the news")
                epoch = fake.service._lease._epochs
            await asyncio.sleep(0.5)
            assert fake.service._lease._epochs == epoch
            for live in running.engine.live_requests():
                running.engine.abort(live.admission.caller.tenant, live.admission.caller.request_id)
            await asyncio.gather(*busy)


async def test_a_request_that_takes_its_executor_with_it_is_given_up() -> None:
    async with chain(config=EngineConfig(losses_in_a_row=3)) as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, crash=At(step_id=1))
        error = await refusal(running.stub, request(PROMPT, 5))
        assert (type(error).__name__, error.reason) == ("Unavailable", "LOST_TOO_OFTEN")
        fake.runner.faults = replace(fake.runner.faults, crash=None)
        await until(lambda: not running.lease.state.reason, "the lease")
        assert await tokens_of(running.stub, request(PROMPT, 5)) == expected(5)
        assert counted(running, "tercet_executors_lost_total") == {"": 3}


async def test_the_drain_call_ends_readiness() -> None:
    async with chain() as (running, _):
        assert await check(running.target) is None
        await running.stub.Drain(scheduler_pb2.SchedulerServiceDrainRequest())
        assert await check(running.target) == "NOT_SERVING: draining"


async def test_a_page_goes_on_where_its_first_request_has_left() -> None:
    async with chain() as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.02)
        calls = [running.stub.Generate(request(PROMPT, 100, f"r{index}")) for index in range(4)]
        for call in calls:
            assert (await call.read()).HasField("accepted")
        names = [live.admission.caller.request_id for live in running.engine.live_requests()]
        page = await running.stub.ListRequests(scheduler_pb2.SchedulerServiceListRequestsRequest(page_size=2))
        running.engine.abort("default", names[2])
        rest = await running.stub.ListRequests(
            scheduler_pb2.SchedulerServiceListRequestsRequest(page_token=page.next_page_token)
        )
        assert [row.request_id for row in (*page.requests, *rest.requests)] == [*names[:2], names[3]]
        for call in calls:
            call.cancel()


async def test_a_tick_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "TICK_S", 0.001)
    ticks: list[int] = []

    class Failing(Engine):
        def __init__(self) -> None: ...

        def tick(self) -> None:
            ticks.append(1)
            raise KeyError("a defect")

    task = asyncio.create_task(process._tick(Failing()))
    await until(lambda: len(ticks) > 2, "another tick")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_one_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with running_executor("hash", CAPACITY, eos_token_ids=()) as fake, owner_of(fake) as owner:
        await owner.claim("other")
        async with scheduler(fake.target) as running:
            await until(lambda: "held by other" in running.lease.state.reason, "the refusal")
            await asyncio.sleep(0.8)
        told = [record for record in caplog.records if record.message == "executor not available"]
        assert len(told) == 1


def test_tombstones_are_bounded_and_end() -> None:
    stones = Tombstones()
    for index in range(MOST + 5):
        stones.put(("tenant", str(index)), None, 0)
    assert len(stones) == MOST
    assert not stones.take(("tenant", "4"), 1, 1)
    assert stones.take(("tenant", "5"), 1, 1)
    assert not stones.take(("tenant", "5"), 1, 1)
    stones.forget(KEPT_NS)
    assert len(stones) == 0
