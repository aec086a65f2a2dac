"""Several answers, and the echo that evaluation harnesses score prompts with, as OpenAI's clients see them."""

from pathlib import Path
from typing import Any

import openai
import pytest
from chain import text_chain
from gateway_support import (
    COMPLETIONS,
    Gateway,
    Item,
    Response,
    ScriptedEngine,
    accepted,
    delta,
    finished,
    prompt_body,
    sse,
)

from services.executor.fake_tokens import fake_prompt_logprobs
from tercet.v1 import tokenizer_pb2

PROMPT = "one two three"


def entry(text: str, logprob: float = 0.0) -> tokenizer_pb2.TextLogprob:
    return tokenizer_pb2.TextLogprob(text=text, bytes=text.encode(), logprob=logprob)


def row(text: str, logprob: float, *top: tuple[str, float]) -> tokenizer_pb2.TextLogprobs:
    return tokenizer_pb2.TextLogprobs(drawn=entry(text, logprob), top=[entry(*one) for one in top])


def scored(*rows: tokenizer_pb2.TextLogprobs, first: str | None = None) -> Response:
    told = tokenizer_pb2.TextPromptLogprobs(logprobs=rows, first=None if first is None else entry(first))
    return Response(prompt_logprobs=told)


def echoing(n: int = 1) -> list[Item]:
    script: list[Item] = [
        accepted(),
        scored(row(" b", -1.0, (" x", -0.5), (" b", -1.0)), first="a"),
        scored(row(" c", -2.0)),
    ]
    for index in range(n):
        script.append(delta("a b c", (), index))
        script.append(delta(" d", (4,), index, [row(" d", -3.0)]))
        script.append(finished(tokens=1, index=index))
    return script


LOGPROBS = {
    "tokens": ["a", " b", " c", " d"],
    "token_logprobs": [None, -1.0, -2.0, -3.0],
    "top_logprobs": [None, {" b": -1.0, " x": -0.5}, {}, {}],
    "text_offset": [0, 1, 3, 5],
}


async def test_echo_has_the_prompts_logprobs_first() -> None:
    gateway = Gateway(ScriptedEngine(echoing(2)))
    got = (await gateway.post(COMPLETIONS, prompt_body(echo=True, logprobs=2, max_tokens=1, n=2))).json()
    assert [choice["text"] for choice in got["choices"]] == ["a b c d"] * 2
    assert [choice["logprobs"] for choice in got["choices"]] == [LOGPROBS] * 2
    assert got["usage"]["completion_tokens"] == 2
    plain = (await gateway.post(COMPLETIONS, prompt_body(echo=True, max_tokens=1, n=2))).json()
    assert [(choice["text"], choice["logprobs"]) for choice in plain["choices"]] == [("a b c d", None)] * 2


async def test_a_streamed_echo_is_the_whole_one_in_pieces() -> None:
    gateway = Gateway(ScriptedEngine(echoing()))
    body = prompt_body(echo=True, logprobs=2, max_tokens=1, stream=True)
    *chunks, done = sse((await gateway.post(COMPLETIONS, body)).text)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == "a b c d"
    pieces = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    assert {name: [one for piece in pieces for one in piece[name]] for name in LOGPROBS} == LOGPROBS


@pytest.mark.parametrize("stream", [False, True])
async def test_with_max_tokens_0_nothing_but_the_prompt_is_told_and_counted(stream: bool) -> None:
    gateway = Gateway(ScriptedEngine(echoing()))
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = await gateway.post(COMPLETIONS, prompt_body(echo=True, logprobs=2, max_tokens=0, **options))
    assert gateway.engine.requests[0].sampling.max_tokens == 1
    replies = sse(answer.text)[:-1] if stream else [answer.json()]
    choices = [choice for reply in replies for choice in reply["choices"]]
    assert "".join(choice["text"] for choice in choices) == "a b c"
    found = [one["logprobs"] for one in choices if one["logprobs"] is not None]
    assert [value for piece in found for value in piece["token_logprobs"]] == [None, -1.0, -2.0]
    assert choices[-1]["finish_reason"] == "length"
    assert replies[-1]["usage"]["completion_tokens"] == 0
    assert replies[-1]["usage"]["total_tokens"] == replies[-1]["usage"]["prompt_tokens"] == 7


async def test_fewer_answers_come_where_the_scheduler_says_so() -> None:
    told = accepted()
    told.accepted.n = 1
    gateway = Gateway(ScriptedEngine([told, delta("b"), finished(tokens=1)]))
    got = (await gateway.post(COMPLETIONS, prompt_body(n=3))).json()
    assert [choice["index"] for choice in got["choices"]] == [0]


@pytest.mark.model
async def test_the_openai_package_gets_n_answers(default_model_path: Path) -> None:
    async with text_chain(default_model_path, "Hello there.") as chain:
        async with openai.AsyncOpenAI(base_url=f"{chain.http}/v1", api_key="none", max_retries=0) as client:
            asked: Any = {"model": (await client.models.list()).data[0].id, "n": 2, "max_tokens": 20, "seed": 1}
            messages: Any = [{"role": "user", "content": "hi"}]
            whole = await client.chat.completions.create(messages=messages, **asked)
            assert [choice.index for choice in whole.choices] == [0, 1]
            assert [choice.message.content for choice in whole.choices] == ["Hello there."] * 2
            assert {choice.finish_reason for choice in whole.choices} == {"stop"}
            assert whole.usage is not None
            per_answer = len(chain.model.encode("Hello there.", add_special=False)) + 1
            assert whole.usage.completion_tokens == 2 * per_answer
            texts, roles = {0: "", 1: ""}, []
            async for chunk in await client.chat.completions.create(messages=messages, stream=True, **asked):
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                    roles += [choice.index] if choice.delta.role else []
            assert texts == {0: "Hello there.", 1: "Hello there."}
            assert sorted(roles) == [0, 1]
            stopped = await client.completions.create(prompt="hi", stop=" there", best_of=2, **asked)
            assert [choice.text for choice in stopped.choices] == ["Hello"] * 2
            with pytest.raises(openai.BadRequestError, match="best_of"):
                await client.completions.create(prompt="hi", best_of=3, **asked)
        await chain.scheduler.drained()


@pytest.mark.model
@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_a_harness_scores_a_prompt(default_model_path: Path, max_tokens: int) -> None:
    async with text_chain(default_model_path, "Hello there.") as chain:
        ids = chain.model.encode(PROMPT, add_special=True)
        rows = [fake_prompt_logprobs(ids[:at], ids[at], 1) for at in range(1, len(ids))]
        async with openai.AsyncOpenAI(base_url=f"{chain.http}/v1", api_key="none", max_retries=0) as client:
            model = (await client.models.list()).data[0].id
            for prompt in (PROMPT, ids):
                got = await client.completions.create(
                    model=model, prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
                )
                (choice,) = got.choices
                assert choice.text.startswith(PROMPT)
                assert choice.logprobs is not None
                assert choice.logprobs.tokens is not None
                assert choice.logprobs.token_logprobs is not None
                assert len(choice.logprobs.tokens) == len(ids) + max_tokens
                assert "".join(choice.logprobs.tokens) == choice.text
                assert choice.logprobs.token_logprobs[: len(ids)] == [None, *(one.drawn for one in rows)]
                assert got.usage is not None
                assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(ids), max_tokens)
        await chain.scheduler.drained()
