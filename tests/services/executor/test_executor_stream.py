"""The step stream over a real server: heartbeats, hung steps, slow readers, faults. The runner is the fake one."""

import asyncio

from fake_stack import RunningExecutor, running_executor, until
from step_stream import Owner, first, further, owner_of

from executor.step import Slice
from services.executor.fake import At, FakeRunner, Faults
from services.executor.fake_stream import StreamFaults
from services.executor.fake_tokens import expected_hash_tokens
from services.executor.session import SessionSettings

FAST = SessionSettings(heartbeat_s=0.02, claim_limit_s=0.2)
PROMPT = (5, 6, 7)


async def test_heartbeats_in_mid_step() -> None:
    runner = FakeRunner(faults=Faults(hang=At(step_id=2)))
    async with (
        running_executor(runner=runner, settings=FAST) as executor,
        owner_of(executor) as owner,
    ):
        await owner.claim()
        assert (await owner.heartbeat()).step_id == 0
        await owner.step(1, first(0, PROMPT, (0, 1)))
        await owner.result()
        for step_id in (2, 3, 4):
            await owner.step(step_id, further(0, step_id + 1))
        await until(runner.entered.is_set, "the step runs")
        beats = [await owner.heartbeat() for _ in range(5)]
        assert beats[-1].step_id == 2
        assert beats[-1].queued_steps == 2
        assert beats[-1].running_ns > beats[-2].running_ns > 0
        runner.release()
        assert [(await owner.result()).step_id for _ in range(3)] == [2, 3, 4]


async def test_hung_step_is_told_once_by_its_limit() -> None:
    runner = FakeRunner(faults=Faults(hang=At(step_id=1)))
    async with (
        running_executor(runner=runner, settings=FAST, hang_floor_ns=60_000_000) as executor,
        owner_of(executor) as owner,
    ):
        await owner.claim()
        await owner.step(1, first(0, PROMPT, (0,)))
        await until(lambda: bool(executor.hung), "the hang is told")
        assert [running.order.step.step_id for running in executor.hung] == [1]
        await asyncio.sleep(0.1)
        assert len(executor.hung) == 1


async def test_a_long_prediction_is_no_hang() -> None:
    runner = FakeRunner(faults=Faults(hang=At(step_id=1)))
    async with (
        running_executor(runner=runner, settings=FAST, hang_floor_ns=1) as executor,
        owner_of(executor) as owner,
    ):
        await owner.claim()
        await owner.step(1, first(0, PROMPT, (0,)), predicted_ns=10_000_000_000)
        await until(runner.entered.is_set, "the step runs")
        await asyncio.sleep(0.1)
        assert executor.hung == []


async def test_timings_hold_the_wait() -> None:
    runner = FakeRunner(faults=Faults(delay_s=0.03))
    async with running_executor(runner=runner) as executor, owner_of(executor) as owner:
        await owner.claim()
        await owner.step(1, first(0, PROMPT, (0, 1)))
        await owner.step(2, further(0, 3))
        await owner.result()
        second = (await owner.result()).timings
        assert second.wait_ns > 0
        assert second.prepare_ns >= 30_000_000


async def test_steps_beyond_the_bound_wait_in_the_transport() -> None:
    runner = FakeRunner(faults=Faults(hang=At(step_id=1)))
    settings = SessionSettings(heartbeat_s=0.02, steps_in_flight=3)
    async with running_executor(runner=runner, settings=settings) as executor, owner_of(executor) as owner:
        await owner.claim()
        await owner.step(1, first(0, PROMPT, (0, 1)))
        for step_id in range(2, 6):
            await owner.step(step_id, further(0, step_id + 1))
        await until(runner.entered.is_set, "the step runs")
        assert [(await owner.heartbeat()).queued_steps for _ in range(4)][-1] == 2
        runner.release()
        assert [(await owner.result()).step_id for _ in range(5)] == [1, 2, 3, 4, 5]


SMALL_WINDOW = (("grpc.http2.bdp_probe", 0),)  # else the transport's buffers grow with what they are given


async def stall(executor: RunningExecutor, owner: Owner, total: int) -> "asyncio.Task[None]":
    """Send `total` steps of about 2 KiB of results each, read nothing, wait until the executor stands still."""
    slices = [first(slot, PROMPT, (slot,), logprobs=20) for slot in range(8)]

    async def send_all() -> None:
        for step_id in range(1, total + 1):
            await owner.step(step_id, *slices)

    sending = asyncio.create_task(send_all())
    seen = still = 0
    while not seen or still < 3:
        await asyncio.sleep(0.1)
        still = still + 1 if executor.runner.count == seen else 0
        seen = executor.runner.count
    assert seen < total
    return sending


async def test_reader_who_reads_nothing_holds_a_bounded_number_of_results() -> None:
    """Results that the transport takes no more stay with the session, at most as many as steps in flight."""
    settings = SessionSettings(heartbeat_s=0.02, steps_in_flight=2)
    async with running_executor(settings=settings) as executor, owner_of(executor, SMALL_WINDOW) as owner:
        await owner.claim()
        sending = await stall(executor, owner, 200)
        assert [(await owner.result()).step_id for _ in range(200)] == list(range(1, 201))
        await sending


async def test_reader_who_reads_nothing_can_be_ousted() -> None:
    settings = SessionSettings(heartbeat_s=0.02, steps_in_flight=2)
    async with (
        running_executor(settings=settings) as executor,
        owner_of(executor, SMALL_WINDOW) as owner,
        owner_of(executor) as other,
    ):
        await owner.claim()
        sending = await stall(executor, owner, 200)
        await other.claim("b", takeover=True)
        await other.step(1, first(0, PROMPT, (0,)))
        assert (await other.result()).step_id == 1
        assert (await owner.end()).reason == "LEASE_LOST"
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_stream_faults_show_on_the_wire() -> None:
    async with running_executor(settings=FAST) as executor:
        executor.stream.faults = StreamFaults(
            duplicate_results=frozenset({1}), stale_epoch_at=2, drop_heartbeats=True, grant_epoch=77
        )
        async with owner_of(executor) as owner:
            assert (await owner.claim()).epoch == 77
            await asyncio.sleep(0.1)
            await owner.step(1, first(0, PROMPT, (0, 1)), epoch=1)
            assert [(await owner.result()).step_id, (await owner.result()).step_id] == [1, 1]
            assert owner.heartbeats == []
            await owner.step(2, further(0, 3), epoch=1)
            assert (await owner.end()).reason == "STALE_EPOCH"


async def test_many_owners_come_and_go_and_nothing_stays() -> None:
    async with running_executor() as executor:
        tasks = len(asyncio.all_tasks())
        for round_ in range(30):
            async with owner_of(executor) as owner:
                await owner.claim()
                await owner.step(1, first(0, PROMPT, (0,)))
                if round_ % 2:
                    await owner.result()
            await executor.service.ownerless()
        await until(lambda: len(asyncio.all_tasks()) <= tasks, "tasks are back at the baseline")


async def test_slices_for_nobody_cost_nothing() -> None:
    """A step of prefill chunks that sample nothing is answered all the same."""
    async with running_executor() as executor, owner_of(executor) as owner:
        await owner.claim()
        whole = first(0, PROMPT, (0,))
        await owner.step(1, Slice(0, 0, 2, (5, 6), (0,), False, whole.new))
        assert (await owner.result()).results == ()
        await owner.step(2, Slice(0, 2, 1, (7,), (), True))
        drawn = (await owner.result()).results[0].token_ids
        assert drawn == expected_hash_tokens(PROMPT, 1, executor.runner.capacity.vocab_size)
