"""Two and three executors behind one scheduler: one queue, one of them slow, one that drains."""

import asyncio
import signal
from contextlib import AsyncExitStack
from dataclasses import replace

from chain import CAPACITY
from fake_stack import running_executor, until
from lanes import many_lanes
from processes import processes

from executor.step import Capacity
from services.executor.fake import FakeRunner
from services.executor.fake_tokens import expected_hash_tokens
from services.rpc import make_channel
from tercet.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc

VOCAB = 1000
ROOMY: Capacity = replace(CAPACITY, total_blocks=512, max_batched_tokens=128, max_sequences=32)


async def generate(target: str, number: int, count: int, seen: list[int]) -> None:
    """One answer, checked; `seen` gets one entry a delta."""
    prompt = [(7 * number + index) % VOCAB for index in range(3 + number % 9)]
    request = scheduler_pb2.SchedulerServiceGenerateRequest(
        prompt_ids=prompt,
        sampling=common_pb2.SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True),
    )
    tokens: list[int] = []
    async with make_channel(target) as channel:
        async for event in scheduler_pb2_grpc.SchedulerServiceStub(channel).Generate(request, timeout=60):
            tokens += event.delta.token_ids
            if event.HasField("delta"):
                seen.append(number)
    assert tuple(tokens) == expected_hash_tokens(prompt, count, VOCAB)


async def test_a_slow_one_of_three_gets_less_and_nobody_waits_for_it() -> None:
    runners = [FakeRunner("hash", ROOMY) for _ in range(3)]
    async with AsyncExitStack() as stack:
        targets = []
        for number, runner in enumerate(runners):
            fake = await stack.enter_async_context(running_executor(runner=runner, instance_id=f"e{number}"))
            runner.faults = replace(runner.faults, delay_s=0.08 if number == 0 else 0.004)
            targets.append(fake.target)
        running = await stack.enter_async_context(many_lanes(*targets))
        await until(lambda: not any(lease.state.reason for lease in running.leases), "the leases")
        for _ in range(3):  # the first round measures
            await asyncio.gather(*(generate(running.target, number, 12, []) for number in range(12)))
        admitted = [sum(piece.new is not None for step in runner.steps for piece in step.slices) for runner in runners]
        assert sum(admitted) == 36
        assert admitted[0] < min(admitted[1:])
        running.core.check()
    for runner in runners:
        assert not runner.violations


async def test_a_draining_executor_gets_nothing_new_ends_its_work_and_leaves_early() -> None:
    flags = ("--fake", "hash", "--fake-vocab-size", str(VOCAB), "--fake-delay-s", "0.02", "--max-model-len", "512")
    async with processes() as started:
        targets = [f"unix:{started.directory}/e{number}.sock" for number in range(2)]
        executors = [await started.start("executor", *flags, "--drain-s", "60", target=target) for target in targets]
        front = await started.start("scheduler", "--executors", ",".join(targets))
        for one in (*executors, front):
            await one.ready()
        async with make_channel(front.target) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)

            async def lanes() -> dict[str, int]:
                load = await stub.GetLoad(scheduler_pb2.SchedulerServiceGetLoadRequest())
                return {lane.executor: lane.running_requests for lane in load.lanes}

            for _ in range(200):
                if len(await lanes()) == 2:
                    break
                await asyncio.sleep(0.05)
            seen: list[int] = []
            old = [asyncio.ensure_future(generate(front.target, number, 60, seen)) for number in range(8)]
            await until(lambda: set(seen) == set(range(8)), "the first tokens")
            before = (await lanes())[targets[0]]
            assert 0 < before < 8
            executors[0].process.send_signal(signal.SIGTERM)
            new: list[asyncio.Future[None]] = []
            for number in range(8, 14):
                await asyncio.sleep(0.05)
                if number > 9:  # the news needs a moment
                    new.append(asyncio.ensure_future(generate(front.target, number, 60, seen)))
                    assert (await lanes()).get(targets[0], 0) <= before
            await asyncio.gather(*old, *new)
            async with asyncio.timeout(10):
                assert await executors[0].process.wait() == 0
            assert list(await lanes()) == [targets[1]]
            assert await front.end() == 0
