"""Streams of both clients against a scripted server: deltas, answers, cancelling, abandoning, deadlines."""

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from scripted_tokenizer import (
    CLIENTS,
    Driver,
    Event,
    ScriptedTokenizer,
    accepted,
    delta,
    driving,
    fails,
    finished,
    plays,
    serving,
)

import tercet
from tercet.v1 import common_pb2


@pytest.fixture
async def service() -> ScriptedTokenizer:
    return ScriptedTokenizer()


@pytest.fixture(params=sorted(CLIENTS))
async def driver(request: pytest.FixtureRequest, service: ScriptedTokenizer) -> AsyncIterator[Driver]:
    async with serving(service) as target, driving(request.param, target) as driver:
        yield driver


async def _endless(request: Any, context: Any) -> AsyncIterator[Event]:
    yield accepted()
    yield delta("a", 1)
    await asyncio.Event().wait()


async def _silent(request: Any, context: Any) -> AsyncIterator[Event]:
    await asyncio.Event().wait()
    yield accepted()


async def test_deltas_then_usage(driver: Driver, service: ScriptedTokenizer) -> None:
    service.scripts.append(
        plays(accepted(model="m", request_id="mine"), delta("Par", 5), delta("is", 6), finished(delivered=2))
    )
    stream = await driver.call("chat", [{"role": "user", "content": "Capital?"}], request_id="mine", temperature=0)
    assert stream.usage is None
    assert stream.finish_reason is None
    assert await driver.next(stream) == tercet.Delta("Par", (5,))
    assert await driver.next(stream) == tercet.Delta("is", (6,))
    assert await driver.next(stream) is None
    assert await driver.next(stream) is None
    assert await driver.on(stream, "text") == "Paris"
    assert stream.finish_reason is tercet.FinishReason.STOP
    assert stream.usage == tercet.Usage(prompt_tokens=3, delivered_tokens=2, sampled_tokens=3, discarded_tokens=1)
    assert stream.timings == tercet.Timings(first_token=1.5, total=2.0)
    assert (stream.request_id, stream.seed, stream.attempt) == ("mine", 7, 1)
    assert stream.accepted is not None
    assert stream.accepted.model == "m"


async def test_two_answers_by_index(driver: Driver, service: ScriptedTokenizer) -> None:
    length = common_pb2.FINISH_REASON_LENGTH
    service.scripts.append(
        plays(
            accepted(),
            delta("b", 2, index=1),
            delta("a", 1),
            finished(0, delivered=1),
            delta("B", 3, index=1),
            finished(1, length),
        )
    )
    stream = await driver.call("generate", "x", n=2)
    first, second = await driver.on(stream, "collect")
    assert (first.text, first.token_ids, first.finish_reason) == ("a", (1,), tercet.FinishReason.STOP)
    assert (second.text, second.token_ids, second.finish_reason) == ("bB", (2, 3), tercet.FinishReason.LENGTH)
    assert await driver.on(stream, "text", 1) == "bB"
    assert stream.usage == tercet.Usage(prompt_tokens=3, delivered_tokens=3, sampled_tokens=5, discarded_tokens=2)


async def test_unicode_both_ways(driver: Driver, service: ScriptedTokenizer) -> None:
    text = "Größe 🦜 हिन्दी \u0000 e\u0301"
    service.scripts.append(plays(accepted(), delta(text), delta(""), delta("🏳️‍🌈"), finished()))
    stream = await driver.call("generate", text)
    assert await driver.on(stream, "text") == text + "🏳️‍🌈"
    assert service.requests[0].text == text


@pytest.mark.parametrize("how", ["cancel", "block", "garbage"])
async def test_leaving_a_stream_ends_it_on_the_server(driver: Driver, service: ScriptedTokenizer, how: str) -> None:
    service.scripts.append(_endless)
    stream = await driver.call("generate", "x")
    assert await driver.next(stream) == tercet.Delta("a", (1,))
    match how:
        case "cancel":
            await driver.on(stream, "cancel")
        case "block" if isinstance(stream, tercet.AsyncStream):
            async with stream:
                pass
        case "block":
            with stream:
                pass
        case "garbage":
            del stream
            gc.collect()
    await asyncio.wait_for(service.cancelled.acquire(), 10)
    if how != "garbage":
        with pytest.raises(tercet.RequestCancelledError):
            await driver.on(stream, "text")


async def test_a_stream_never_read_ends_with_its_last_reference(driver: Driver, service: ScriptedTokenizer) -> None:
    service.scripts.append(_silent)
    stream = await driver.call("generate", "x")
    await asyncio.wait_for(service.arrived.acquire(), 10)
    del stream
    gc.collect()
    await asyncio.wait_for(service.cancelled.acquire(), 10)


async def test_cancel_wakes_the_reader(driver: Driver, service: ScriptedTokenizer) -> None:
    service.scripts.append(_silent)
    stream = await driver.call("generate", "x")
    reader = asyncio.ensure_future(driver.next(stream))
    await asyncio.wait_for(service.arrived.acquire(), 10)
    await driver.on(stream, "cancel")
    with pytest.raises(tercet.RequestCancelledError):
        await asyncio.wait_for(reader, 10)
    await driver.on(stream, "cancel")


async def test_cancelling_the_reading_task_is_asyncios_own_error(service: ScriptedTokenizer) -> None:
    service.scripts.append(_silent)
    async with serving(service) as target, tercet.AsyncClient(target) as client:
        task = asyncio.ensure_future(client.generate("x").text())
        await asyncio.wait_for(service.arrived.acquire(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(service.cancelled.acquire(), 10)


async def test_closing_the_client_ends_its_streams(driver: Driver, service: ScriptedTokenizer) -> None:
    service.scripts.append(_endless)
    stream = await driver.call("generate", "x")
    assert await driver.next(stream) is not None
    reader = asyncio.ensure_future(driver.next(stream))
    await asyncio.sleep(0.05)
    await driver.close()
    with pytest.raises(tercet.RequestCancelledError):
        await asyncio.wait_for(reader, 10)
    with pytest.raises(tercet.FailedPreconditionError, match="closed"):
        await driver.call("generate", "x")


async def test_closing_the_client_ends_its_unary_calls(driver: Driver, service: ScriptedTokenizer) -> None:
    service.unary_hangs = True
    call = asyncio.ensure_future(driver.call("tokenize", "x"))
    await asyncio.wait_for(service.arrived.acquire(), 10)
    await driver.close()
    with pytest.raises(tercet.RequestCancelledError):
        await asyncio.wait_for(call, 10)


async def test_deadline_is_an_error_that_stays(driver: Driver, service: ScriptedTokenizer) -> None:
    service.scripts.append(_endless)
    stream = await driver.call("generate", "x", timeout=0.5)
    assert await driver.next(stream) is not None
    for _ in range(2):
        with pytest.raises(tercet.DeadlineExceededError) as caught:
            await driver.on(stream, "text")
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.request_id == stream.request_id
    assert [answer.text for answer in stream.answers] == ["a"]


async def test_all_deltas_before_a_failure_are_delivered(driver: Driver, service: ScriptedTokenizer) -> None:
    events = [delta(str(number)) for number in range(50)]
    service.scripts.append(fails(grpc.StatusCode.INTERNAL, "NaN", accepted(), *events))
    stream = await driver.call("generate", "x")
    await asyncio.sleep(0.2)
    for number in range(50):
        assert await driver.next(stream) == tercet.Delta(str(number))
    with pytest.raises(tercet.InternalError, match="NaN"):
        await driver.next(stream)


@pytest.mark.parametrize(
    ("events", "what"),
    [
        ((accepted(), delta("a")), "ended before answer 0"),
        ((accepted(), delta("a", index=1)), "no answer 1"),
        ((accepted(), finished(), delta("a")), "after its end"),
        ((accepted(), finished(reason=common_pb2.FINISH_REASON_UNSPECIFIED)), "finish reason 0"),
        ((), "ended before answer 0"),
    ],
)
async def test_a_server_that_breaks_the_contract(
    driver: Driver, service: ScriptedTokenizer, events: tuple[Event, ...], what: str
) -> None:
    service.scripts.append(plays(*events))
    stream = await driver.call("generate", "x")
    with pytest.raises(tercet.InternalError, match=what) as caught:
        await driver.on(stream, "text")
    assert caught.value.reason == "CONTRACT_BROKEN"


async def test_an_event_of_a_newer_contract_is_skipped(driver: Driver, service: ScriptedTokenizer) -> None:
    service.scripts.append(plays(accepted(), Event.FromString(b"\x7a\x00"), delta("a"), finished()))
    assert await driver.on(await driver.call("generate", "x"), "text") == "a"


async def test_unix_socket(service: ScriptedTokenizer, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("s") / "t.sock"
    service.scripts.extend([plays(accepted(), delta("a"), finished())] * 2)
    async with serving(service, f"unix:{path}") as target:
        for kind in CLIENTS:
            async with driving(kind, target) as driver:
                assert await driver.on(await driver.call("generate", "x"), "text") == "a"


async def test_a_client_of_one_loop_is_refused_in_another(service: ScriptedTokenizer) -> None:
    async with serving(service) as target, tercet.AsyncClient(target) as client:
        await client.tokenize("x")
        with pytest.raises(tercet.FailedPreconditionError, match="event loop"):
            await asyncio.to_thread(lambda: asyncio.run(client.tokenize("x")))
