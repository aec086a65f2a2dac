"""When the clients send again, and when they must not."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st
from scripted_tokenizer import (
    CLIENTS,
    Driver,
    ScriptedTokenizer,
    accepted,
    delta,
    driving,
    fails,
    finished,
    plays,
    retry_info,
    serving,
)

import tercet
from tercet._retry import Retries
from tercet.errors import from_status

FAST = tercet.RetryPolicy(attempts=4, initial_backoff=0.01, max_backoff=0.02)
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
async def service() -> ScriptedTokenizer:
    return ScriptedTokenizer()


@pytest.fixture(params=sorted(CLIENTS))
async def driver(request: pytest.FixtureRequest, service: ScriptedTokenizer) -> AsyncIterator[Driver]:
    async with serving(service) as target, driving(request.param, target, retry=FAST) as driver:
        yield driver


async def test_unavailable_before_the_first_delta_is_sent_again(driver: Driver, service: ScriptedTokenizer) -> None:
    service.scripts.extend(
        [
            fails(UNAVAILABLE),
            fails(UNAVAILABLE, "scripted", accepted(seed=1)),
            plays(accepted(seed=2), delta("a"), finished()),
        ]
    )
    stream = await driver.call("generate", "x", timeout=30)
    assert await driver.on(stream, "text") == "a"
    assert [request.context.attempt for request in service.requests] == [1, 2, 3]
    assert {request.context.request_id for request in service.requests} == {stream.request_id}
    assert {metadata["tercet-request-id"] for metadata in service.metadata} == {stream.request_id}
    assert (stream.attempt, stream.seed) == (3, 2)


@pytest.mark.parametrize("events", [(delta("a"),), (delta(""),)])
async def test_never_after_a_delta(driver: Driver, service: ScriptedTokenizer, events: tuple[object, ...]) -> None:
    service.scripts.extend([fails(UNAVAILABLE, "gone", accepted(), *events), plays(accepted(), delta("b"), finished())])
    stream = await driver.call("generate", "x")
    with pytest.raises(tercet.UnavailableError, match="gone") as caught:
        await driver.on(stream, "text")
    assert caught.value.retryable
    assert caught.value.details.attempts == 1
    assert len(service.requests) == 1


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code not in (grpc.StatusCode.OK, UNAVAILABLE)])
async def test_no_other_status_is_sent_again(driver: Driver, service: ScriptedTokenizer, code: grpc.StatusCode) -> None:
    service.scripts.append(fails(code, details=(retry_info(1),)))
    with pytest.raises(tercet.TercetError) as caught:
        await driver.on(await driver.call("generate", "x"), "text")
    assert caught.value.code == code.name
    assert len(service.requests) == 1


async def test_gives_up_after_the_last_attempt(driver: Driver, service: ScriptedTokenizer) -> None:
    service.scripts.extend([fails(UNAVAILABLE, f"try {number}") for number in (1, 2, 3, 4, 5)])
    with pytest.raises(tercet.UnavailableError, match="try 4") as caught:
        await driver.on(await driver.call("generate", "x"), "text")
    assert caught.value.details.attempts == 4


async def test_unary_calls_are_sent_again_too(driver: Driver, service: ScriptedTokenizer) -> None:
    service.unary_failures.extend([UNAVAILABLE, UNAVAILABLE])
    assert await driver.call("tokenize", "ab") == [97, 98]
    assert len({metadata["tercet-request-id"] for metadata in service.metadata}) == 1
    service.unary_failures.extend([UNAVAILABLE] * 4)
    with pytest.raises(tercet.UnavailableError) as caught:
        await driver.call("tokenize", "ab", request_id="t")
    assert (caught.value.request_id, caught.value.details.attempts) == ("t", 4)


async def test_a_server_that_comes_late_is_reached(service: ScriptedTokenizer) -> None:
    async with serving(ScriptedTokenizer()) as target:
        pass
    policy = tercet.RetryPolicy(attempts=100, initial_backoff=0.05, max_backoff=0.1)
    for kind in CLIENTS:
        service.scripts.append(plays(accepted(), delta("a"), finished()))
        async with driving(kind, target, retry=policy) as driver:
            stream = await driver.call("generate", "x")
            reader = asyncio.ensure_future(driver.on(stream, "text"))
            await asyncio.sleep(0.2)
            async with serving(service, target):
                assert await reader == "a"
        assert stream.attempt > 1


async def test_a_wait_beyond_the_deadline_is_not_begun(driver: Driver, service: ScriptedTokenizer) -> None:
    service.scripts.append(fails(UNAVAILABLE, "later", details=(retry_info(60_000),)))
    with pytest.raises(tercet.UnavailableError, match="later") as caught:
        await driver.on(await driver.call("generate", "x", timeout=30), "text")
    assert caught.value.retry_after == 60


async def test_all_tries_share_one_deadline(service: ScriptedTokenizer) -> None:
    policy = tercet.RetryPolicy(initial_backoff=0.5)
    for kind in CLIENTS:
        service.time_left.clear()
        service.scripts.extend([fails(UNAVAILABLE), plays(accepted(), finished())])
        async with serving(service) as target, driving(kind, target, retry=policy) as driver:
            await driver.on(await driver.call("generate", "x", timeout=5), "text")
        first, second = service.time_left
        assert first is not None
        assert second is not None
        # gRPC rounds what it sends to about 1 %.
        assert 0 < second < first - 0.2 <= 5


@pytest.mark.parametrize("opted_in", [False, True])
async def test_resource_exhausted_only_where_opted_in(service: ScriptedTokenizer, opted_in: bool) -> None:
    policy = tercet.RetryPolicy(attempts=3, initial_backoff=0.01, resource_exhausted=opted_in)
    for kind in CLIENTS:
        service.requests.clear()
        service.scripts.clear()
        full = fails(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", details=(retry_info(20),))
        service.scripts.extend([full, plays(accepted(), delta("a"), finished())])
        async with serving(service) as target, driving(kind, target, retry=policy) as driver:
            stream = await driver.call("generate", "x")
            if opted_in:
                assert await driver.on(stream, "text") == "a"
            else:
                with pytest.raises(tercet.ResourceExhaustedError) as caught:
                    await driver.on(stream, "text")
                assert caught.value.retry_after == 0.02
                assert caught.value.retryable
        assert len(service.requests) == (2 if opted_in else 1)


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_cancel_ends_the_wait_between_tries(service: ScriptedTokenizer, how: str) -> None:
    policy = tercet.RetryPolicy(initial_backoff=60, max_backoff=60)
    for kind in CLIENTS:
        service.scripts.append(fails(UNAVAILABLE))
        async with serving(service) as target, driving(kind, target, retry=policy) as driver:
            stream = await driver.call("generate", "x")
            reader = asyncio.ensure_future(driver.on(stream, "text"))
            await asyncio.wait_for(service.arrived.acquire(), 10)
            await asyncio.sleep(0.1)
            await (driver.on(stream, "cancel") if how == "cancel" else driver.close())
            with pytest.raises(tercet.RequestCancelledError):
                await asyncio.wait_for(reader, 10)
    assert len(service.requests) == 2


@given(
    attempts=st.integers(1, 200),
    initial=st.floats(0.001, 10),
    times=st.floats(1, 1000),
    limit=st.floats(0.001, 1000),
    jitter=st.floats(0, 1, exclude_max=True),
    asked=st.none() | st.integers(0, 10_000),
)
def test_retries_are_bounded(
    attempts: int, initial: float, times: float, limit: float, jitter: float, asked: int | None
) -> None:
    policy = tercet.RetryPolicy(attempts=attempts, initial_backoff=initial, max_backoff=initial * times)
    retries = Retries(policy, deadline=limit)
    status = _status(asked)
    error = from_status("UNAVAILABLE", "", status)
    now, waits = 0.0, 0
    while (delay := retries.after(error, now, jitter)) is not None:
        waits += 1
        assert delay <= max(policy.max_backoff * 1.2, error.retry_after or 0)
        assert delay >= min(policy.max_backoff, policy.initial_backoff) * 0.8
        now += delay
        assert now < limit
    assert waits < attempts
    assert retries.attempt == waits + 1


def _status(milliseconds: int | None) -> status_pb2.Status:
    status = status_pb2.Status()
    if milliseconds is not None:
        status.details.add().Pack(retry_info(milliseconds))
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="X"))
    return status
