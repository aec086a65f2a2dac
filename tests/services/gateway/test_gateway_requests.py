"""OpenAI's bodies to the contract's messages: every parameter, every refusal by name. Pure."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from gateway_support import chat_body, prompt_body
from hypothesis import given, settings
from hypothesis import strategies as st

from services.errors import InvalidArgument, ServiceError, Unimplemented
from services.gateway import http_errors, json_body, openai, parameters
from services.gateway.json_body import parse_object
from services.gateway.parameters import CHAT, COMPLETIONS, Support


def sampling(**body: Any) -> Any:
    return openai.read_completion(prompt_body(**body)).request.sampling


def attempt(make: Callable[[], Any]) -> Any:
    """What it makes, or the refusal; any other exception fails the test."""
    try:
        return make()
    except ServiceError as error:
        return error


def refusal(body: dict[str, Any], read: Any = openai.read_completion) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        read(body)
    return caught.value


def test_a_chat_body_becomes_messages() -> None:
    got = openai.read_chat(
        {
            "model": "toy",
            "messages": [
                {"role": "developer", "content": "be brief"},
                {
                    "role": "user",
                    "name": "ann",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                },
                {"role": "assistant", "content": "", "tool_calls": None, "refusal": None},
            ],
        }
    )
    messages = got.request.chat.messages
    assert [(m.role, m.content) for m in messages] == [("system", "be brief"), ("user", "ab"), ("assistant", "")]
    assert messages[1].name == "ann"
    assert not messages[0].HasField("name")
    assert got.request.model == "toy"
    assert (got.stream, got.include_usage, got.choices, got.logprobs) == (False, False, 1, False)
    assert not got.request.sampling.HasField("temperature")
    assert not got.request.HasField("limits")


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": 100.0}, "temperature", 100.0),
        ({"temperature": 1e-46}, "temperature", 0.0),
        ({"top_p": 1}, "top_p", 1.0),
        ({"top_k": 0}, "top_k", 0),
        ({"top_k": 2**32 - 1}, "top_k", 2**32 - 1),
        ({"min_p": 0.5}, "min_p", 0.5),
        ({"seed": 0}, "seed", 0),
        ({"seed": 2**64 - 1}, "seed", 2**64 - 1),
        ({"max_tokens": 1}, "max_tokens", 1),
        ({"min_tokens": 0}, "min_tokens", 0),
        ({"presence_penalty": -2}, "presence_penalty", -2.0),
        ({"frequency_penalty": 2.0}, "frequency_penalty", 2.0),
        ({"repetition_penalty": 10}, "repetition_penalty", 10.0),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"ignore_eos": False}, "ignore_eos", False),
        ({"n": 128}, "n", 128),
        ({"logprobs": 0}, "logprobs", 0),
        ({"logprobs": 20}, "logprobs", 20),
    ],
)
def test_a_sampling_parameter_arrives_also_when_it_is_zero(given: dict[str, Any], field: str, value: Any) -> None:
    got = sampling(**given)
    assert got.HasField(field)
    assert getattr(got, field) == value


def test_every_parameter_accepts_null_as_absent() -> None:
    for table, read, body in (
        (CHAT, openai.read_chat, chat_body()),
        (COMPLETIONS, openai.read_completion, prompt_body()),
    ):
        nulls = {name: None for name in table if name not in ("messages", "prompt", "model")}
        assert read({**body, **nulls}) == read(body)


def test_the_rest_of_the_served_parameters() -> None:
    request = openai.read_completion(
        prompt_body(
            stop=["a", "é"],
            stop_token_ids=[3, 4],
            logit_bias={"5": -100, "6": 1.5},
            priority=-3,
            time_limits={"queue": 0.5, "total": 2, "first_token": None},
            skip_special_tokens=False,
            include_stop_str_in_output=True,
            cache_salt="pepper",
        )
    ).request
    assert list(request.stop) == ["a", "é"]
    assert list(request.sampling.stop_token_ids) == [3, 4]
    assert [(e.token_id, e.bias) for e in request.sampling.logit_bias] == [(5, -100.0), (6, 1.5)]
    assert request.context.priority == -3
    assert (request.limits.queue_ns, request.limits.total_ns) == (500_000_000, 2_000_000_000)
    assert not request.limits.HasField("first_token_ns")
    assert request.keep_special_tokens
    assert request.include_stop
    assert request.cache.salt == "pepper"


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [
        ("", "", []),
        ("hi", "hi", []),
        (["hi"], "hi", []),
        ([1, 2], "", [1, 2]),
        ([[1, 2]], "", [1, 2]),
        ([2**32 - 1], "", [2**32 - 1]),
    ],
)
def test_prompts(prompt: Any, text: str, ids: list[int]) -> None:
    request = openai.read_completion({"prompt": prompt}).request
    assert request.WhichOneof("prompt") == ("token_ids" if ids else "text")
    assert request.text == text
    assert list(request.token_ids.ids) == ids
    assert not request.HasField("model")


def test_one_stop_string_and_chat_logprobs() -> None:
    assert list(openai.read_chat(chat_body(stop="x")).request.stop) == ["x"]
    assert list(openai.read_chat(chat_body(stop=[])).request.stop) == []
    plain = openai.read_chat(chat_body(logprobs=True))
    assert plain.request.sampling.logprobs == 0
    assert plain.request.sampling.HasField("logprobs")
    assert plain.logprobs
    assert openai.read_chat(chat_body(logprobs=True, top_logprobs=4)).request.sampling.logprobs == 4
    off = openai.read_chat(chat_body(logprobs=False))
    assert not off.request.sampling.HasField("logprobs")


def test_both_spellings_of_max_tokens() -> None:
    assert openai.read_chat(chat_body(max_completion_tokens=5)).request.sampling.max_tokens == 5
    assert openai.read_chat(chat_body(max_completion_tokens=5, max_tokens=5)).request.sampling.max_tokens == 5
    error = refusal(chat_body(max_completion_tokens=5, max_tokens=6), openai.read_chat)
    assert error.field == "max_tokens"


def test_streaming_options() -> None:
    got = openai.read_chat(
        chat_body(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    )
    assert (got.stream, got.include_usage, got.continuous_usage) == (True, True, True)
    off = openai.read_chat(chat_body(stream=True, stream_options={"include_obfuscation": False}))
    assert (off.include_usage, off.continuous_usage) == (False, False)


BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 100.1}, "temperature"),
    ({"temperature": 1e39}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1e-60}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 1.0}, "top_k"),
    ({"top_k": 2**32}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2**32}, "max_tokens"),
    ({"max_tokens": False}, "max_tokens"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 10**9}, "n"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 10.5}, "repetition_penalty"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream": "true"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"odd": 1}}, "stream_options.odd"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1, 2**32]}, "stop_token_ids[1]"),
    ({"stop_token_ids": list(range(65))}, "stop_token_ids"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": {"4294967296": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1, "01": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias[1]"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"priority": 101}, "priority"),
    ({"time_limits": {"total": 0}}, "time_limits.total"),
    ({"time_limits": {"total": -1}}, "time_limits.total"),
    ({"time_limits": {"total": 1e300}}, "time_limits.total"),
    ({"time_limits": {"forever": 1}}, "time_limits.forever"),
    ({"model": ""}, "model"),
    ({"model": 5}, "model"),
    ({"model": "x" * 257}, "model"),
    ({"user": 5}, "user"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [2**32]}, "prompt[0]"),
    ({"prompt": [1.0]}, "prompt[0]"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
]


@pytest.mark.parametrize(("bad", "field"), BAD_COMPLETIONS, ids=lambda v: str(v)[:40])
def test_a_bad_value_is_refused_by_name(bad: dict[str, Any], field: str) -> None:
    error = refusal(prompt_body(**bad))
    assert isinstance(error, InvalidArgument)
    assert error.field == field
    assert field in error.message
    assert http_errors.row_of(error).status == 400


BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    ("hi", "messages"),
    (["hi"], "messages[0]"),
    ([{"content": "a"}], "messages[0].role"),
    ([{"role": "wizard", "content": "a"}], "messages[0].role"),
    ([{"role": "function", "content": "a"}], "messages[0].role"),
    ([{"role": "tool", "content": "a"}], "messages[0].tool_call_id"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "text", "text": "a", "odd": 1}]}], "messages[0].content[0].odd"),
    ([{"role": "user", "content": "a", "odd": 1}], "messages[0].odd"),
    ([{"role": "user", "content": "a", "name": ""}], "messages[0].name"),
    ([{"role": "user", "content": "a\udc00"}], "messages[0].content"),
    (
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [{}]}],
        "messages[1].tool_calls[0].function",
    ),
]


@pytest.mark.parametrize(("messages", "field"), BAD_MESSAGES, ids=lambda v: str(v)[:40])
def test_a_bad_message_is_refused_by_its_place(messages: Any, field: str) -> None:
    error = refusal({"messages": messages}, openai.read_chat)
    assert error.field == field
    assert http_errors.row_of(error).status == 400


@pytest.mark.parametrize(
    ("table", "read", "name"),
    [
        (table, read, name)
        for table, read in ((CHAT, openai.read_chat), (COMPLETIONS, openai.read_completion))
        for name, row in table.items()
        if row.support is Support.REFUSED
    ],
)
def test_every_refused_parameter_is_refused_by_name(table: Any, read: Any, name: str) -> None:
    body = chat_body() if table is CHAT else prompt_body()
    for value in ("odd", 7, True, {"type": "json_object"}, ["odd"]):
        error = refusal({**body, name: value}, read)
        assert isinstance(error, Unimplemented)
        assert error.field == name
        assert name in error.message
        assert http_errors.body_of(error)["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    "harmless",
    [
        {"tools": []},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"store": False},
        {"service_tier": "auto"},
        {"metadata": {"a": "b"}},
        {"user": "u"},
        {"parallel_tool_calls": True},
    ],
)
def test_what_asks_for_the_default_is_accepted(harmless: dict[str, Any]) -> None:
    assert openai.read_chat(chat_body(**harmless)) == openai.read_chat(chat_body())


def test_several_prompts_and_a_best_of_several_are_refused() -> None:
    for bad, field in (
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
    ):
        error = refusal(prompt_body(**bad))
        assert (type(error), error.field) == (Unimplemented, field)
    assert openai.read_completion(prompt_body(echo=False, best_of=1, suffix="")).request.text == "hi"
    assert openai.read_completion(prompt_body(best_of=3, n=3)).choices == 3


def test_echo_asks_for_the_prompts_logprobs_where_those_are_asked_for() -> None:
    plain = openai.read_completion(prompt_body(echo=True))
    assert (plain.echo, plain.request.echo, plain.request.sampling.HasField("prompt_logprobs")) == (True, True, False)
    scored = openai.read_completion(prompt_body(echo=True, logprobs=3, max_tokens=0, temperature=0))
    sampling = scored.request.sampling
    assert (sampling.logprobs, sampling.prompt_logprobs, sampling.max_tokens) == (3, 3, 1)
    assert scored.score_only
    assert not openai.read_completion(prompt_body(echo=True, max_tokens=1)).score_only
    assert not openai.read_completion(prompt_body(logprobs=3)).request.sampling.HasField("prompt_logprobs")
    for bad in ({"max_tokens": 0}, {"max_tokens": 0, "echo": False}, {"max_tokens": False, "echo": True}):
        error = refusal(prompt_body(**bad))
        assert (type(error), error.field) == (InvalidArgument, "max_tokens")


def test_unknown_and_missing_parameters_are_named() -> None:
    error = refusal(prompt_body(tempreature=1))
    assert (error.field, error.reason) == ("tempreature", "UNKNOWN_PARAMETER")
    error = refusal(prompt_body(messages=[]))
    assert error.field == "messages"
    for read, name in ((openai.read_chat, "messages"), (openai.read_completion, "prompt")):
        for body in ({}, {name: None}):
            error = refusal(body, read)
            assert (error.field, error.reason) == (name, "MISSING_PARAMETER")
    error = refusal(chat_body(top_logprobs=3), openai.read_chat)
    assert error.field == "top_logprobs"


def test_a_strange_name_is_shown_harmlessly() -> None:
    error = refusal(prompt_body(**{"a\r\nb\ud800" + "x" * 500: 1}))
    assert error.field is not None
    assert error.field.isascii()
    assert error.field.isprintable()
    assert len(error.message) < 600


@pytest.mark.parametrize(
    ("engine_field", "parameter"),
    [
        ("prompt_len", "prompt"),
        ("text", "prompt"),
        ("sampling.max_tokens", "max_tokens"),
        ("sampling.logit_bias[3].token_id", "logit_bias[3].token_id"),
        ("token_ids.ids[2]", "prompt[2]"),
        ("limits.total_ns", "time_limits.total"),
        ("context.priority", "priority"),
        ("model", "model"),
    ],
)
def test_a_field_of_the_contract_is_named_as_the_caller_knows_it(engine_field: str, parameter: str) -> None:
    assert openai.parameter_of(engine_field, "prompt") == parameter


def test_a_chat_prompt_is_called_messages() -> None:
    assert openai.parameter_of("chat.messages[0].role", "messages") == "messages[0].role"
    assert openai.parameter_of("prompt_len", "messages") == "messages"


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"", "not JSON"),
        (b"\xff{}", "byte 0"),
        (b"[]", "object"),
        (b"null", "object"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": ' + b"9" * 41 + b"}", "digits"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "digits"),
        (b'{"a":' + b"[" * 10_000, "deeper"),
        (b'{"a":' * 100_000, "deeper"),
        (b'{"a": "' + b"\\", "not JSON"),
        (b'{"a": 1} x', "not JSON"),
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes, word: str) -> None:
    with pytest.raises(InvalidArgument, match=word):
        parse_object(raw)


def test_brackets_in_text_are_not_depth() -> None:
    body = {"a": "[{" * 5000 + '"\\', "b": [[{"c": ']"'}]] * 50}
    assert parse_object(json.dumps(body).encode()) == body
    deepest = b"[" * (json_body.MAX_DEPTH - 1)
    assert parse_object(b'{"a":' + deepest + b"]" * len(deepest) + b"}")


KEYS = st.sampled_from(sorted(CHAT | COMPLETIONS)) | st.text(max_size=4)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["user", "text", "auto", "toy"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "include_usage", "1"]), inner, max_size=3)
    ),
    max_leaves=6,
)
BASES = st.sampled_from([{}, {"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}])


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=5), BASES, st.sampled_from([openai.read_chat, openai.read_completion]))
def test_any_object_is_a_request_or_a_named_refusal(body: Any, base: Any, read: Any) -> None:
    outcome = attempt(lambda: read(parse_object(json.dumps({**base, **body}).encode())))
    if isinstance(outcome, ServiceError):
        assert http_errors.row_of(outcome).status == 400
        json.dumps(http_errors.body_of(outcome), allow_nan=False).encode()
    else:
        assert 1 <= outcome.choices <= 128
        outcome.request.SerializeToString()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,\\ 0e-.tn', max_size=60).map(str.encode))
def test_any_bytes_are_an_object_or_a_refusal(raw: bytes) -> None:
    outcome = attempt(lambda: parse_object(raw))
    assert isinstance(outcome, (dict, InvalidArgument))


def test_the_tables_agree_with_the_contract() -> None:
    """A row made by name sets a field that the message has."""
    fields = openai.read_completion(prompt_body()).request.sampling.DESCRIPTOR.fields_by_name
    by_name = {"temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "n"} | {
        name for name in COMPLETIONS if name.endswith("_penalty") and COMPLETIONS[name].support is Support.SERVED
    }
    assert by_name <= set(fields)
    assert parameters.MAX_STOPS == 16
