"""A server that dies in the middle of an answer: the clients go on at the next one."""

from collections.abc import AsyncIterator

import grpc
import pytest
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
    serving,
)

import tercet

FAST = tercet.RetryPolicy(attempts=3, initial_backoff=0.01, max_backoff=0.02)
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
KNOWN = {"prompt_ids": [4, 5, 6], "numerics": "n1"}


@pytest.fixture
async def service() -> ScriptedTokenizer:
    return ScriptedTokenizer()


@pytest.fixture(params=sorted(CLIENTS))
async def driver(request: pytest.FixtureRequest, service: ScriptedTokenizer) -> AsyncIterator[Driver]:
    async with serving(service) as target, driving(request.param, target, retry=FAST) as driver:
        yield driver


async def test_the_next_try_says_all_that_is_needed_to_go_on(driver: Driver, service: ScriptedTokenizer) -> None:
    service.scripts.extend(
        [
            fails(UNAVAILABLE, "gone", accepted(seed=9, **KNOWN), delta("aé", 7, 8), delta("", 9), delta("z")),
            fails(UNAVAILABLE, "gone", accepted(seed=9, **KNOWN), delta("b", 10)),
            plays(accepted(seed=9, **KNOWN), delta("c", 11), finished()),
        ]
    )
    stream = await driver.call("chat", [{"role": "user", "content": "x"}], temperature=0.5, stop="q", timeout=30)
    assert await driver.on(stream, "text") == "aézbc"
    assert stream.answers[0].token_ids == (7, 8, 9, 10, 11)
    first, second, third = service.requests
    assert first.return_prompt_ids
    assert not first.HasField("resume")
    assert [request.context.attempt for request in service.requests] == [1, 2, 3]
    assert (second.resume.output_ids, second.resume.chars_delivered) == ([7, 8, 9], 3)
    assert (third.resume.output_ids, third.resume.chars_delivered) == ([7, 8, 9, 10], 4)
    for request in (second, third):
        assert (request.resume.prompt_ids, request.resume.numerics) == ([4, 5, 6], "n1")
        assert request.sampling.seed == 9
        assert request.WhichOneof("prompt") is None
        assert (request.sampling.temperature, list(request.stop)) == (0.5, ["q"])


async def test_the_bound_on_tries_counts_from_the_last_delta(driver: Driver, service: ScriptedTokenizer) -> None:
    service.scripts.extend(
        [fails(UNAVAILABLE, "gone", accepted(**KNOWN), delta(letter, number)) for number, letter in enumerate("abcdef")]
    )
    service.scripts.extend([fails(UNAVAILABLE, "away"), fails(UNAVAILABLE, "still away")])
    stream = await driver.call("generate", "x", timeout=30)
    with pytest.raises(tercet.UnavailableError, match="still away"):
        await driver.on(stream, "text")
    assert stream.answers[0].text == "abcdef"
    assert len(service.requests) == 8


async def test_other_numerics_end_it(driver: Driver, service: ScriptedTokenizer) -> None:
    service.scripts.extend(
        [
            fails(UNAVAILABLE, "gone", accepted(**KNOWN), delta("a", 1)),
            fails(grpc.StatusCode.ABORTED, "other numerics"),
        ]
    )
    with pytest.raises(tercet.AbortedError, match="other numerics"):
        await driver.on(await driver.call("generate", "x", timeout=30), "text")


@pytest.mark.parametrize(
    ("known", "options", "events"),
    [
        ({"numerics": "n1"}, {}, ()),
        ({"prompt_ids": [1]}, {}, ()),
        (KNOWN, {"n": 2}, ()),
        (KNOWN, {"n": 2}, (finished(),)),
    ],
)
async def test_what_can_not_go_on_fails(
    driver: Driver, service: ScriptedTokenizer, known: dict[str, object], options: dict[str, object], events: tuple
) -> None:
    service.scripts.append(fails(UNAVAILABLE, "gone", accepted(**known), delta("a", 1), *events))
    with pytest.raises(tercet.UnavailableError, match="gone"):
        await driver.on(await driver.call("generate", "x", timeout=30, **options), "text")
    assert len(service.requests) == 1


async def test_an_answer_that_has_ended_is_whole(driver: Driver, service: ScriptedTokenizer) -> None:
    service.scripts.append(fails(UNAVAILABLE, "gone", accepted(**KNOWN), delta("a", 1), finished()))
    stream = await driver.call("generate", "x", timeout=30)
    assert await driver.on(stream, "text") == "a"
    assert stream.finish_reason is tercet.FinishReason.STOP
    assert len(service.requests) == 1


@pytest.mark.parametrize("kind", sorted(CLIENTS))
async def test_it_can_be_turned_off(service: ScriptedTokenizer, kind: str) -> None:
    service.scripts.append(fails(UNAVAILABLE, "gone", accepted(**KNOWN), delta("a", 1)))
    async with serving(service) as target, driving(kind, target, retry=FAST, resume=False) as driver:
        with pytest.raises(tercet.UnavailableError, match="gone"):
            await driver.on(await driver.call("generate", "x", timeout=30), "text")
    assert len(service.requests) == 1
    assert not service.requests[0].HasField("return_prompt_ids")
    with pytest.raises(tercet.InvalidArgumentError, match="resume"):
        CLIENTS[kind]("localhost:1", resume="yes")  # type: ignore[arg-type]
