"""The gateway alone, over a tokenizer's gRPC door: the remote engine, and the whole process."""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from gateway_support import (
    CHAT,
    COMPLETIONS,
    Gateway,
    Item,
    ScriptedEngine,
    accepted,
    answer,
    chat_body,
    delta,
    finished,
    prompt_body,
    sse,
)
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NoOpTracer

from services import errors, names
from services.gateway.engine import EngineCall
from services.gateway.remote import RemoteEngine
from services.health import Readiness, add_health
from services.rpc import Door as Ways
from services.rpc import bind, make_channel, make_server
from services.rpc_server import call_context
from tercet.v1 import tokenizer_pb2, tokenizer_pb2_grpc


@dataclass
class Door(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """A tokenizer's front door whose text comes from a script."""

    engine: ScriptedEngine
    metadata: list[dict[str, str]] = field(default_factory=list)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        call = call_context(context)
        self.metadata.append(dict(call.metadata))
        inner = EngineCall(call.request_id, None, None, call.context, 1.0, call.started_ns)
        events = self.engine.generate(request, inner)
        async with contextlib.aclosing(events):
            async for event in events:
                yield event

    async def Describe(self, request: Any, context: Any) -> Any:
        return await self.engine.describe()


@dataclass
class Chain:
    """door: behind `target`. gateway: an app whose remote engine asks it."""

    door: Door
    target: str
    readiness: Readiness
    remote: RemoteEngine
    gateway: Gateway


@contextlib.asynccontextmanager
async def chain(script: list[Item]) -> AsyncIterator[Chain]:
    door = Door(ScriptedEngine(script))
    readiness = Readiness(())
    readiness.set_ready()
    server = make_server(NoOpTracer())
    tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(door, server)
    add_health(server, readiness)
    target = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        async with make_channel(target, TracerProvider(shutdown_on_exit=False).get_tracer("t")) as channel:
            remote = RemoteEngine([Ways(target, channel, channel)])
            yield Chain(door, target, readiness, remote, Gateway(remote))  # type: ignore[arg-type]
    finally:
        await server.stop(None)


async def test_text_and_identity_travel() -> None:
    async with chain(answer("Hel", "lo")) as c:
        trace_id = "0af7651916cd43dd8448eb211c80319c"
        headers = {
            "x-request-id": "r-1",
            "tercet-tenant": "acme",
            "tercet-priority": "5",
            "traceparent": f"00-{trace_id}-b7ad6b7169203331-01",
        }
        response = await c.gateway.post(CHAT, chat_body(), headers)
        assert response.json()["choices"][0]["message"]["content"] == "Hello"
        (metadata,) = c.door.metadata
        assert metadata[names.MD_REQUEST_ID] == "r-1"
        assert metadata[names.MD_TENANT] == "acme"
        assert metadata[names.MD_PRIORITY] == "5"
        assert metadata[names.MD_TRACEPARENT].split("-")[1] == trace_id
        streamed = await c.gateway.post(CHAT, chat_body(stream=True))
        assert sse(streamed.text)[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InvalidArgument("no", field="sampling.max_tokens", limit=64), 400),
        (errors.Unimplemented("no", field="sampling.n"), 400),
        (errors.ResourceExhausted("full", retry_after_s=2.5), 429),
        (errors.DeadlineExceeded("late"), 504),
        (errors.Aborted("dead end"), 500),
    ],
)
async def test_a_refusal_keeps_its_kind_over_the_wire(error: errors.ServiceError, status: int) -> None:
    async with chain([accepted(), error]) as c:
        response = await c.gateway.post(CHAT, chat_body(stream=True))
        assert response.status_code == status
        got = response.json()["error"]
        assert got["message"] == error.message
        assert got["param"] == (error.field.removeprefix("sampling.") if error.field else None)
        assert response.headers.get("retry-after") == ("3" if error.retry_after_s else None)


async def test_a_lost_tokenizer_is_unavailable_and_says_so() -> None:
    async with make_channel("127.0.0.1:1") as channel:
        gateway = Gateway(RemoteEngine([Ways("127.0.0.1:1", channel, channel)]))  # type: ignore[arg-type]
        response = await gateway.post(CHAT, chat_body())
        assert response.status_code == 503
        async with gateway.client() as client:
            assert (await client.get("/v1/models")).status_code == 503
            ready = await client.get("/ready")
            assert ready.status_code == 503
            assert "does not answer" in ready.json()["reason"]
            assert (await client.get("/health")).status_code == 200


async def test_readiness_is_the_tokenizers() -> None:
    async with chain([]) as c:
        assert await c.remote.why_not_ready() is None
        c.readiness.set_not_ready("no executor")
        assert "no executor" in (await c.remote.why_not_ready() or "")
        assert (await c.remote.describe()).model.name == "toy"


@pytest.mark.parametrize("before", [[], [accepted()], [accepted(), delta("a")]], ids=["at once", "accepted", "decode"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_who_leaves_ends_the_work_at_the_tokenizer(before: list[Item], stream: bool) -> None:
    async with chain([*before, asyncio.Event()]) as c:
        asking = asyncio.ensure_future(c.gateway.post(CHAT, chat_body(stream=stream)))
        await asyncio.wait_for(c.door.engine.begun.wait(), 5)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.wait_for(c.door.engine.released.wait(), 5)
        assert c.door.engine.live == 0


async def test_a_generator_that_is_closed_cancels_the_call() -> None:
    async with chain([accepted(), delta("a"), asyncio.Event()]) as c:
        call = EngineCall("r", None, None, Context(), 10.0, 0)
        events = c.remote.generate(tokenizer_pb2.TokenizerServiceGenerateRequest(text="x"), call)
        assert (await anext(events)).HasField("accepted")
        await events.aclose()
        await asyncio.wait_for(c.door.engine.released.wait(), 5)


async def test_the_process_serves_drains_and_exits_with_zero() -> None:
    go_on = asyncio.Event()
    async with (
        chain([accepted(), delta("a"), go_on, delta("b"), finished()]) as c,
        _process(c.target) as (url, process),
    ):
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            assert (await client.get("/ready")).status_code == 200
            async with client.stream("POST", CHAT, json=chat_body(stream=True)) as response:
                parts = response.aiter_text()
                text = await anext(parts)
                process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.1)
                go_on.set()
                text += "".join([part async for part in parts])
            assert sse(text)[-1] == "[DONE]"
        assert await asyncio.wait_for(process.wait(), 20) == 0
        log = (await process.stderr.read()).decode()  # type: ignore[union-attr]
        assert '"message": "ended"' in log
        assert '"level": "error"' not in log


async def test_a_second_signal_cuts_what_does_not_end() -> None:
    async with chain([accepted(), delta("a"), asyncio.Event()]) as c, _process(c.target) as (url, process):
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            async with client.stream("POST", CHAT, json=chat_body(stream=True)) as response:
                parts = response.aiter_text()
                text = await anext(parts)
                process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.3)
                process.send_signal(signal.SIGTERM)
                text += "".join([part async for part in parts])
            assert sse(text)[-1]["error"]["code"] == "shutting_down"
        assert await asyncio.wait_for(process.wait(), 20) == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["--http", "nowhere"], "nowhere"), (["--body-timeout-s", "0"], "--body-timeout-s"), (["--odd"], "--odd")],
)
async def test_a_setting_that_cannot_be_is_named(arguments: list[str], word: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gateway", *arguments, stderr=asyncio.subprocess.PIPE
    )
    _, told = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 2
    assert word in told.decode()


@contextlib.asynccontextmanager
async def _process(target: str) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.gateway", "--http", "127.0.0.1:0", "--tokenizer", target),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(30):
            line = await process.stderr.readline()
            while b'"listening"' not in line:
                assert line, "the gateway ended before it served"
                line = await process.stderr.readline()
        yield f"http://{json.loads(line)['address']}", process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def begun(*texts: str) -> list[Item]:
    """An answer that can go on elsewhere; each text has one id."""
    first = accepted()
    first.accepted.prompt_ids.extend([1, 2, 3])
    first.accepted.numerics = "n1"
    first.accepted.seed = 77
    return [first, *(delta(text) for text in texts)]


async def test_what_was_delivered_travels_to_the_next_tokenizer() -> None:
    dead = errors.Unavailable("it drains", reason="DRAINING")
    async with chain([*begun("Hel"), dead]) as first, chain([*begun("lo"), finished()]) as second:
        async with make_channel(first.target) as one, make_channel(second.target) as other:
            engine = RemoteEngine([Ways(first.target, one, one), Ways(second.target, other, other)])
            asked: list[Any] = []
            for door in (first.door, second.door):
                generate = door.engine.generate

                def note(request: Any, call: Any, generate: Any = generate) -> Any:
                    asked.append(request)
                    return generate(request, call)

                door.engine.generate = note  # type: ignore[method-assign]
            # Which of the two has a request is by its id: one that the first has.
            for number in range(50):
                asked.clear()
                response = await Gateway(engine).post(CHAT, chat_body(), {"x-request-id": f"r{number}"})  # type: ignore[arg-type]
                if len(asked) == 2:
                    break
            assert response.json()["choices"][0]["message"]["content"] == "Hello"
            before, after = asked
            assert before.return_prompt_ids
            assert before.HasField("chat")
            assert not after.HasField("chat")
            assert (after.context.attempt, after.sampling.seed) == (2, 77)
            assert list(after.resume.prompt_ids) == [1, 2, 3]
            assert list(after.resume.output_ids) == list(delta("Hel").delta.token_ids)
            assert (after.resume.chars_delivered, after.resume.numerics) == (3, "n1")


async def test_each_of_several_answers_goes_on_and_the_prompts_logprobs_come_once() -> None:
    def scored(*texts: str, first: str | None = None) -> Any:
        entries = [tokenizer_pb2.TextLogprob(text=text, logprob=-1.0) for text in texts]
        told = tokenizer_pb2.TextPromptLogprobs(logprobs=[tokenizer_pb2.TextLogprobs(drawn=one) for one in entries])
        if first is not None:
            told.first.text = first
        return tokenizer_pb2.TokenizerServiceGenerateResponse(prompt_logprobs=told)

    def script(*events: Any) -> list[Any]:
        return [*begun(), *events]

    echoes = [delta("abc", (), index) for index in range(2)]
    whole = [scored("b", first="a"), scored("c"), *echoes]
    dead = errors.Unavailable("it drains", reason="DRAINING")
    ends = [delta("e", (5,), 0), delta("E", (6,), 1), finished(tokens=1, index=0), finished(tokens=2, index=1)]
    cuts: list[tuple[list[Any], list[Any]]] = [
        (script(scored("b", first="a"), dead), script(*whole, delta("d", (4,), 1), *ends)),
        (script(*whole, delta("d", (4,), 1), dead), script(*ends)),
        (script(*whole, delta("d", (4,), 1), *ends[:3], dead), script(ends[3])),
    ]
    body = prompt_body(n=2, echo=True, logprobs=0, max_tokens=2)
    for before, after in cuts:
        async with chain(before) as first, chain(after) as second:
            async with make_channel(first.target) as one, make_channel(second.target) as other:
                engine = RemoteEngine([Ways(first.target, one, one), Ways(second.target, other, other)])
                for number in range(50):  # one that the first has
                    response = await Gateway(engine).post(COMPLETIONS, body, {"x-request-id": f"r{number}"})  # type: ignore[arg-type]
                    if second.door.engine.requests and first.door.engine.requests:
                        break
                    second.door.engine.requests.clear()
                choices = response.json()["choices"]
                assert [choice["text"] for choice in choices] == ["abce", "abcdE"]
                assert [choice["logprobs"]["tokens"] for choice in choices] == [["a", "b", "c"]] * 2
                told = second.door.engine.requests[-1].resume
                assert told.others[0].chars_delivered in (0, 4, 5)
                assert told.finished == (before[-2] is ends[2])


async def test_an_answer_of_a_tokenizer_that_tells_no_ids_ends_with_it() -> None:
    dead = errors.Unavailable("it drains", reason="DRAINING")
    async with chain([accepted(), delta("a"), dead]) as c:
        response = await c.gateway.post(CHAT, chat_body())
        assert response.status_code == 503
        assert len(c.door.metadata) == 1
