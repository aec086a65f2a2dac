"""From arguments to the wire: zeros survive, absent stays absent, what the wire cannot hold is refused by name."""

import dataclasses
import inspect
import math
import subprocess
import sys
import typing
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_tokenizer import CLIENTS, Driver, ScriptedTokenizer, accepted, driving, finished, plays, serving

import tercet
from tercet import _request, options
from tercet._request import chat_call, generate_call
from tercet._target import channel_options, is_local, server_address
from tercet.options import Settings
from tercet.v1 import common_pb2, tokenizer_pb2

SETTINGS = Settings("localhost:1")
ZEROS: dict[str, Any] = {
    "temperature": 0,
    "top_k": 0,
    "top_p": 0.0,
    "min_p": 0,
    "max_tokens": 0,
    "min_tokens": 0,
    "seed": 0,
    "logprobs": 0,
    "repetition_penalty": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "ignore_eos": False,
}


def wire(prompt: Any = "x", **given: Any) -> tokenizer_pb2.TokenizerServiceGenerateRequest:
    """The message as the server reads it."""
    call = generate_call(prompt, typing.cast(options.GenerateOptions, given), SETTINGS, "drawn")
    return tokenizer_pb2.TokenizerServiceGenerateRequest.FromString(call.attempt(1).SerializeToString())


@pytest.fixture
async def service() -> ScriptedTokenizer:
    return ScriptedTokenizer()


@pytest.fixture(params=sorted(CLIENTS))
async def driver(request: pytest.FixtureRequest, service: ScriptedTokenizer) -> AsyncIterator[Driver]:
    async with serving(service) as target, driving(request.param, target, timeout=33, tenant="t") as driver:
        yield driver


async def test_explicit_zeros_reach_the_server(driver: Driver, service: ScriptedTokenizer) -> None:
    zeros = {**ZEROS, "priority": 0, "include_stop": False, "echo": False, "limits": tercet.TimeLimits(queue=0)}
    service.scripts.append(plays(accepted(), finished()))
    await driver.on(await driver.call("chat", [tercet.Message("user", "")], **zeros), "text")
    request = service.requests[0]
    for name in ZEROS:
        assert request.sampling.HasField(name), name
        assert getattr(request.sampling, name) == 0, name
    assert request.context.HasField("priority")
    assert request.HasField("include_stop")
    assert request.HasField("echo")
    assert request.limits.HasField("queue_ns")
    assert not request.limits.HasField("total_ns")


def test_absent_stays_absent() -> None:
    for request in (wire(), wire(**dict.fromkeys(ZEROS)), wire(stop=None, limits=None, logit_bias=None, model=None)):
        assert request.sampling == common_pb2.SamplingParams()
        assert [field.name for field, _ in request.ListFields()] == ["context", "text", "sampling", "return_prompt_ids"]
        assert [field.name for field, _ in request.context.ListFields()] == ["request_id", "attempt"]


def test_every_field_is_carried() -> None:
    request = wire(
        [5, 6],
        sampling=tercet.SamplingParams(temperature=1.5, top_k=3, stop=["a"], seed=2**64 - 1),
        temperature=0.25,
        top_p=0.5,
        min_p=0.125,
        max_tokens=9,
        min_tokens=2,
        n=3,
        include_stop=True,
        stop_token_ids=[7],
        ignore_eos=True,
        logprobs=4,
        repetition_penalty=1.25,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias={8: -100, 0: 1.5},
        grammar=tercet.Grammar(tercet.GrammarKind.REGEX, "a+"),
        limits=tercet.TimeLimits(queue=0.5, first_token=1, between_tokens=1e-9, total=3600),
        priority=-7,
        tenant="team",
        request_id="id-1",
        cache_salt="s",
        cache_bypass=True,
        model="m",
        keep_special_tokens=True,
        echo=True,
        return_prompt_ids=True,
    )
    expected = tokenizer_pb2.TokenizerServiceGenerateRequest(
        context=common_pb2.RequestContext(request_id="id-1", tenant="team", priority=-7, attempt=1),
        token_ids=tokenizer_pb2.TokenIds(ids=[5, 6]),
        sampling=common_pb2.SamplingParams(
            logit_bias=[common_pb2.LogitBias(token_id=8, bias=-100), common_pb2.LogitBias(token_id=0, bias=1.5)],
            repetition_penalty=1.25,
            presence_penalty=-0.5,
            frequency_penalty=0.75,
            min_tokens=2,
            stop_token_ids=[7],
            ignore_eos=True,
            grammar=common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_REGEX, source="a+"),
            temperature=0.25,
            top_k=3,
            top_p=0.5,
            min_p=0.125,
            seed=2**64 - 1,
            max_tokens=9,
            n=3,
            logprobs=4,
        ),
        limits=common_pb2.TimeLimits(
            queue_ns=500_000_000, first_token_ns=10**9, between_tokens_ns=1, total_ns=3600 * 10**9
        ),
        stop=["a"],
        include_stop=True,
        keep_special_tokens=True,
        cache=common_pb2.CacheControl(salt="s", bypass=True),
        echo=True,
        return_prompt_ids=True,
        model="m",
    )
    assert request == expected


def test_keywords_are_the_sampling_params() -> None:
    names = {field.name for field in dataclasses.fields(tercet.SamplingParams)}
    assert options.SamplingOptions.__optional_keys__ == names
    contract = set(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    # Told at the edge.
    assert names - {"stop", "include_stop"} == contract


def test_messages_of_both_kinds() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    messages: list[tercet.Message | Mapping[str, object]] = [
        tercet.Message("system", "Ä", name="n"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]
    prompt = chat_call(messages, {"tools": [{"a": "ü"}], "add_generation_prompt": False}, SETTINGS, "d").message.chat
    assert prompt == tokenizer_pb2.ChatPrompt(
        messages=[
            tokenizer_pb2.ChatMessage(role="system", content="Ä", name="n"),
            tokenizer_pb2.ChatMessage(
                role="assistant",
                content="",
                tool_calls_json='[{"id": "c", "function": {"name": "f", "arguments": "{}"}}]',
            ),
            tokenizer_pb2.ChatMessage(role="tool", content="1", tool_call_id="c"),
        ],
        add_generation_prompt=False,
        tools_json=['{"a": "ü"}'],
    )


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("prompt", {"prompt": 5}),
        ("prompt", {"prompt": b"bytes"}),
        ("prompt", {"prompt": "\ud800"}),
        ("prompt[1]", {"prompt": [1, -1]}),
        ("prompt[0]", {"prompt": [2**32]}),
        ("prompt[0]", {"prompt": [True]}),
        ("prompt[0]", {"prompt": [1.0]}),
        ("temperature", {"temperature": "0"}),
        ("top_k", {"top_k": -1}),
        ("top_k", {"top_k": True}),
        ("max_tokens", {"max_tokens": 1.5}),
        ("seed", {"seed": -1}),
        ("seed", {"seed": 2**64}),
        ("n", {"n": 0}),
        ("n", {"n": 129}),
        ("stop", {"stop": [1]}),
        ("stop_token_ids", {"stop_token_ids": 3}),
        ("logit_bias", {"logit_bias": {-1: 0.0}}),
        ("logit_bias[3]", {"logit_bias": {3: None}}),
        ("ignore_eos", {"ignore_eos": 1}),
        ("sampling", {"sampling": {"temperature": 0}}),
        ("limits.total", {"limits": tercet.TimeLimits(total=-1)}),
        ("limits.queue", {"limits": tercet.TimeLimits(queue=math.nan)}),
        ("limits.queue", {"limits": tercet.TimeLimits(queue=math.inf)}),
        ("timeout", {"timeout": None}),
        ("timeout", {"timeout": 0}),
        ("timeout", {"timeout": math.inf}),
        ("timeout", {"timeout": math.nan}),
        ("request_id", {"request_id": "a b"}),
        ("request_id", {"request_id": "x" * 129}),
        ("tenant", {"tenant": ""}),
        ("priority", {"priority": 2**31}),
    ],
)
def test_refused_by_name(field: str, given: dict[str, Any]) -> None:
    with pytest.raises(tercet.InvalidArgumentError) as caught:
        wire(**given)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "messages"),
    [
        ("messages", "hello"),
        ("messages", {"role": "user", "content": "x"}),
        ("messages[0]", ["hello"]),
        ("messages[0].content", [{"role": "user"}]),
        ("messages[0].content", [{"role": "user", "content": [{"type": "text"}]}]),
        ("messages[1].refusal", [{"role": "user", "content": ""}, {"role": "user", "content": "", "refusal": "x"}]),
        ("messages[0].tool_calls", [{"role": "assistant", "content": "", "tool_calls": [{"a": math.nan}]}]),
    ],
)
def test_messages_refused_by_name(field: str, messages: Any) -> None:
    with pytest.raises(tercet.InvalidArgumentError) as caught:
        chat_call(messages, {}, SETTINGS, "d")
    assert caught.value.field == field


def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        wire(temprature=0)
    with pytest.raises(TypeError, match="tools"):
        wire(tools=[])
    with tercet.Client("localhost:1") as client, pytest.raises(TypeError, match="temperature"):
        client.tokenize("x", temperature=0)  # type: ignore[call-arg]


@given(seconds=st.floats(0, 1e9))
def test_limits_never_round_to_zero(seconds: float) -> None:
    nanoseconds = wire(limits=tercet.TimeLimits(total=seconds)).limits.total_ns
    assert (nanoseconds == 0) is (seconds == 0)
    assert abs(nanoseconds - seconds * 1e9) <= 1


async def test_every_call_has_a_deadline_and_an_identity(driver: Driver, service: ScriptedTokenizer) -> None:
    service.scripts.extend([plays(accepted(), finished())] * 2)
    await driver.on(await driver.call("generate", "x"), "text")
    await driver.on(await driver.call("chat", []), "text")
    assert await driver.call("tokenize", "aä") == [97, 195, 164]
    assert await driver.call("detokenize", [97, 195, 164]) == "aä"
    rendered = await driver.call("render_chat", [{"role": "user", "content": "hi"}])
    assert rendered == tercet.RenderedChat("<user>hi", (1, 2))
    described = await driver.call("describe", timeout=11)
    assert (described.model, described.max_model_len, described.eos_token_ids) == ("m", 2048, (2,))
    *others, last = service.time_left
    assert all(seconds is not None and 30 < seconds <= 33.5 for seconds in others)
    assert last is not None
    assert last <= 11.2
    assert len({metadata["tercet-request-id"] for metadata in service.metadata}) == 6
    assert {metadata["tercet-tenant"] for metadata in service.metadata} == {"t"}


async def test_the_default_timeout(service: ScriptedTokenizer) -> None:
    for kind in CLIENTS:
        async with serving(service) as target, driving(kind, target) as driver:
            await driver.call("tokenize", "x")
    assert all(seconds is not None and 110 < seconds <= 122 for seconds in service.time_left)


async def test_api_key_and_metadata(service: ScriptedTokenizer) -> None:
    for kind in CLIENTS:
        async with serving(service) as target, driving(kind, target, api_key="k", metadata={"x-team": "a"}) as driver:
            await driver.call("tokenize", "x")
        assert service.metadata[-1]["authorization"] == "Bearer k"
        assert service.metadata[-1]["x-team"] == "a"


def test_an_api_key_crosses_no_network_in_the_clear() -> None:
    for target in ("10.0.0.1:1", "dns:///example.org:1", "127.0.0.1.example.org:1"):
        with pytest.raises(tercet.InvalidArgumentError, match="unencrypted"):
            Settings(target, api_key="k")
        assert Settings(target, api_key="k", plaintext_api_key=True).api_key == "k"
        assert Settings(target, api_key="k", tls=True).api_key == "k"
    assert "secret" not in repr(Settings("localhost:1", api_key="secret"))


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("timeout", {"timeout": None}),
        ("api_key", {"api_key": ""}),
        ("api_key", {"api_key": "a\nb"}),
        ("metadata", {"metadata": {"Authorization": "x"}}),
        ("metadata", {"metadata": {"authorization": "x"}}),
        ("metadata", {"metadata": {"a": "ä"}}),
        ("target", {"target": "localhost"}),
        ("target", {"target": "localhost:0"}),
        ("target", {"target": "localhost:65536"}),
        ("target", {"target": "http://localhost:1"}),
        ("target", {"target": "unix:"}),
        ("target", {"target": "unix:/" + "x" * 107}),
        ("target", {"target": ""}),
    ],
)
def test_client_options_refused_by_name(field: str, given: dict[str, Any]) -> None:
    with pytest.raises(tercet.InvalidArgumentError) as caught:
        tercet.Client(**{"target": "localhost:1", **given})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("target", "local", "address"),
    [
        ("localhost:1", True, ("localhost", 1)),
        ("127.8.8.8:1", True, ("127.8.8.8", 1)),
        ("[::1]:80", True, ("::1", 80)),
        ("unix:/a/b", True, ("/a/b", None)),
        ("unix:///a/b", True, ("/a/b", None)),
        ("unix:rel", True, ("rel", None)),
        ("example.org:443", False, ("example.org", 443)),
        ("dns:///example.org:443", False, ("example.org", 443)),
        ("ipv4:127.0.0.1:1,10.0.0.1:1", False, ("127.0.0.1", 1)),
    ],
)
def test_targets(target: str, local: bool, address: tuple[str, int | None]) -> None:
    assert Settings(target).target == target
    assert is_local(target) is local
    assert server_address(target) == address
    arguments = dict(channel_options(target))
    assert arguments["grpc.keepalive_time_ms"] == 20_000
    assert "round_robin" in str(arguments["grpc.service_config"])
    assert ("grpc.enable_http_proxy" in arguments) is local


def test_retry_policy_refuses() -> None:
    for wrong in ({"attempts": 0}, {"initial_backoff": 0}, {"initial_backoff": 9}, {"max_backoff": math.inf}):
        with pytest.raises(tercet.InvalidArgumentError):
            tercet.RetryPolicy(**wrong)  # type: ignore[arg-type]


def test_both_clients_have_the_same_signatures() -> None:
    for name in ("__init__", "generate", "chat", "tokenize", "detokenize", "render_chat", "describe", "close"):
        sync, aio = (inspect.signature(getattr(client, name)) for client in CLIENTS.values())
        assert sync.parameters == aio.parameters, name
    public = [{name for name in dir(client) if not name.startswith("_")} for client in CLIENTS.values()]
    assert public[0] == public[1]
    streams = [{name for name in dir(kind) if not name.startswith("_")} for kind in (tercet.Stream, tercet.AsyncStream)]
    assert streams[0] == streams[1]


def test_everything_public_is_documented() -> None:
    for name in tercet.__all__:
        value = getattr(tercet, name)
        assert inspect.getdoc(value), name
        for attribute, member in vars(value).items():
            if not attribute.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                assert inspect.getdoc(member), f"{name}.{attribute}"


def test_imports_nothing_heavy() -> None:
    code = (
        "import sys, tercet, tercet.v1.tokenizer_pb2_grpc; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"torch", "services", "executor", "kernels", "opentelemetry", "numpy", "tokenizers"} & set(loaded)
    assert {"grpc", "google", "tercet"} <= set(loaded)


def test_no_generated_type_is_public() -> None:
    for name in tercet.__all__:
        assert "_pb2" not in getattr(tercet, name).__module__
    assert _request.MAX_ANSWERS == 128
