"""A server that dies in the middle of an answer: the clients go on at the next one."""

from collections.abc import AsyncIterator

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
from tercet.v1 import tokenizer_pb2

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
        ({"numerics": "n1"}, {"n": 2}, (finished(),)),
    ],
)
async def test_what_can_not_go_on_fails(
    driver: Driver, service: ScriptedTokenizer, known: dict[str, object], options: dict[str, object], events: tuple
) -> None:
    service.scripts.append(fails(UNAVAILABLE, "gone", accepted(**known), delta("a", 1), *events))
    with pytest.raises(tercet.UnavailableError, match="gone"):
        await driver.on(await driver.call("generate", "x", timeout=30, **options), "text")
    assert len(service.requests) == 1


async def test_each_of_several_answers_goes_on_behind_what_came_of_it(
    driver: Driver, service: ScriptedTokenizer
) -> None:
    told = accepted(seed=9, n=3, **KNOWN)
    service.scripts.extend(
        [
            fails(UNAVAILABLE, "gone", told, delta("b", 7, index=1), delta("cd", 8, index=2), finished(2)),
            plays(told, delta("a", 5), delta("B", 6, index=1), finished(0), finished(1)),
        ]
    )
    stream = await driver.call("generate", "x", n=4, echo=True, timeout=30)
    answers = await driver.on(stream, "collect")
    assert [(answer.text, answer.token_ids) for answer in answers] == [("a", (5,)), ("bB", (7, 6)), ("cd", (8,))]
    resume = service.requests[1].resume
    assert service.requests[1].sampling.n == 3  # as many as were promised
    assert (list(resume.output_ids), resume.chars_delivered, resume.finished) == ([], 0, False)
    assert [(list(one.output_ids), one.chars_delivered, one.finished) for one in resume.others] == [
        ([7], 1, False),
        ([8], 2, True),
    ]


async def test_prompt_logprobs_of_a_try_that_is_over_are_forgotten(driver: Driver, service: ScriptedTokenizer) -> None:
    def scored(*ids: int) -> Event:
        rows = [tokenizer_pb2.TextLogprobs(drawn=tokenizer_pb2.TextLogprob(token_id=one, logprob=-0.5)) for one in ids]
        return Event(prompt_logprobs=tokenizer_pb2.TextPromptLogprobs(logprobs=rows))

    service.scripts.extend(
        [
            fails(UNAVAILABLE, "gone", accepted(**KNOWN), scored(4)),
            plays(accepted(**KNOWN), scored(4, 5), scored(6), delta("a", 1), finished()),
        ]
    )
    stream = await driver.call("generate", "x", prompt_logprobs=0, timeout=30)
    assert await driver.on(stream, "text") == "a"
    assert [row.drawn.token_id for row in stream.prompt_logprobs] == [4, 5, 6]
    assert not service.requests[1].HasField("resume")
    assert service.requests[0].sampling.HasField("prompt_logprobs")


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
