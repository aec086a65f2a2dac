"""The step stream over a real server: claims, epochs, order, failures. The runner is the fake one."""

import asyncio
from typing import Any

import grpc
import pytest
from fake_stack import MODEL_HASH, RunningExecutor, running_executor, until
from step_stream import first, further, owner_of

from executor.step import RowErrorCode
from services import errors
from services.description import description_from_proto
from services.executor.fake import At, FakeRunner, Faults
from services.executor.fake_tokens import expected_hash_tokens
from services.executor.session import SessionSettings
from services.rpc import make_channel
from services.rpc_errors import from_rpc_error
from tercet.v1 import executor_pb2, executor_pb2_grpc

FAST = SessionSettings(heartbeat_s=0.02, claim_limit_s=0.2)
PROMPT = (5, 6, 7)


async def describe(executor: RunningExecutor) -> Any:
    async with make_channel(executor.target) as channel:
        stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
        try:
            return await stub.Describe(executor_pb2.ExecutorServiceDescribeRequest(), timeout=5)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


async def test_describe_tells_what_is_held() -> None:
    async with running_executor() as executor:
        assert description_from_proto(await describe(executor)) == executor.description


async def test_steps_are_answered_in_order_two_in_flight() -> None:
    async with running_executor() as executor, owner_of(executor) as owner:
        await owner.claim()
        await owner.step(1, first(0, PROMPT, (3, 1)))
        await owner.step(2, further(0, 3))
        results = [await owner.result(), await owner.result()]
        await owner.step(3, further(0, 4))
        results.append(await owner.result())
        await owner.leave()
        with pytest.raises(EOFError):
            await owner.result()
        assert [result.step_id for result in results] == [1, 2, 3]
        drawn = tuple(result.results[0].token_ids[0] for result in results)
        assert drawn == expected_hash_tokens(PROMPT, 3, executor.runner.capacity.vocab_size)
        assert executor.runner.violations == []


async def test_epochs_grow_and_each_starts_empty() -> None:
    async with running_executor() as executor:
        epochs = []
        for _ in range(3):
            async with owner_of(executor) as owner:
                epochs.append((await owner.claim()).epoch)
                assert owner.instance_id == executor.description.instance_id
                assert executor.runner.entries == 0
                await owner.step(1, first(0, PROMPT, (0,)))
                await owner.result()
                assert executor.runner.entries == len(PROMPT)
            await executor.service.ownerless()
        assert epochs == [1, 2, 3]


async def test_held_lease_refuses_and_names_the_holder() -> None:
    async with running_executor() as executor, owner_of(executor) as owner, owner_of(executor) as other:
        await owner.claim("scheduler-1")
        with pytest.raises(errors.FailedPrecondition) as caught:
            await other.claim("scheduler-2")
        assert caught.value.reason == "LEASE_HELD"
        assert caught.value.metadata["holder"] == "scheduler-1"
        await owner.step(1, first(0, PROMPT, (0,)))  # undisturbed
        assert (await owner.result()).step_id == 1


async def test_takeover_ends_the_old_stream() -> None:
    async with running_executor() as executor, owner_of(executor) as owner, owner_of(executor) as other:
        await owner.claim("scheduler-1")
        await other.claim("scheduler-2", takeover=True)
        lost = await owner.end()
        assert isinstance(lost, errors.FailedPrecondition)
        assert (lost.reason, lost.metadata["holder"]) == ("LEASE_LOST", "scheduler-2")
        assert other.epoch == 2
        await other.step(1, first(0, PROMPT, (0,)))
        assert (await other.result()).step_id == 1


async def test_takeover_waits_for_the_running_step_and_drops_the_queued_one() -> None:
    runner = FakeRunner(faults=Faults(hang=At(step_id=1)))
    async with running_executor(runner=runner) as executor, owner_of(executor) as owner, owner_of(executor) as other:
        await owner.claim("scheduler-1")
        await owner.step(1, first(0, PROMPT, (0,)))
        await owner.step(2, further(0, 3))
        await until(runner.entered.is_set, "the step runs")
        claiming = asyncio.create_task(other.claim("scheduler-2", takeover=True))
        assert isinstance(await owner.end(), errors.FailedPrecondition)
        assert not claiming.done()
        runner.release()
        await claiming
        assert (runner.entries, runner.count) == (0, 1)


async def test_owner_gone_in_mid_step_frees_the_lease_after_the_step() -> None:
    runner = FakeRunner(faults=Faults(hang=At(step_id=1)))
    async with running_executor(runner=runner) as executor, owner_of(executor) as other:
        async with owner_of(executor) as owner:
            await owner.claim("scheduler-1")
            await owner.step(1, first(0, PROMPT, (0,)))
            await owner.step(2, further(0, 3))
            await until(runner.entered.is_set, "the step runs")
        await executor.service.ownerless()
        claiming = asyncio.create_task(other.claim("scheduler-2"))
        await asyncio.sleep(0.05)
        assert not claiming.done()
        runner.release()
        assert (await claiming).epoch == 2
        assert (runner.entries, runner.count) == (0, 1)


async def test_repeated_step_is_ignored() -> None:
    async with running_executor() as executor, owner_of(executor) as owner:
        await owner.claim()
        await owner.step(1, first(0, PROMPT, (0, 1)))
        await owner.step(1, first(0, PROMPT, (0, 1)))
        await owner.step(2, further(0, 3))
        assert [(await owner.result()).step_id, (await owner.result()).step_id] == [1, 2]
        assert executor.runner.count == 2


async def test_many_repeated_steps_take_no_room() -> None:
    async with running_executor(settings=SessionSettings(steps_in_flight=2)) as executor, owner_of(executor) as owner:
        await owner.claim()
        for _ in range(10):
            await owner.step(1, first(0, PROMPT, (0, 1)))
        await owner.step(2, further(0, 3))
        assert [(await owner.result()).step_id, (await owner.result()).step_id] == [1, 2]


async def test_gap_ends_the_stream() -> None:
    async with running_executor() as executor, owner_of(executor) as owner:
        await owner.claim()
        await owner.step(2, first(0, PROMPT, (0,)))
        gap = await owner.end()
        assert isinstance(gap, errors.InvalidArgument)
        assert (gap.reason, gap.field, gap.limit) == ("STEP_GAP", "step.step_id", "1")
        assert executor.runner.count == 0


async def test_stale_epoch_is_refused_when_the_step_starts() -> None:
    async with running_executor() as executor, owner_of(executor) as owner:
        await owner.claim()
        await owner.step(1, first(0, PROMPT, (0,)), epoch=owner.epoch + 1)
        stale = await owner.end()
        assert isinstance(stale, errors.FailedPrecondition)
        assert (stale.reason, stale.metadata["given"], stale.metadata["current"]) == ("STALE_EPOCH", "2", "1")
        assert executor.runner.count == 0


async def test_bad_step_ends_the_stream_and_empties_the_pool() -> None:
    async with running_executor() as executor:
        async with owner_of(executor) as owner:
            await owner.claim()
            await owner.step(1, first(0, PROMPT, (0,)))
            await owner.step(2, further(7, 3))
            await owner.step(3, further(0, 3))
            bad = await owner.end()
            assert isinstance(bad, errors.InvalidArgument)
            assert bad.reason == "BAD_STEP"
            assert "slot 7" in bad.message
        async with owner_of(executor) as owner:
            await owner.claim()
            assert (executor.runner.count, executor.runner.entries) == (2, 0)


async def test_unserved_field_of_a_step_is_refused_by_name() -> None:
    async with running_executor() as executor, owner_of(executor) as owner:
        await owner.claim()
        step = executor_pb2.Step(step_id=1, epoch=1, slices=[executor_pb2.Slice(draft_token_ids=[1])])
        await owner.send(executor_pb2.ExecutorServiceRunRequest(step=step))
        refused = await owner.end()
        assert isinstance(refused, errors.Unimplemented)
        assert refused.field == "step.slices[0].draft_token_ids"


async def test_crash_of_the_runner_ends_the_stream_and_a_new_claim_works(caplog: pytest.LogCaptureFixture) -> None:
    runner = FakeRunner(faults=Faults(crash=At(count=1)))
    async with running_executor(runner=runner) as executor:
        async with owner_of(executor) as owner:
            await owner.claim()
            await owner.step(1, first(0, PROMPT, (0, 1)))
            await owner.step(2, further(0, 3))
            failed = await owner.end()
            assert isinstance(failed, errors.Internal)
            assert failed.reason == "STEP_FAILED"
            assert runner.count == 1  # the step behind it did not start
        assert "InjectedFault" in caplog.text
        async with owner_of(executor) as owner:
            assert (await owner.claim()).epoch == 2
            await owner.step(1, first(0, PROMPT, (0,)))
            assert (await owner.result()).step_id == 1


async def test_row_error_leaves_the_other_rows_and_steps() -> None:
    runner = FakeRunner(faults=Faults(nan_slots=frozenset({1}), nan_at=At(step_id=1)))
    async with running_executor(runner=runner) as executor, owner_of(executor) as owner:
        await owner.claim()
        await owner.step(1, first(0, PROMPT, (0, 1)), first(1, PROMPT, (2, 3)))
        await owner.step(2, further(0, 3), further(1, 3))
        one, two = await owner.result(), await owner.result()
        drawn = [one.results[0].token_ids[0], two.results[0].token_ids[0]]
        assert tuple(drawn) == expected_hash_tokens(PROMPT, 2, runner.capacity.vocab_size)
        error = one.results[1].error
        assert error is not None
        assert (error.code, one.results[1].token_ids) == (RowErrorCode.NAN_LOGITS, ())


async def test_wrong_model_and_revision_are_named() -> None:
    async with running_executor() as executor:
        async with owner_of(executor) as owner:
            with pytest.raises(errors.FailedPrecondition) as caught:
                await owner.claim(model_hash="a" * 64)
            assert caught.value.reason == "MODEL_MISMATCH"
            assert "a" * 64 in caught.value.message
            assert MODEL_HASH in caught.value.message
        async with owner_of(executor) as owner:
            with pytest.raises(errors.FailedPrecondition) as caught:
                await owner.claim(schema_revision=7)
            assert caught.value.reason == "SCHEMA_MISMATCH"
            assert caught.value.message == "claim.schema_revision is 7, the executor has 1"
        async with owner_of(executor) as owner:  # neither of them got the lease
            assert (await owner.claim()).epoch == 1


@pytest.mark.parametrize("scheduler_id", ["", "a b", "x" * 129])
async def test_malformed_scheduler_id_is_refused(scheduler_id: str) -> None:
    async with running_executor() as executor, owner_of(executor) as owner:
        with pytest.raises(errors.InvalidArgument, match=r"claim\.scheduler_id"):
            await owner.claim(scheduler_id)


async def test_first_message_must_be_a_claim_and_only_it() -> None:
    async with running_executor(settings=FAST) as executor:
        async with owner_of(executor) as owner:
            await owner.step(1, first(0, PROMPT, (0,)))
            assert "must be a claim" in (await owner.end()).message
        async with owner_of(executor) as owner:  # says nothing at all
            assert "no claim came" in (await owner.end()).message
        async with owner_of(executor) as owner:
            await owner.leave()
            assert "must be a claim" in (await owner.end()).message
        async with owner_of(executor) as owner:
            await owner.claim()
            claim = executor_pb2.Claim(scheduler_id="a")
            await owner.send(executor_pb2.ExecutorServiceRunRequest(claim=claim))
            assert "only the first message" in (await owner.end()).message


async def test_unavailable_while_loading() -> None:
    async with running_executor(opened=False) as executor:
        with pytest.raises(errors.Unavailable, match="loading the model"):
            await describe(executor)
        async with owner_of(executor) as owner:
            with pytest.raises(errors.Unavailable, match="loading the model"):
                await owner.claim()
        executor.service.open(executor.description)
        async with owner_of(executor) as owner:
            await owner.claim()


async def test_draining_refuses_claims_and_lets_the_owner_go_on() -> None:
    async with running_executor() as executor, owner_of(executor) as owner:
        await owner.claim()
        executor.service.drain()
        async with owner_of(executor) as other:
            with pytest.raises(errors.Unavailable, match="draining"):
                await other.claim("b", takeover=True)
        await owner.step(1, first(0, PROMPT, (0,)))
        assert (await owner.result()).step_id == 1
        executor.service.evict(errors.Unavailable("the drain limit has passed", reason="DRAINING"))
        assert isinstance(await owner.end(), errors.Unavailable)
        await executor.service.ownerless()
