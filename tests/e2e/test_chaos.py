"""Executors that are killed, cut off and frozen under many streams: every token is the one of an undisturbed run."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
from chain import CAPACITY, scheduler
from fake_stack import running_executor, until
from lanes import many_lanes
from processes import processes

from executor.step import Capacity
from services.executor.fake import FakeRunner
from services.executor.fake_tokens import expected_hash_tokens
from services.rpc import make_channel
from services.scheduler import lease
from tercet.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc

VOCAB = 1000
STREAMS = 50
LOOSE = replace(CAPACITY, total_blocks=1024, max_batched_tokens=256, max_sequences=64)


@dataclass
class Streams:
    """Many requests at one scheduler, read in the background."""

    target: str
    count: int
    length: int
    tokens: list[list[int]] = field(default_factory=list)
    tasks: "list[asyncio.Task[scheduler_pb2.SchedulerFinished]]" = field(default_factory=list)

    def prompt(self, number: int) -> list[int]:
        return [(11 * number + 7 * index) % VOCAB for index in range(2 + number % 13)]

    def output(self, number: int) -> int:
        return self.length + number % 7

    async def _read(self, stub: "scheduler_pb2_grpc.SchedulerServiceAsyncStub", number: int) -> object:
        request = scheduler_pb2.SchedulerServiceGenerateRequest(
            prompt_ids=self.prompt(number),
            sampling=common_pb2.SamplingParams(max_tokens=self.output(number), temperature=0.0, ignore_eos=True),
        )
        finished = None
        async for event in stub.Generate(request, timeout=100):
            self.tokens[number] += event.delta.token_ids
            if event.HasField("finished"):
                finished = event.finished
        assert finished is not None
        return finished

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """On leaving, all have ended and are checked."""
        async with make_channel(self.target) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            self.tokens = [[] for _ in range(self.count)]
            self.tasks = [asyncio.ensure_future(self._read(stub, number)) for number in range(self.count)]  # type: ignore[arg-type]
            try:
                yield
                for number, finished in enumerate(await asyncio.gather(*self.tasks)):
                    wanted = expected_hash_tokens(self.prompt(number), self.output(number), VOCAB)
                    assert tuple(self.tokens[number]) == wanted, f"stream {number}"
                    assert finished.usage.delivered_tokens == len(wanted)
            finally:
                for task in self.tasks:
                    task.cancel()
                await asyncio.gather(*self.tasks, return_exceptions=True)

    async def progress(self, at_least: int = 1) -> None:
        """Every stream that has not ended has advanced."""
        before = [len(tokens) for tokens in self.tokens]
        await until(
            lambda: all(
                task.done() or len(tokens) >= had + at_least
                for task, tokens, had in zip(self.tasks, self.tokens, before, strict=True)
            ),
            "progress of every stream",
            limit_s=30,
        )

    @property
    def left(self) -> int:
        return sum(not task.done() for task in self.tasks)


@pytest.mark.timeout(120)
async def test_twenty_kills_during_fifty_streams() -> None:
    """Three executors, one of which is killed whenever all streams have advanced, and started again at its address."""
    flags = ("--fake", "hash", "--fake-vocab-size", str(VOCAB), "--fake-delay-s", "0.03", "--max-model-len", "256")
    async with processes() as started:
        targets = [f"unix:{started.directory}/executor{number}.sock" for number in range(3)]
        executors = [await started.start("executor", *flags, target=target) for target in targets]
        front = await started.start("scheduler", "--executors", ",".join(targets))
        for one in (*executors, front):
            await one.ready()
        streams = Streams(front.target, STREAMS, 90)
        async with streams.running():
            for kill in range(20):
                await streams.progress(1 + kill % 2)
                assert streams.left > STREAMS // 2, "the streams ended before the kills did"
                at = kill % 3
                executors[at].process.send_signal(signal.SIGKILL)
                await executors[at].process.wait()
                executors[at] = await started.start("executor", *flags, target=targets[at])
        assert sum(one.process.returncode == -signal.SIGKILL for one in started.running) == 20


@dataclass
class Proxy:
    """Passes bytes between a port of its own and a target, until it is told to cut or to hold them."""

    target: str
    port: int = 0
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Proxy"]:
        self._open.set()
        tasks: set[asyncio.Task[None]] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            host, _, port = self.target.rpartition(":")
            try:
                far_reader, far_writer = await asyncio.open_connection(host, int(port))
            except OSError:
                writer.close()
                return
            self._writers |= {writer, far_writer}
            both = [
                asyncio.create_task(self._pass(reader, far_writer)),
                asyncio.create_task(self._pass(far_reader, writer)),
            ]
            tasks.update(both)
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            for one in (writer, far_writer):
                self._writers.discard(one)
                one.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self._open.set()
            self.cut()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._open.wait()
            writer.write(data)
            await writer.drain()

    def cut(self) -> None:
        """Every connection breaks at once, without goodbye."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    def hold(self) -> None:
        """Nothing passes, and nobody is told: a frozen peer looks like this."""
        self._open.clear()

    def release(self) -> None:
        """What was held back arrives now, late."""
        self._open.set()


async def test_a_connection_that_is_cut_again_and_again_costs_no_token() -> None:
    runner = FakeRunner("hash", LOOSE)
    chance = random.Random(3)
    async with running_executor(runner=runner) as fake, Proxy(fake.target).running() as proxy:
        runner.faults = replace(runner.faults, delay_s=0.005)
        async with scheduler(f"127.0.0.1:{proxy.port}") as front:
            await until(lambda: not front.lease.state.reason, "the lease")
            streams = Streams(front.target, 16, 70)
            async with streams.running():
                for _ in range(10):
                    await streams.progress(chance.randint(1, 3))
                    proxy.cut()
                assert streams.left
            await front.drained()
    assert not runner.violations


async def test_late_steps_of_a_lost_epoch_never_run_and_late_results_never_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What SIGSTOP and SIGCONT do to an executor: silence, then everything that was on its way at once."""
    monkeypatch.setattr(lease, "SILENCE_S", 0.5)
    monkeypatch.setattr(lease, "HANDSHAKE_S", 0.3)
    frozen, other = FakeRunner("hash", LOOSE), FakeRunner("hash", LOOSE)
    async with (
        running_executor(runner=frozen, instance_id="frozen") as first,
        running_executor(runner=other, instance_id="other") as second,
        Proxy(first.target).running() as proxy,
    ):
        for runner in (frozen, other):
            runner.faults = replace(runner.faults, delay_s=0.01)
        heartbeat = replace(first.service._settings, heartbeat_s=0.1)
        first.service._settings = second.service._settings = heartbeat
        async with two_lanes(f"127.0.0.1:{proxy.port}", second.target) as (front, leases):
            await until(lambda: all(not one.state.reason for one in leases), "both leases")
            streams = Streams(front, 16, 100)
            async with streams.running():
                for _ in range(2):
                    await streams.progress()
                    epoch = leases[0].state.epoch
                    proxy.hold()
                    await until(lambda: bool(leases[0].state.reason), "the silence noticed")
                    await streams.progress()
                    proxy.release()
                    await until(lambda: not leases[0].state.reason, "the lease again", 20)
                    assert leases[0].state.epoch > epoch
                assert streams.left
    assert not frozen.violations
    assert not other.violations


@asynccontextmanager
async def two_lanes(*targets: str) -> "AsyncIterator[tuple[str, list[lease.Lease]]]":
    """A scheduler with a lease on each of these executors: its target and the leases."""
    async with many_lanes(*targets) as running:
        yield running.target, running.leases


async def test_an_executor_that_restarts_at_its_address_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    capacity: Capacity = LOOSE
    async with running_executor(capacity=capacity) as first:
        target = first.target
        first.runner.faults = replace(first.runner.faults, delay_s=0.005)
        front_context = scheduler(target)
        front = await front_context.__aenter__()
        streams = Streams(front.target, 12, 60)
        context = streams.running()
        await until(lambda: not front.lease.state.reason, "the lease")
        await context.__aenter__()
        await streams.progress(5)
    for _ in range(3):
        async with running_executor(capacity=capacity, listen=target, instance_id="again") as again:
            again.runner.faults = replace(again.runner.faults, delay_s=0.005)
            await streams.progress(5)
            assert not again.runner.violations
    async with running_executor(capacity=capacity, listen=target, instance_id="last"):
        await context.__aexit__(None, None, None)
        await front.drained()
        await front_context.__aexit__(None, None, None)


async def test_of_schedulers_that_claim_one_executor_exactly_one_holds_it() -> None:
    async with running_executor(capacity=LOOSE) as fake:
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.005)
        contexts = [scheduler(fake.target) for _ in range(3)]
        fronts = [await context.__aenter__() for context in contexts]
        for _ in range(3):
            await until(lambda: any(not front.lease.state.reason for front in fronts), "a lease", 20)
            await asyncio.sleep(0.3)
            holders = [front for front in fronts if not front.lease.state.reason]
            assert len(holders) == 1
            assert fake.service._lease.holder is not None
            assert fake.service._lease.holder.epoch == holders[0].lease.state.epoch
            streams = Streams(holders[0].target, 6, 20)
            async with streams.running():
                await streams.progress()
                assert [not front.lease.state.reason for front in fronts].count(True) == 1
            await holders[0].drained()
            at = fronts.index(holders[0])
            del fronts[at]
            await contexts.pop(at).__aexit__(None, None, None)
        assert not fake.runner.violations
