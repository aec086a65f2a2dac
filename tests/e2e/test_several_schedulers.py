"""Several schedulers behind one edge: one that dies, drains, is full or computes otherwise, under many streams."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from chain import CAPACITY, Chain, scheduler
from fake_stack import running_executor, until
from processes import Processes, Running, processes
from resumable import RunningEdge, running_edge
from tiny_tokenizer import tiny_model

import tercet
from services.executor.fake import FakeRunner
from services.executor.fake_tokens import expected_hash_tokens
from services.rpc import make_channel
from services.scheduler.core.calls import CoreConfig
from tercet.v1 import scheduler_pb2, scheduler_pb2_grpc

STREAMS = 20
MODEL = tiny_model()
ROOMY = replace(CAPACITY, vocab_size=MODEL.vocab_size, total_blocks=256)


@dataclass
class Streams:
    """Asked of an edge by a client that goes on with nothing by itself."""

    client: tercet.AsyncClient
    vocabulary: int
    length: int
    heard: list[list[int]] = field(default_factory=list)
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    def prompt(self, number: int) -> list[int]:
        return [3 + (11 * number + 7 * index) % 200 for index in range(2 + number % 13)]

    def start(self, count: int) -> None:
        self.heard = [[] for _ in range(count)]
        self.tasks = [asyncio.ensure_future(self._read(number)) for number in range(count)]

    async def _read(self, number: int) -> None:
        sampling = tercet.SamplingParams(temperature=0, max_tokens=self.length + number, ignore_eos=True)
        async for delta in self.client.generate(self.prompt(number), sampling=sampling):
            self.heard[number] += delta.token_ids

    async def progress(self, tokens: int) -> None:
        """Each has so many more."""
        had = [len(one) for one in self.heard]
        await until(
            lambda: all(len(one) >= before + tokens for one, before in zip(self.heard, had, strict=True)),
            "progress of every stream",
            limit_s=30,
        )

    async def end(self) -> None:
        """All have the tokens that they would have had undisturbed."""
        try:
            await asyncio.gather(*self.tasks)
        finally:
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)
        for number, tokens in enumerate(self.heard):
            wanted = expected_hash_tokens(self.prompt(number), self.length + number, self.vocabulary)
            assert tuple(tokens) == wanted, f"stream {number}"


async def live_at(target: str) -> int:
    async with make_channel(target) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        return len((await stub.ListRequests(scheduler_pb2.SchedulerServiceListRequestsRequest())).requests)


async def two_chains(started: Processes, model: Path) -> tuple[list[Running], Running]:
    """Two schedulers, each with its own executor, and the edge in front of both."""
    flags = ("--model", str(model), "--fake", "hash", "--fake-delay-s", "0.02")
    schedulers = []
    for number in range(2):
        executor = f"unix:{started.directory}/executor{number}.sock"
        await started.start("executor", *flags, target=executor)
        target = f"unix:{started.directory}/scheduler{number}.sock"
        schedulers.append(await started.start("scheduler", "--executors", executor, target=target))
    for one in schedulers:
        await one.ready()
    targets = ",".join(one.target for one in schedulers)
    edge = await started.start("tokenizer", "--model", str(model), "--scheduler", targets)
    await edge.ready()
    return schedulers, edge


@pytest.mark.model
@pytest.mark.timeout(120)
async def test_kill_a_scheduler_under_twenty_streams_and_all_go_on_at_the_other(default_model_path: Path) -> None:
    async with processes() as started:
        schedulers, edge = await two_chains(started, default_model_path)
        async with tercet.AsyncClient(edge.target, resume=False, retry=tercet.RetryPolicy(attempts=1)) as client:
            streams = Streams(client, (await client.describe()).vocab_size, 100)
            streams.start(STREAMS)
            await streams.progress(3)
            held = [await live_at(one.target) for one in schedulers]
            assert sum(held) == STREAMS
            assert max(held) <= 13  # 1.25 times the half, rounded up
            schedulers[0].process.send_signal(signal.SIGKILL)
            await schedulers[0].process.wait()
            await streams.progress(3)
            assert await live_at(schedulers[1].target) == STREAMS
            await streams.end()
            # New requests find the one that is left, whatever their key.
            streams.length = 5
            streams.start(STREAMS)
            await streams.end()
        assert await edge.end() == 0
        log = edge.log.read_text()
        assert '"level": "error"' not in log
        assert log.count("a server is lost in the middle") == held[0]


@dataclass
class Two:
    runners: list[FakeRunner]
    chains: list[Chain]
    stacks: list[AsyncExitStack]
    edge: RunningEdge
    client: tercet.AsyncClient

    def streams(self, length: int) -> Streams:
        return Streams(self.client, MODEL.vocab_size, length)

    def shown(self, metric: str) -> list[float | None]:
        """Of each scheduler."""
        return [self.edge.registry.get_sample_value(metric, {"scheduler": one.target}) for one in self.chains]

    def holds(self) -> list[int]:
        return [len(one.engine.live_requests()) for one in self.chains]


@asynccontextmanager
async def two(
    cores: tuple[CoreConfig, CoreConfig] = (CoreConfig(), CoreConfig()), *, equal: bool = True, grace_s: float = 5.0
) -> AsyncIterator[Two]:
    """In this process. equal: in numerics. grace_s: for which a lost scheduler is waited for."""
    async with AsyncExitStack() as stack:
        runners = [FakeRunner("hash", ROOMY), FakeRunner("hash", ROOMY, eos_every=None if equal else 7)]
        chains, stacks = [], []
        for runner, core in zip(runners, cores, strict=True):
            fake = await stack.enter_async_context(
                running_executor(runner=runner, tokenizer_hash=MODEL.hash, eos_token_ids=(1,))
            )
            stacks.append(await stack.enter_async_context(AsyncExitStack()))
            chains.append(await stacks[-1].enter_async_context(scheduler(fake.target, core)))
            runner.faults = replace(runner.faults, delay_s=0.004)
        for one in chains:
            await until(lambda one=one: not one.lease.state.reason, "the lease")  # type: ignore[misc]
        edge = await stack.enter_async_context(
            running_edge(MODEL, *(one.target for one in chains), grace_s=grace_s, watched=True)
        )
        client = await stack.enter_async_context(
            tercet.AsyncClient(edge.target, resume=False, retry=tercet.RetryPolicy(attempts=1))
        )
        yield Two(runners, chains, stacks, edge, client)
        for chain, own in zip(chains, stacks, strict=True):
            if own._exit_callbacks:  # type: ignore[attr-defined]
                await chain.drained()
        assert not any(runner.violations for runner in runners)


async def test_a_scheduler_that_drains_hands_its_streams_over() -> None:
    async with two() as both:
        streams = both.streams(60)
        streams.start(8)
        await streams.progress(3)
        held = both.holds()
        assert min(held) > 0
        assert both.shown("tercet_scheduler_requests") == held
        await both.chains[0].engine.drain(0.0)
        await streams.end()
        assert both.shown("tercet_scheduler_losses_total") == [held[0], 0]
        assert both.shown("tercet_scheduler_requests") == [0, 0]


async def test_a_full_queue_sends_a_new_request_to_the_other_at_once() -> None:
    tight = CoreConfig(max_queued_requests=1)
    async with two((tight, CoreConfig())) as both:
        both.runners[0].faults = replace(both.runners[0].faults, delay_s=0.05)
        streams = both.streams(10)
        streams.start(30)
        await streams.end()


async def test_answers_that_have_begun_are_not_taken_to_other_numerics() -> None:
    async with two(equal=False, grace_s=0.5) as both:
        streams = both.streams(60)
        streams.start(8)
        await streams.progress(3)
        first = both.holds()[0]
        assert 0 < first < 8
        await both.stacks[0].aclose()
        results = await asyncio.gather(*streams.tasks, return_exceptions=True)
        lost = [one for one in results if isinstance(one, BaseException)]
        assert len(lost) == first
        assert all(isinstance(one, tercet.UnavailableError) for one in lost), lost


async def test_a_stop_goes_to_the_scheduler_that_has_the_request() -> None:
    async with two() as both:
        stops: list[tuple[int, str]] = []
        for number, one in enumerate(both.chains):
            stop = one.engine.stop

            def note(*given: object, number: int = number, stop: object = stop) -> bool:
                stops.append((number, str(given[1])))
                return stop(*given)  # type: ignore[operator, no-any-return]

            one.engine.stop = note  # type: ignore[method-assign, assignment]
        where: dict[str, int] = {}
        for attempt in range(12):
            stream = both.client.generate(
                [5 + attempt, 9],
                max_tokens=90,
                temperature=0,
                stop=["h", "e", "a", "1", "t", "s"],
                request_id=f"r{attempt}",
            )
            async for _ in stream:
                for number, one in enumerate(both.chains):
                    if any(live.admission.caller.request_id == f"r{attempt}" for live in one.engine.live_requests()):
                        where[f"r{attempt}"] = number
        assert {request: number for number, request in stops}.items() <= where.items()
        assert len({number for number, _ in stops}) == 2


async def test_ready_while_one_is_and_the_reason_names_both_when_none_is() -> None:
    async with two() as both:
        assert both.edge.edge is not None
        await both.stacks[1].aclose()
        await until(lambda: [one.state.problem is None for one in both.edge.schedulers] == [True, False], "the news")
        assert both.shown("tercet_scheduler_ready") == [1, 0]
        assert await both.edge.edge.why_not_ready() is None
        streams = both.streams(10)
        streams.start(6)
        await streams.end()
        await both.stacks[0].aclose()
        await until(lambda: both.edge.schedulers.problem() is not None, "the news")
        reason = await both.edge.edge.why_not_ready()
        assert reason is not None
        assert all(one.target in reason for one in both.chains)
        with pytest.raises(tercet.UnavailableError, match="no scheduler is ready"):
            async for _ in both.client.generate([5], max_tokens=1):
                pass
