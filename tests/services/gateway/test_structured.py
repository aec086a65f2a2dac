"""Forms of answers, tools and reasoning over HTTP, on a scripted engine, with the real `openai` package."""

import json
from typing import Any

import httpx
import pytest
from gateway_support import (
    CHAT,
    COMPLETIONS,
    Gateway,
    ScriptedEngine,
    accepted,
    answer,
    chat_body,
    delta,
    finished,
    prompt_body,
    sse,
)
from openai import AsyncOpenAI, pydantic_function_tool
from pydantic import BaseModel

from services.errors import InvalidArgument
from tercet.v1 import common_pb2

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b", "a"]}
JSON_SCHEMA = common_pb2.GRAMMAR_KIND_JSON_SCHEMA
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def named(**schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def gateway(*texts: str, tools: str = "hermes", reasoning: str = "") -> Gateway:
    engine = ScriptedEngine(answer(*texts))
    engine.tool_format, engine.reasoning_format = tools, reasoning
    return Gateway(engine)


async def posted(body: dict[str, Any], *texts: str, path: str = CHAT, **formats: str) -> tuple[Gateway, httpx.Response]:
    served = gateway(*(texts or ("x",)), **formats)
    return served, await served.post(path, body)


@pytest.mark.parametrize("endpoint", [(CHAT, chat_body), (COMPLETIONS, prompt_body)])
@pytest.mark.parametrize(
    ("given", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, common_pb2.GRAMMAR_KIND_JSON_OBJECT, ""),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            JSON_SCHEMA,
            SCHEMA,
        ),
        ({"guided_json": SCHEMA}, JSON_SCHEMA, SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, JSON_SCHEMA, SCHEMA),
        ({"guided_regex": "[a-c]+"}, common_pb2.GRAMMAR_KIND_REGEX, "[a-c]+"),
        ({"guided_choice": ["a", "b"]}, common_pb2.GRAMMAR_KIND_CHOICE, "a\nb"),
        ({"guided_grammar": 'root ::= "a"'}, common_pb2.GRAMMAR_KIND_EBNF, 'root ::= "a"'),
        ({"structured_outputs": {"json": SCHEMA}}, JSON_SCHEMA, SCHEMA),
        ({"structured_outputs": {"choice": ["a"], "regex": None}}, common_pb2.GRAMMAR_KIND_CHOICE, "a"),
        ({"structured_outputs": {"json_object": True}}, common_pb2.GRAMMAR_KIND_JSON_OBJECT, ""),
    ],
)
async def test_a_form_becomes_a_grammar(endpoint: Any, given: dict[str, Any], kind: int, source: Any) -> None:
    path, body = endpoint
    served, response = await posted(body(**given), path=path)
    assert response.status_code == 200, response.text
    grammar = served.engine.requests[0].sampling.grammar
    assert grammar.kind == kind
    if isinstance(source, dict):
        assert list(json.loads(grammar.source).items()) == list(source.items()), "in the order of the caller"
    else:
        assert grammar.source == source


@pytest.mark.parametrize("given", [{"response_format": {"type": "text"}}, {"response_format": None}, {"tools": []}])
async def test_no_form_is_no_grammar(given: dict[str, Any]) -> None:
    served, response = await posted(chat_body(**given))
    assert response.status_code == 200
    assert not served.engine.requests[0].sampling.HasField("grammar")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a\nb"]}, "guided_choice[0]"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_json"),
        ({"guided_regex": "a", "tools": [TOOL]}, "guided_regex"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]}, "tools[0].function.x"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice.function.name",
        ),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
    ],
)
async def test_what_is_no_form_is_refused_by_name(given: dict[str, Any], param: str) -> None:
    _, response = await posted(chat_body(**given))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_tools_of_a_model_that_knows_none_are_refused() -> None:
    served, response = await posted(chat_body(tools=[TOOL]), tools="")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert not served.engine.requests
    served, response = await posted(chat_body(tools=[TOOL], tool_choice="none"), tools="")
    assert response.status_code == 200
    assert not served.engine.requests[0].chat.tools_json


async def test_a_refused_grammar_names_the_parameter_that_asked() -> None:
    for given, param in (
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
    ):
        served = gateway()
        served.engine.script = [InvalidArgument("no grammar", field="sampling.grammar.source")]
        response = await served.post(CHAT, chat_body(**given))
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_call_is_told_whole_and_streamed() -> None:
    body = chat_body(tools=[TOOL])
    served, response = await posted(body, "Well. ", CALL[:30], CALL[30:])
    assert served.engine.requests[0].chat.tools_json == [json.dumps(TOOL)]
    assert not served.engine.requests[0].sampling.HasField("grammar")
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Well. "
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    _, response = await posted({**body, "stream": True}, "Well. ", *CALL)
    *events, done = sse(response.text)
    assert done == "[DONE]"
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0]["role"] == "assistant"
    assert sum("role" in delta for delta in deltas) == 1
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert all("id" not in call for call in calls[1:])
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Oslo"}'
    assert len(calls) > 5, "as it comes"
    assert "".join(delta.get("content", "") for delta in deltas) == "Well. "
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "tool_calls"


async def test_an_answer_without_calls_is_as_ever() -> None:
    for stream in (False, True):
        _, response = await posted(chat_body(tools=[TOOL], stream=stream), "Just ", "text <")
        if stream:
            events = sse(response.text)[:-1]
            text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
            reason = events[-1]["choices"][0]["finish_reason"]
        else:
            (choice,) = response.json()["choices"]
            assert "tool_calls" not in choice["message"]
            text, reason = choice["message"]["content"], choice["finish_reason"]
        assert (text, reason) == ("Just text <", "stop")


async def test_a_demanded_call_is_held_by_a_grammar() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        served, response = await posted(chat_body(tools=[TOOL], tool_choice=choice), CALL)
        grammar = served.engine.requests[0].sampling.grammar
        assert grammar.kind == common_pb2.GRAMMAR_KIND_EBNF
        assert "get_weather" in grammar.source
        assert response.json()["choices"][0]["message"]["content"] is None
        assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    served, _ = await posted(chat_body(tools=[TOOL], tool_choice="required", parallel_tool_calls=False), CALL)
    assert "call)*" not in served.engine.requests[0].sampling.grammar.source


async def test_calls_and_their_answers_go_back_to_the_model() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    served, response = await posted(chat_body(messages=messages))
    assert response.status_code == 200
    _, assistant, tool = served.engine.requests[0].chat.messages
    assert json.loads(assistant.tool_calls_json)[0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert (tool.role, tool.tool_call_id, tool.content) == ("tool", "c1", "sunny")


async def test_reasoning_has_a_place_of_its_own() -> None:
    text = ("<think>", "\nWhy", "?</th", "ink>\n\nSo.")
    _, response = await posted(chat_body(), *text, reasoning="think")
    message = response.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Why?", "So.")
    _, response = await posted(chat_body(stream=True), *text, reasoning="think")
    deltas = [event["choices"][0]["delta"] for event in sse(response.text)[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Why?"
    assert "".join(delta.get("content", "") for delta in deltas) == "So."
    _, response = await posted(chat_body(response_format={"type": "json_object"}), "{}", reasoning="think-open")
    assert response.json()["choices"][0]["message"]["content"] == "{}"


class Answer(BaseModel):
    b: int
    a: str


class GetWeather(BaseModel):
    city: str


async def test_the_openai_package_parses_answers_and_calls() -> None:
    served = gateway('{"b":1,"a":"x"}')
    async with AsyncOpenAI(
        base_url="http://gateway/v1", api_key="none", max_retries=0, http_client=served.client()
    ) as client:
        parsed = await client.chat.completions.parse(
            model="toy", messages=[{"role": "user", "content": "x"}], response_format=Answer
        )
        assert parsed.choices[0].message.parsed == Answer(b=1, a="x")
        served.engine.script = list(
            answer('<tool_call>\n{"name": "GetWeather", "arguments": {"city":"Oslo"}}\n</tool_call>')
        )
        tool = pydantic_function_tool(GetWeather)
        called = await client.chat.completions.parse(
            model="toy", messages=[{"role": "user", "content": "x"}], tools=[tool], tool_choice="required"
        )
        assert called.choices[0].message.tool_calls is not None
        assert called.choices[0].message.tool_calls[0].function.parsed_arguments == GetWeather(city="Oslo")
        async with client.chat.completions.stream(
            model="toy", messages=[{"role": "user", "content": "x"}], tools=[tool]
        ) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
        assert "tool_calls.function.arguments.done" in kinds
        assert final.choices[0].finish_reason == "tool_calls"
        assert final.choices[0].message.tool_calls is not None
        assert final.choices[0].message.tool_calls[0].function.parsed_arguments == GetWeather(city="Oslo")


async def test_several_answers_are_read_each_for_itself() -> None:
    served = gateway()
    served.engine.script = [
        accepted(),
        delta(CALL[:20], index=0),
        delta("plain", index=1),
        delta(CALL[20:], index=0),
        finished(index=1),
        finished(index=0),
    ]
    response = await served.post(CHAT, chat_body(tools=[TOOL], n=2))
    one, two = response.json()["choices"]
    assert one["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert (one["finish_reason"], two["finish_reason"]) == ("tool_calls", "stop")
    assert two["message"]["content"] == "plain"
