"""The state GRAMMAR: a request waits until its executors have its grammar, and nobody else waits with it."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import pytest
from chain import CAPACITY, Chain, scheduler
from fake_stack import RunningExecutor, running_executor, until
from lanes import many_lanes
from step_stream import owner_of

from executor.grammar.grammars import GrammarsBusy
from executor.step import Grammar
from services.errors import ServiceError, Unavailable
from services.executor.fake import Faults
from services.executor.fake_tokens import expected_hash_tokens
from services.rpc import make_channel
from services.rpc_errors import from_rpc_error
from tercet.v1 import common_pb2, executor_pb2, scheduler_pb2, scheduler_pb2_grpc

Message = scheduler_pb2.SchedulerServiceGenerateRequest
if TYPE_CHECKING:
    Stub = scheduler_pb2_grpc.SchedulerServiceAsyncStub
PROMPT = (3, 4, 5, 6, 7, 8)


@dataclass
class SlowGrammars:
    """Answers when it is told to, from another thread."""

    held: bool = True
    busy: bool = False
    problem: str | None = None
    asked: list[tuple[Grammar, Callable[[str | None], None]]] = field(default_factory=list)

    def prepare(self, grammar: Grammar, done: Callable[[str | None], None]) -> None:
        if self.busy:
            raise GrammarsBusy("7 grammars wait to be compiled")
        self.asked.append((grammar, done))
        if not self.held:
            done(self.problem)

    def release(self) -> None:
        self.held = False
        thread = threading.Thread(target=lambda: [done(self.problem) for _, done in self.asked])
        thread.start()
        thread.join()


def request(max_tokens: int = 8, request_id: str | None = None) -> Message:
    return Message(
        context=common_pb2.RequestContext(request_id=request_id),
        prompt_ids=PROMPT,
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0),
    )


def asking(source: str = "a\nb", max_tokens: int = 8, request_id: str | None = None) -> Message:
    message = request(max_tokens, request_id)
    message.sampling.grammar.kind = common_pb2.GRAMMAR_KIND_CHOICE
    message.sampling.grammar.source = source
    return message


@asynccontextmanager
async def serving(grammars: SlowGrammars | None) -> AsyncIterator[tuple[Chain, RunningExecutor]]:
    async with running_executor("hash", CAPACITY, eos_token_ids=(), grammars=grammars) as fake:
        async with scheduler(fake.target) as running:
            await until(lambda: not running.lease.state.reason, "the lease")
            yield running, fake


def expected(count: int) -> list[int]:
    return list(expected_hash_tokens(PROMPT, count, CAPACITY.vocab_size))


async def tokens(stub: "Stub", message: Message) -> list[int]:
    events = [event async for event in stub.Generate(message)]
    assert events[-1].HasField("finished")
    return [token for event in events for token in event.delta.token_ids]


async def failure(stub: "Stub", message: Message) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await tokens(stub, message)
    return from_rpc_error(caught.value)


async def states(stub: "Stub") -> dict[str, int]:
    listed = await stub.ListRequests(scheduler_pb2.SchedulerServiceListRequestsRequest())
    return {one.request_id: one.state for one in listed.requests}


async def test_a_request_waits_for_its_grammar_and_others_do_not() -> None:
    grammars = SlowGrammars()
    async with serving(grammars) as (running, fake):
        waiting = asyncio.create_task(tokens(running.stub, asking(request_id="waits")))
        await until(lambda: bool(grammars.asked), "the question")
        assert await states(running.stub) == {"waits": scheduler_pb2.REQUEST_STATE_GRAMMAR}
        assert await tokens(running.stub, request(6)) == expected(6)
        assert not waiting.done()
        grammars.release()
        assert await waiting == expected(8)
        assert await states(running.stub) == {}
        new = [piece.new for step in fake.runner.steps for piece in step.slices if piece.new is not None]
        assert [one.sampling.grammar for one in new] == [None, grammars.asked[0][0]]
        await running.drained()


async def test_a_grammar_that_cannot_be_compiled_is_refused() -> None:
    grammars = SlowGrammars(held=False, problem="no text matches it")
    async with serving(grammars) as (running, _):
        error = await failure(running.stub, asking())
        assert (type(error).__name__, error.reason, error.field) == (
            "InvalidArgument",
            "INVALID_GRAMMAR",
            "sampling.grammar",
        )
        assert "no text matches it" in error.message
        await running.drained()


async def test_too_many_grammars_are_told_when_to_come_again() -> None:
    grammars = SlowGrammars(busy=True)
    async with serving(grammars) as (running, _):
        error = await failure(running.stub, asking())
        assert (type(error).__name__, error.reason) == ("ResourceExhausted", "GRAMMARS_BUSY")
        assert error.retry_after_s is not None


async def test_time_limits_hold_while_the_grammar_is_compiled() -> None:
    grammars = SlowGrammars()
    async with serving(grammars) as (running, fake):
        for kind in ("queue", "first_token", "total"):
            message = asking()
            setattr(message.limits, f"{kind}_ns", 50_000_000)
            began = time.monotonic()
            error = await failure(running.stub, message)
            assert type(error).__name__ == "DeadlineExceeded"
            assert error.metadata["limit_kind"] == kind
            assert error.metadata["phase"] == "grammar"
            assert time.monotonic() - began < 5
        assert fake.runner.count == 0
        await running.drained()


async def test_a_caller_that_leaves_and_an_abort_end_the_wait() -> None:
    grammars = SlowGrammars()
    async with serving(grammars) as (running, fake):
        call = running.stub.Generate(asking(request_id="gone"))
        await until(lambda: bool(grammars.asked), "the question")
        call.cancel()
        await until(lambda: not running.grammars.waiting(), "the end of the wait")
        aborted = asyncio.create_task(failure(running.stub, asking(request_id="aborted")))
        await until(lambda: len(grammars.asked) == 2, "the question")
        context = common_pb2.RequestContext(request_id="aborted")
        await running.stub.Abort(scheduler_pb2.SchedulerServiceAbortRequest(context=context))
        grammars.release()
        assert type(await aborted).__name__ == "Cancelled"
        assert fake.runner.count == 0
        await running.drained()


async def test_without_an_executor_that_serves_grammars_they_are_refused_by_name() -> None:
    async with serving(None) as (running, _):
        error = await failure(running.stub, asking())
        assert (type(error).__name__, error.field) == ("Unimplemented", "sampling.grammar")


async def test_a_wait_ends_with_its_executor_and_the_next_one_is_asked_before_any_step() -> None:
    grammars = SlowGrammars()
    async with serving(grammars) as (running, fake):
        waiting = asyncio.create_task(tokens(running.stub, asking(max_tokens=20)))
        await until(lambda: bool(grammars.asked), "the question")
        fake.service.evict(Unavailable("the executor is gone"))
        assert await waiting == expected(20)
        assert len(grammars.asked) == 2, "it was live when the next one came, and did not wait for the answer"
        fake.runner.faults = Faults(delay_s=0.02)
        grammars.held = False
        running_on = asyncio.create_task(tokens(running.stub, asking(max_tokens=20)))
        await until(lambda: len(fake.runner.steps) > 25, "tokens")
        count = len(grammars.asked)
        fake.service.evict(Unavailable("the executor is gone"))
        assert await running_on == expected(20)
        assert len(grammars.asked) == count + 1, "what is live is asked for again"
        await running.drained()


async def test_every_executor_that_serves_is_asked() -> None:
    one, two = SlowGrammars(), SlowGrammars()
    async with (
        running_executor("hash", CAPACITY, eos_token_ids=(), grammars=one, instance_id="one") as first,
        running_executor("hash", CAPACITY, eos_token_ids=(), grammars=two, instance_id="two") as second,
        many_lanes(first.target, second.target) as lanes,
    ):
        await until(lambda: all(not lease.state.reason for lease in lanes.leases), "both leases")
        async with make_channel(lanes.target) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            waiting = asyncio.create_task(tokens(stub, asking()))
            await until(lambda: bool(one.asked and two.asked), "both questions")
            one.release()
            await asyncio.sleep(0.05)
            assert first.runner.count == second.runner.count == 0
            two.release()
            assert await waiting == expected(8)


async def test_an_executor_without_grammars_says_so_when_asked() -> None:
    async with running_executor("hash", CAPACITY) as fake, owner_of(fake) as owner:
        await owner.claim()
        await owner.send(
            executor_pb2.ExecutorServiceRunRequest(
                prepare=executor_pb2.Prepare(
                    prepare_id=3, grammar=common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_JSON_OBJECT)
                )
            )
        )
        while (message := await owner.read()).WhichOneof("message") != "prepared":
            pass
        assert message.prepared == executor_pb2.Prepared(prepare_id=3, problem="this executor serves no grammars")
