"""Answers in a form from the real model, through all three processes."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest
from openai import AsyncOpenAI, BadRequestError
from processes import processes
from pydantic import BaseModel

import tercet

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

QUESTION = [{"role": "user", "content": "Invent a person. Answer in JSON."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["kind", "tall", "loud"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@dataclass
class Up:
    target: str
    http: str


@pytest.fixture(scope="module")
async def up(default_model_path: Path) -> AsyncIterator[Up]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        http = f"127.0.0.1:{probe.getsockname()[1]}"
    model = str(default_model_path)
    async with processes() as started:
        await started.start("executor", "--model", model, "--max-sequences", "8")
        await started.start("scheduler", "--executors", started.socket("executor"))
        edge = await started.start(
            "tokenizer", "--model", model, "--scheduler", started.socket("scheduler"), "--http", http,
            *("--tool-format", "hermes"),
        )  # fmt: skip
        await edge.ready()
        yield Up(edge.target, f"http://{http}/v1")


async def answer(up: Up, grammar: tercet.Grammar, **options: object) -> tuple[str, tercet.FinishReason | None]:
    async with tercet.AsyncClient(up.target) as client:
        async with client.chat(QUESTION, grammar=grammar, **options) as stream:  # type: ignore[arg-type]
            text = "".join([delta.text async for delta in stream])
        return text, stream.finish_reason


def fits_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


KINDS: list[tuple[tercet.Grammar, Callable[[str], object]]] = [
    (tercet.Grammar(tercet.GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)), fits_schema),
    (tercet.Grammar(tercet.GrammarKind.REGEX, "[A-Z][a-z]{2,8}-[0-9]"), re.compile("[A-Z][a-z]{2,8}-[0-9]").fullmatch),
    (tercet.Grammar(tercet.GrammarKind.CHOICE, "yes\nno\nmaybe"), {"yes", "no", "maybe"}.__contains__),
    (tercet.Grammar(tercet.GrammarKind.EBNF, 'root ::= "<" [a-z]{1,5} ">"'), re.compile("<[a-z]{1,5}>").fullmatch),
    (tercet.Grammar(tercet.GrammarKind.EBNF, 'start: "a" | "b" start'), re.compile("b*a").fullmatch),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "fits"), KINDS, ids=lambda value: getattr(value, "kind", ""))
async def test_every_kind_of_grammar_holds(up: Up, grammar: tercet.Grammar, fits: Callable[[str], object]) -> None:
    text, reason = await answer(up, grammar, temperature=1.0, seed=4, max_tokens=200)
    assert reason is tercet.FinishReason.STOP, text
    assert fits(text)


async def test_a_seed_gives_the_same_answer_whatever_runs_beside_it(up: Up) -> None:
    grammar = tercet.Grammar(tercet.GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    alone = [await answer(up, grammar, temperature=1.0, seed=seed, max_tokens=200) for seed in range(4)]
    together = await asyncio.gather(
        *(answer(up, grammar, temperature=1.0, seed=seed, max_tokens=200) for seed in range(4)),
        answer(up, tercet.Grammar(tercet.GrammarKind.CHOICE, "x\ny"), seed=1),
    )
    assert list(together[:4]) == alone


async def test_a_grammar_that_is_none_is_refused_by_name(up: Up) -> None:
    with pytest.raises(tercet.InvalidArgumentError, match="unclosed group") as refused:
        await answer(up, tercet.Grammar(tercet.GrammarKind.REGEX, "(a"))
    assert refused.value.details.field == "sampling.grammar.source"
    with pytest.raises(tercet.InvalidArgumentError, match="ignore_eos"):
        await answer(up, tercet.Grammar(tercet.GrammarKind.CHOICE, "a"), ignore_eos=True)


async def test_a_grammar_that_cannot_go_on_ends_that_answer_alone(up: Up) -> None:
    with pytest.raises(tercet.AbortedError, match="no token is allowed"):
        await answer(up, tercet.Grammar(tercet.GrammarKind.CHOICE, "a"), min_tokens=5, max_tokens=10)


class Person(BaseModel):
    name: str
    married: bool


async def test_the_openai_package_over_http(up: Up) -> None:
    async with AsyncOpenAI(base_url=up.http, api_key="none", max_retries=0) as client:
        (model,) = (await client.models.list()).data
        parsed = await client.chat.completions.parse(
            model=model.id, messages=QUESTION, response_format=Person, seed=3, max_tokens=300, temperature=0.5
        )
        assert isinstance(parsed.choices[0].message.parsed, Person)
        tool = {
            "type": "function",
            "function": {
                "name": "get_weather",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
                    "required": ["city"],
                    "additionalProperties": False,
                },
            },
        }
        called = await client.chat.completions.create(
            model=model.id, messages=QUESTION, tools=[tool], tool_choice="required", parallel_tool_calls=False
        )
        assert called.choices[0].finish_reason == "tool_calls"
        (call,) = called.choices[0].message.tool_calls or ()
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
        with pytest.raises(BadRequestError) as refused:
            await client.chat.completions.create(model=model.id, messages=QUESTION, extra_body={"guided_regex": "(a"})
        assert refused.value.body["param"] == "guided_regex"  # type: ignore[index]


async def test_each_of_several_answers_has_the_form_and_its_own_stop_string(up: Up) -> None:
    grammar = tercet.Grammar(tercet.GrammarKind.REGEX, "[a-z]{4}-[0-9]{4}")
    async with tercet.AsyncClient(up.target) as client:
        async with client.chat(QUESTION, grammar=grammar, n=3, temperature=1.0, seed=5, stop=["-"]) as stream:
            texts = ["", "", ""]
            async for delta in stream:
                texts[delta.index] += delta.text
    assert all(re.fullmatch("[a-z]{4}", text) for text in texts)
    assert len(set(texts)) > 1
