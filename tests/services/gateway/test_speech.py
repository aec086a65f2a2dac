"""Calls and reasoning found in text, however it is cut into deltas."""

import json
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.grammar.engine import GrammarEngine, GrammarVocabulary
from executor.step import Grammar, GrammarKind
from services.gateway.speech import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    CallArguments,
    CallBegin,
    Content,
    Part,
    Reasoning,
    SpeechReader,
    calls_grammar,
)

Read = tuple[str, str, list[tuple[str, str]]]  # content, reasoning, calls


def read(text: str, tools: str = "", reasoning: str = "", cuts: tuple[int, ...] = (), *, forced: bool = False) -> Read:
    ids = count()
    reader = SpeechReader(
        REASONING_FORMATS.get(reasoning), TOOL_FORMATS.get(tools), forced=forced, draw_id=lambda: f"id{next(ids)}"
    )
    parts: list[Part] = []
    at = 0
    for cut in (*sorted(cuts), len(text)):
        parts += reader.push(text[at:cut])
        at = cut
    parts += reader.finish()
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallBegin):
            assert (part.index, part.call_id) == (len(calls), f"id{len(calls)}")
            calls.append((part.name, ""))
        elif isinstance(part, CallArguments):
            assert part.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    assert reader.calls == len(calls)
    content = "".join(part.text for part in parts if isinstance(part, Content))
    return content, "".join(part.text for part in parts if isinstance(part, Reasoning)), calls


WEATHER = ("get_weather", '{"city": "Oslo", "note": "a } \\" { b"}')
TIME = ("get_time", "{}")
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "note": "a } \\" { b"}}\n</tool_call>'
HERMES_TIME = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
TWO = [("a", '{"x": 1}'), ("b", "{}")]
CASES = [
    ("hermes", HERMES, "", [WEATHER]),
    ("hermes", f"Let me look. {HERMES}", "Let me look. ", [WEATHER]),
    ("hermes", f"{HERMES}\n{HERMES_TIME}\n", "", [WEATHER, TIME]),
    ("hermes", f"{HERMES}\nThere you are.", "\nThere you are.", [WEATHER]),
    ("hermes", '<tool_call>{"arguments": {"a": [1, 2]}, "name": "f"}</tool_call>', "", [("f", '{"a": [1, 2]}')]),
    ("hermes", '<tool_call>{"name": "get_time"}</tool_call>', "", [TIME]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", "1 < 2, and <tool_cal is no call", "1 < 2, and <tool_cal is no call", []),
    ("hermes", "<tool_call>what?</tool_call>", "<tool_call>what?</tool_call>", []),
    ("hermes", '<tool_call>{"x": 1}</tool_call> so', '<tool_call>{"x": 1}</tool_call> so', []),
    ("hermes", '<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "", [("f", '{"a": ')]),
    ("hermes", "plain", "plain", []),
    ("llama3", '{"name": "get_time", "parameters": {}}', "", [TIME]),
    ("llama3", '<|python_tag|>{"name": "get_time", "parameters": {}}', "", [TIME]),
    ("llama3", '{"name": "a", "parameters": {"x": 1}}; {"name": "b", "parameters": {}}', "", TWO),
    ("llama3", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3", 'see {"name": "a", "parameters": {}}', 'see {"name": "a", "parameters": {}}', []),
    ("mistral", '[TOOL_CALLS][{"name": "get_time", "arguments": {}}]', "", [TIME]),
    ("mistral", '[TOOL_CALLS] [{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}]', "", TWO),
    ("mistral", '[{"name": "a", "arguments": {}}]', '[{"name": "a", "arguments": {}}]', []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_are_found_however_the_text_is_cut(
    form: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(text, form) == (content, "", calls)
    assert read(text, form, cuts=tuple(range(len(text)))) == (content, "", calls)
    for cut in range(len(text)):
        assert read(text, form, cuts=(cut,)) == (content, "", calls)


@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize(
    ("form", "text", "content", "reasoning"),
    [
        ("think", "<think>\nWhy?\n</think>\n\nSo.", "So.", "Why?\n"),
        ("think", "\n<think>a < b</think>c", "c", "a < b"),
        ("think", "No <think>ing</think>", "No <think>ing</think>", ""),
        ("think", "<thin air", "<thin air", ""),
        ("think", "<thi", "<thi", ""),
        ("think", "<think>never ends </thi", "", "never ends </thi"),
        ("think-open", "Hm.\n</think>\nYes.", "Yes.", "Hm.\n"),
        ("think-open", "only this", "", "only this"),
        ("", "<think>x</think>y", "<think>x</think>y", ""),
    ],
)
def test_reasoning_is_told_apart(form: str, text: str, content: str, reasoning: str, cut: int) -> None:
    assert read(text, reasoning=form, cuts=tuple(range(len(text))) * cut) == (content, reasoning, [])


def test_calls_come_behind_reasoning() -> None:
    text = f"<think>I need <tool_call> for it</think>\n{HERMES}"
    assert read(text, "hermes", "think", tuple(range(len(text)))) == ("", "I need <tool_call> for it", [WEATHER])


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>", "<", "</"),
        *("{", "}", "[", "]", '"', "\\", ",", ":", " ", "\n", "x"),
        *('"name"', '"arguments"', '"parameters"', '"f"', '{"name": "f", "arguments": {}}'),
    ]
)


@given(
    st.lists(PIECES, max_size=14).map("".join),
    st.sampled_from(("", *TOOL_FORMATS)),
    st.sampled_from(("", *REASONING_FORMATS)),
    st.booleans(),
    st.data(),
)
def test_where_any_text_is_cut_changes_nothing(
    text: str, tools: str, reasoning: str, forced: bool, data: st.DataObject
) -> None:
    cuts = tuple(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    whole = read(text, tools, reasoning, forced=forced)
    assert read(text, tools, reasoning, cuts, forced=forced) == whole
    if not tools and not reasoning:
        assert whole == (text, "", [])
    if not whole[2] and not reasoning:
        assert whole[0] == text, "what is no call is content, in full"


VOCABULARY = GrammarVocabulary((*(bytes([byte]) for byte in range(256)), b"<end>"), (256,), (256,))
TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"place": {"$ref": "#/$defs/place"}},
        "required": ["place"],
        "additionalProperties": False,
        "$defs": {"place": {"enum": ["Oslo", "Rome"]}},
    },
    "get_time": {"type": "object", "properties": {}, "additionalProperties": False},
}


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("parallel", [True, False])
def test_a_demanded_answer_is_calls_of_the_schemas(name: str, parallel: bool) -> None:
    form = TOOL_FORMATS[name]
    compiled = GrammarEngine(VOCABULARY).compile(
        Grammar(GrammarKind.EBNF, calls_grammar(form, TOOLS, parallel=parallel))
    )

    def answer(*calls: tuple[str, str]) -> str:
        written = [(form.call[0] % json.dumps(tool)) + arguments + form.call[1] for tool, arguments in calls]
        return form.opens + form.separates.join(written) + form.closes

    def allowed(text: str) -> bool:
        matcher = compiled.matcher()
        try:
            matcher.advance(text.encode())
        except ValueError:
            return False
        return matcher.is_complete

    one, two = ("get_weather", '{"place":"Oslo"}'), ("get_time", "{}")
    assert allowed(answer(one))
    assert allowed(answer(two))
    assert allowed(answer(one, two)) is parallel
    assert not allowed(answer(("get_weather", '{"place":"Paris"}')))
    assert not allowed(answer(("get_weather", "{}")))
    assert not allowed(answer(("other", "{}")))
    assert not allowed("")
    calls = [one, two] if parallel else [one]
    assert read(answer(*calls), name, forced=True) == ("", "", calls)
