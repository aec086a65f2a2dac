"""The suites of scheduler and tokenizer: ours pass, and each check finds a server that is careless in its way."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest
from chain import CAPACITY, scheduler
from fake_stack import running_executor, until
from opentelemetry.trace import NoOpTracer
from resumable import running_edge
from tiny_tokenizer import tiny_model

from services.conform.__main__ import conform, main
from services.conform.kit import Outcome, Result, table
from services.conform.scheduler import CHECKS as OF_SCHEDULER
from services.conform.tokenizer import CHECKS as OF_TOKENIZER
from services.executor.fake import FakeRunner, Faults
from services.health import Readiness, add_health
from services.rpc import bind, make_channel, make_server
from tercet.v1 import (
    common_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

MODEL = tiny_model()
ROOMY = replace(CAPACITY, vocab_size=MODEL.vocab_size, total_blocks=2048, max_model_len=2048)
LIMIT_S = 8.0


@asynccontextmanager
async def stack(slow_s: float = 0.0) -> AsyncIterator[tuple[str, str]]:
    """Addresses of a scheduler and of a tokenizer before it."""
    runner = FakeRunner("hash", ROOMY, faults=Faults(delay_s=slow_s))
    async with (
        running_executor(runner=runner, tokenizer_hash=MODEL.hash, eos_token_ids=(1,)) as fake,
        scheduler(fake.target) as back,
    ):
        await until(lambda: not back.lease.state.reason, "the lease")
        async with running_edge(MODEL, back.target) as edge:
            yield back.target, edge.target
            await back.drained()
        assert not runner.violations


def failed(results: list[Result]) -> dict[str, str]:
    return {result.name: result.detail for result in results if result.outcome is Outcome.FAIL}


async def test_our_own_pass(capsys: pytest.CaptureFixture[str]) -> None:
    async with stack() as (back, edge):
        for kind, target, count in (("scheduler", back, len(OF_SCHEDULER)), ("tokenizer", edge, len(OF_TOKENIZER))):
            results = await conform(kind, target, limit_s=30)
            assert failed(results) == {}
            assert len(results) == count
            assert {result.outcome for result in results} == {Outcome.PASS}


async def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    async with stack() as (back, _):
        assert await asyncio.to_thread(main, ["scheduler", back, "--only", "describe,bad."]) == 0
        assert "21 passed, 0 failed" in capsys.readouterr().out
        assert await asyncio.to_thread(main, ["executor", back, "--limit-s", "2"]) == 2
        assert "UNIMPLEMENTED" in capsys.readouterr().err
        assert await asyncio.to_thread(main, ["scheduler", back, "--only", "nonsense"]) == 2
    assert main(["tokenizer"]) == 0
    assert "round-trip" in capsys.readouterr().out


def test_the_table_tells_reasons() -> None:
    lines = table(
        [
            Result("one", "a rule", Outcome.PASS, "", 0.1),
            Result("three", "another", Outcome.FAIL, "it did not", 0.2),
            Result("two", "a third", Outcome.NOT_APPLICABLE, "there is none", 0.0),
        ]
    )
    assert lines == [
        "pass  one    a rule  (0.10 s)",
        "FAIL  three  another  (0.20 s)",
        "             it did not",
        "n/a   two    a third  (0.00 s)",
        "             there is none",
        "1 passed, 1 failed, 1 not applicable",
    ]


@dataclass
class Careless:
    """Stands before a good server and spoils what goes through. ask: a request on its way in; tell: an event on its way
    out, as what is told instead. told: every other answer, likewise."""

    ask: Callable[[Any], Any] = lambda message: message
    tell: Callable[[Any], list[Any]] = lambda event: [event]
    told: Callable[[str, Any, Any], Any] = lambda method, request, answer: answer
    shields: bool = False  # goes on with what its caller has left
    healthy: bool = True
    running: list[asyncio.Task[None]] = field(default_factory=list)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        events: asyncio.Queue[Any] = asyncio.Queue()

        async def pump() -> None:
            try:
                async for event in self.stub.Generate(self.ask(request), timeout=context.time_remaining()):
                    await events.put(event)
                await events.put(None)
            except grpc.aio.AioRpcError as error:
                await events.put(error)

        task = asyncio.create_task(pump())
        self.running.append(task)
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, grpc.aio.AioRpcError):
                    await context.abort(event.code(), event.details() or "", event.trailing_metadata())
                for one in self.tell(event):
                    yield one
        finally:
            if not self.shields:
                task.cancel()

    def __getattr__(self, name: str) -> Any:
        if name == "GetTokenizer":
            return self._archive
        if not name[0].isupper():
            raise AttributeError(name)

        async def call(request: Any, context: Any) -> Any:
            try:
                answer = await getattr(self.stub, name)(request, timeout=10)
            except grpc.aio.AioRpcError as error:
                lenient = self.told(name, request, None)
                if lenient is None:
                    await context.abort(error.code(), error.details() or "", error.trailing_metadata())
                return lenient
            return self.told(name, request, answer)

        return call

    async def _archive(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for piece in self.stub.GetTokenizer(request, timeout=10):
            yield self.told("GetTokenizer", request, piece)

    @asynccontextmanager
    async def before(self, kind: str, target: str) -> AsyncIterator[str]:
        module: Any = {"scheduler": scheduler_pb2_grpc, "tokenizer": tokenizer_pb2_grpc}[kind]
        server = make_server(NoOpTracer())
        getattr(module, f"add_{kind.capitalize()}ServiceServicer_to_server")(self, server)
        if self.healthy:
            readiness = Readiness((f"tercet.v1.{kind.capitalize()}Service",))
            readiness.set_ready()
            add_health(server, readiness)
        async with make_channel(target) as channel:
            self.stub = getattr(module, f"{kind.capitalize()}ServiceStub")(channel)
            address = bind(server, "127.0.0.1:0")
            await server.start()
            try:
                yield address
            finally:
                await server.stop(0)
                for task in self.running:
                    task.cancel()
                await asyncio.gather(*self.running, return_exceptions=True)


def without(kind: str) -> Callable[[Any], list[Any]]:
    return lambda event: [] if event.WhichOneof("event") == kind else [event]


def on(kind: str, change: Callable[[Any], None]) -> Callable[[Any], list[Any]]:
    """Events of one kind, changed."""

    def tell(event: Any) -> list[Any]:
        if event.WhichOneof("event") == kind:
            change(getattr(event, kind))
        return [event]

    return tell


def forgets(*names: str) -> Callable[[Any], Any]:
    """Requests lose fields, given as paths."""

    def ask(message: Any) -> Any:
        for name in names:
            *path, last = name.split(".")
            at = message
            for part in path:
                at = getattr(at, part)
            at.ClearField(last)
        return message

    return ask


def any_scheduler_request(message: Any) -> Any:
    """Whatever was asked for, something simple is asked for instead."""
    return scheduler_pb2.SchedulerServiceGenerateRequest(
        prompt_ids=[5, 6, 7], sampling=common_pb2.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    )


def any_text_request(message: Any) -> Any:
    return tokenizer_pb2.TokenizerServiceGenerateRequest(
        text="he", sampling=common_pb2.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    )


class Counting:
    """Adds to each token how many came before it, of whatever request."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, event: Any) -> list[Any]:
        if event.WhichOneof("event") == "delta":
            self.count += 1
            event.delta.token_ids[:] = [(one + self.count) % MODEL.vocab_size for one in event.delta.token_ids]
        return [event]


def wrong_usage(finished: Any) -> None:
    finished.usage.sampled_tokens += 1


def no_stop(finished: Any) -> None:
    finished.reason = common_pb2.FINISH_REASON_LENGTH


def lies(method: str, request: Any, answer: Any) -> Any:
    """A right answer with one thing wrong; where there was a refusal, an empty answer."""
    match method:
        case "Describe" if answer is not None:
            answer.numerics = ""
        case "Abort" | "Stop" if answer is not None:
            answer.was_live = not answer.was_live
        case "ListRequests" if answer is None:
            return scheduler_pb2.SchedulerServiceListRequestsResponse()
        case "Stop":
            return scheduler_pb2.SchedulerServiceStopResponse()
        case "Detokenize":
            return tokenizer_pb2.TokenizerServiceDetokenizeResponse(text="x")
        case "Tokenize":
            answer.pieces[:] = answer.pieces[1:]
        case "RenderChat":
            return tokenizer_pb2.TokenizerServiceRenderChatResponse(text="x")
        case "GetTokenizer":
            answer.chunk += b"x"
    return answer


SCHEDULER_BAD = {check.name for check in OF_SCHEDULER if check.name.startswith("bad.")}
TOKENIZER_BAD = {check.name for check in OF_TOKENIZER if check.name.startswith("bad.")}
BROKEN: dict[str, dict[str, tuple[Careless, set[str]]]] = {
    "scheduler": {
        "asks for something else": (
            Careless(any_scheduler_request),
            SCHEDULER_BAD | {"accepted", "id.in-use", "id.superseded", "abort", "abort.early", "metadata", "resume"},
        ),
        "does not go on": (Careless(forgets("resume")), {"resume", "resume.numerics"}),
        "draws a seed to go on": (
            Careless(lambda message: any_scheduler_request(message) if message.HasField("resume") else message),
            {"resume.seed"},
        ),
        "forgets limits": (Careless(forgets("limits")), {"bad.limit-0", "accepted", "limit"}),
        "cuts by itself": (
            Careless(tell=on("finished", lambda one: setattr(one, "reason", common_pb2.FINISH_REASON_STOP))),
            {"usage"},
        ),
        "no Accepted": (Careless(tell=without("accepted")), {"accepted", "usage", "same"}),
        "no end": (Careless(tell=without("finished")), {"usage"}),
        "wrong usage": (Careless(tell=on("finished", wrong_usage)), {"usage"}),
        "one id for all": (
            Careless(tell=on("accepted", lambda one: setattr(one, "request_id", "same"))),
            {"drawn", "accepted"},
        ),
        "draws by the clock": (Careless(tell=Counting()), {"same", "drawn", "resume"}),
        "stops otherwise": (Careless(tell=on("finished", no_stop)), {"stop"}),
        "keeps what was left": (Careless(shields=True), {"cancel"}),
        "lies": (Careless(told=lies), {"describe", "abort", "abort.early", "stop.reason", "pages"}),
        "no health": (Careless(healthy=False), {"health"}),
    },
    "tokenizer": {
        "asks for something else": (
            Careless(any_text_request),
            TOKENIZER_BAD | {"accepted", "usage", "stop", "metadata", "model", "resume"},
        ),
        "draws by the clock": (Careless(tell=Counting()), {"deltas", "prompt-ids", "resume"}),
        "loses text": (
            Careless(tell=on("delta", lambda one: setattr(one, "text", one.text[1:]))),
            {"deltas"},
        ),
        "cuts by itself": (
            Careless(tell=on("finished", lambda one: setattr(one, "reason", common_pb2.FINISH_REASON_STOP))),
            {"usage"},
        ),
        "forgets limits": (Careless(forgets("limits")), {"limit"}),
        "forgets stops": (Careless(forgets("stop")), {"stop", "bad.stop-empty", "bad.stop-long", "bad.stop-many"}),
        "keeps what was left": (Careless(shields=True), {"cancel"}),
        "lies": (Careless(told=lies), {"describe", "round-trip", "pieces", "ids", "deltas", "archive", "chat"}),
        "no health": (Careless(healthy=False), {"health"}),
    },
}
CASES = [(kind, name) for kind, cases in BROKEN.items() for name in cases]


@pytest.mark.parametrize(("kind", "checks"), [("scheduler", OF_SCHEDULER), ("tokenizer", OF_TOKENIZER)])
def test_every_check_is_seen_to_fail(kind: str, checks: Any) -> None:
    names = [check.name for check in checks]
    assert set().union(*(found for _, found in BROKEN[kind].values())) == set(names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("kind", "name"), CASES)
async def test_a_careless_server_is_found_out(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("kit", "asking", "scheduler", "tokenizer"):
        monkeypatch.setattr(f"services.conform.{module}.ANSWER_S", 1.0)
    careless, expected = BROKEN[kind][name]
    async with stack(slow_s=0.002) as (back, edge):
        async with careless.before(kind, {"scheduler": back, "tokenizer": edge}[kind]) as target:
            results = await conform(kind, target, only=sorted(expected), limit_s=LIMIT_S)
        asked = {result.name for result in results if result.name in expected}
        assert {name for name in failed(results) if name in expected} == asked == expected
