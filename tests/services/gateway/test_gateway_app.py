"""The app over a scripted engine, in process: replies, streams, statuses, headers, spans, pages."""

import json
import logging
from typing import Any

import pytest
from gateway_support import (
    CHAT,
    COMPLETIONS,
    CREATED,
    Gateway,
    Item,
    ScriptedEngine,
    accepted,
    answer,
    chat_body,
    delta,
    finished,
    prompt_body,
    sse,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.trace import StatusCode

from services import errors, names
from services.config import HttpLimits
from services.gateway import http_errors
from services.names import HTTP_RESPONSE_STATUS_CODE
from tercet.v1 import common_pb2, tokenizer_pb2

STREAM = {"stream": True}


def logprobs(text: str, logprob: float, *top: tuple[str, float]) -> tokenizer_pb2.TextLogprobs:
    def entry(token: str, value: float) -> tokenizer_pb2.TextLogprob:
        return tokenizer_pb2.TextLogprob(token_id=1, logprob=value, text=token, bytes=token.encode())

    return tokenizer_pb2.TextLogprobs(drawn=entry(text, logprob), top=[entry(*pair) for pair in top])


async def test_a_whole_chat_answer() -> None:
    gateway = Gateway(ScriptedEngine(answer("Hel", "lo", cached=4)))
    response = await gateway.post(CHAT, chat_body(), {"x-request-id": "abc.1"})
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "abc.1"
    assert response.json() == {
        "id": "chatcmpl-abc.1",
        "object": "chat.completion",
        "created": CREATED,
        "model": "toy",
        "system_fingerprint": "abc123",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 2,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
    assert gateway.engine.live == 0


async def test_a_whole_completion() -> None:
    gateway = Gateway(ScriptedEngine(answer("a", reason=common_pb2.FINISH_REASON_LENGTH)))
    got = (await gateway.post(COMPLETIONS, prompt_body())).json()
    assert got["object"] == "text_completion"
    assert got["id"].startswith("cmpl-")
    assert got["choices"] == [{"index": 0, "text": "a", "logprobs": None, "finish_reason": "length"}]


async def test_a_chat_stream_is_one_chunk_per_token() -> None:
    gateway = Gateway(ScriptedEngine(answer("Hel", "", "lo")))
    response = await gateway.post(CHAT, chat_body(**STREAM))
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = sse(response.text)
    assert chunks[-1] == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": "Hel"},
        {"content": ""},
        {"content": "lo"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, None, "stop"]
    assert all("usage" not in chunk for chunk in chunks[:-1])
    assert len({(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks[:-1]}) == 1


async def test_usage_in_streams() -> None:
    options = {"include_usage": True}
    gateway = Gateway(ScriptedEngine(answer("a", "b", cached=3)))
    chunks = sse((await gateway.post(COMPLETIONS, prompt_body(**STREAM, stream_options=options))).text)
    assert [chunk["usage"] for chunk in chunks[:-2]] == [None] * 3
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    options["continuous_usage_stats"] = True
    chunks = sse((await gateway.post(CHAT, chat_body(**STREAM, stream_options=options))).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]] == [1, 2, 2, 2]
    assert [len(chunk["choices"]) for chunk in chunks[:-1]] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        (common_pb2.FINISH_REASON_STOP, "stop"),
        (common_pb2.FINISH_REASON_LENGTH, "length"),
        (common_pb2.FINISH_REASON_TIME_LIMIT, "time_limit"),
    ],
)
async def test_finish_reasons(reason: int, word: str) -> None:
    gateway = Gateway(ScriptedEngine(answer("a", reason=reason)))
    assert (await gateway.post(CHAT, chat_body())).json()["choices"][0]["finish_reason"] == word
    chunks = sse((await gateway.post(CHAT, chat_body(**STREAM))).text)
    assert chunks[-2]["choices"][0]["finish_reason"] == word
    assert {dict(span.attributes or {})[names.OUTCOME] for span in gateway.exporter.get_finished_spans()} == {word}


async def test_an_answer_without_tokens() -> None:
    gateway = Gateway(ScriptedEngine([accepted(), finished(tokens=0)]))
    assert (await gateway.post(CHAT, chat_body())).json()["choices"][0]["message"]["content"] == ""
    chunks = sse((await gateway.post(CHAT, chat_body(**STREAM))).text)
    assert chunks[0]["choices"][0] == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert chunks[1:] == ["[DONE]"]


async def test_several_answers_each_open_and_end_once() -> None:
    script: list[Item] = [accepted(), delta("a", index=1), delta("b", index=0), finished(tokens=1, index=1)]
    script += [delta("c", index=0), finished(tokens=2, index=0)]
    gateway = Gateway(ScriptedEngine(script))
    got = (await gateway.post(CHAT, chat_body(n=2))).json()
    assert [choice["message"]["content"] for choice in got["choices"]] == ["bc", "a"]
    assert got["usage"]["completion_tokens"] == 3
    assert got["usage"]["prompt_tokens"] == 7
    chunks = sse((await gateway.post(CHAT, chat_body(n=2, stream=True))).text)[:-1]
    assert [("role" in c["choices"][0]["delta"], c["choices"][0]["index"]) for c in chunks] == [
        (True, 1),
        (True, 0),
        (False, 1),
        (False, 0),
        (False, 0),
    ]


async def test_logprobs_on_both_endpoints() -> None:
    script: list[Item] = [
        accepted(),
        delta("é", logprobs=[logprobs("é", -0.5, ("é", -0.5), ("e", -1.5))]),
        delta("b", logprobs=[logprobs("b", float("-inf"))]),
        finished(),
    ]
    gateway = Gateway(ScriptedEngine(script))
    got = (await gateway.post(CHAT, chat_body(logprobs=True, top_logprobs=2))).json()
    content = got["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "é",
        "logprob": -0.5,
        "bytes": [195, 169],
        "top_logprobs": [
            {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
            {"token": "e", "logprob": -1.5, "bytes": [101]},
        ],
    }
    assert content[1]["logprob"] == -9999.0
    assert content[1]["top_logprobs"] == []
    whole = (await gateway.post(COMPLETIONS, prompt_body(logprobs=2))).json()["choices"][0]["logprobs"]
    assert whole["tokens"] == ["é", "b"]
    assert whole["text_offset"] == [0, 1]
    assert whole["top_logprobs"] == [{"é": -0.5, "e": -1.5}, {}]
    chunks = sse((await gateway.post(COMPLETIONS, prompt_body(logprobs=2, stream=True))).text)
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks[:2]] == [[0], [1]]
    chunks = sse((await gateway.post(CHAT, chat_body(stream=True))).text)
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in chunks[:-1])


async def test_what_the_engine_is_told() -> None:
    gateway = Gateway(ScriptedEngine(answer("a")), HttpLimits(request_timeout_s=12.5))
    headers = {
        "tercet-request-id": "id-1",
        "tercet-tenant": "acme",
        "tercet-priority": "-7",
        "authorization": "Bearer x",
    }
    await gateway.post(CHAT, chat_body(), headers)
    (call,) = gateway.engine.calls
    assert (call.request_id, call.tenant, call.priority, call.timeout_s) == ("id-1", "acme", -7, 12.5)
    assert call.metadata == {names.MD_REQUEST_ID: "id-1", names.MD_TENANT: "acme", names.MD_PRIORITY: "-7"}
    await gateway.post(CHAT, chat_body())
    second = gateway.engine.calls[1]
    assert second.tenant is None
    assert second.priority is None
    assert len(second.request_id) == 32


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"x-request-id": "a b"}, "x-request-id"),
        ({"x-request-id": ""}, "x-request-id"),
        ({"x-request-id": "x" * 129}, "x-request-id"),
        ({"x-request-id": "é"}, "x-request-id"),
        ({"x-request-id": "x" * 10_000}, "x-request-id"),
        ({"x-request-id": "a\r\nset-cookie: b"}, "x-request-id"),
        ({"x-request-id": "http://10.0.0.1/"}, "x-request-id"),
        ({"x-request-id": "a", "tercet-request-id": "b"}, "x-request-id"),
        ({"tercet-tenant": "a/b"}, "tercet-tenant"),
        ({"tercet-priority": "high"}, "tercet-priority"),
        ({"tercet-priority": "101"}, "tercet-priority"),
        ({"content-encoding": "gzip"}, "content-encoding"),
    ],
)
async def test_a_bad_header_is_refused_by_name(headers: dict[str, str], param: str) -> None:
    gateway = Gateway(ScriptedEngine(answer("a")))
    async with gateway.client() as client:
        raw = [(key.encode(), value.encode("latin-1")) for key, value in headers.items()]
        response = await client.post(CHAT, json=chat_body(), headers=raw)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert len(response.headers["x-request-id"]) == 32
    assert gateway.engine.calls == []


async def test_a_header_that_comes_twice_is_refused_unless_it_says_the_same() -> None:
    for values, status in ((("a", "b"), 400), (("b", "a"), 400), (("a", "a"), 200)):
        for name in ("x-request-id", "tercet-request-id", "tercet-tenant", "tercet-priority"):
            gateway = Gateway(ScriptedEngine(answer("a")))
            given = [str(1 + "ab".index(value)) if name == "tercet-priority" else value for value in values]
            async with gateway.client() as client:
                response = await client.post(CHAT, json=chat_body(), headers=[(name, one) for one in given])
            assert response.status_code == status, (name, values, response.text)
            if status == 400:
                assert response.json()["error"]["param"] == name


CASES: list[tuple[errors.ServiceError, int, str]] = [
    (errors.InvalidArgument("m", field="sampling.max_tokens", reason="PROMPT_TOO_LONG"), 400, "prompt_too_long"),
    (errors.Unimplemented("m", field="sampling.n"), 400, "unsupported_parameter"),
    (errors.FailedPrecondition("m"), 400, "failed_precondition"),
    (errors.Unauthenticated("m"), 401, "invalid_api_key"),
    (errors.PermissionDenied("m"), 403, "permission_denied"),
    (errors.NotFound("m", field="model"), 404, "model_not_found"),
    (errors.AlreadyExists("m"), 409, "request_id_in_use"),
    (errors.ResourceExhausted("m", retry_after_s=1.2), 429, "rate_limit_exceeded"),
    (errors.Cancelled("m"), 499, "cancelled"),
    (errors.Aborted("m"), 500, "aborted"),
    (errors.Internal("m"), 500, "internal_error"),
    (errors.ServiceError("m"), 500, "internal_error"),
    (errors.Unavailable("m"), 503, "unavailable"),
    (errors.DeadlineExceeded("m"), 504, "deadline_exceeded"),
]


@pytest.mark.parametrize(("error", "status", "code"), CASES, ids=lambda v: v if isinstance(v, str) else None)
@pytest.mark.parametrize("body", [chat_body(), chat_body(**STREAM)], ids=["whole", "stream"])
@pytest.mark.parametrize("before", [[], [accepted()]], ids=["at once", "once accepted"])
async def test_a_refusal_keeps_its_status_until_the_first_delta(
    error: errors.ServiceError, status: int, code: str, body: Any, before: list[Item]
) -> None:
    gateway = Gateway(ScriptedEngine([*before, error]))
    response = await gateway.post(CHAT, body)
    assert response.status_code == status
    got = response.json()["error"]
    assert set(got) == {"message", "type", "param", "code"}
    assert (got["message"], got["code"]) == ("m", code)
    if error.field is not None:
        assert got["param"] == error.field.removeprefix("sampling.")
    assert response.headers.get("retry-after") == ("2" if error.retry_after_s is not None else None)
    (span,) = gateway.exporter.get_finished_spans()
    assert dict(span.attributes or {})[names.OUTCOME] == code
    assert span.status.status_code is (StatusCode.ERROR if status >= 500 else StatusCode.UNSET)
    assert gateway.observed() == {(CHAT, "client_gone" if status == 499 else f"{status // 100}xx"): 1.0}
    assert gateway.engine.live == 0


def test_every_error_class_has_a_row() -> None:
    kinds = [
        kind
        for module in (errors, http_errors)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, errors.ServiceError) and kind is not errors.ServiceError
    ]
    assert set(kinds) == set(http_errors.ROWS)


async def test_an_error_after_the_start_is_an_event_and_no_done() -> None:
    gateway = Gateway(ScriptedEngine([accepted(), delta("a"), errors.Internal("row failed", reason="NAN_LOGITS")]))
    response = await gateway.post(CHAT, chat_body(**STREAM))
    assert response.status_code == 200
    chunks = sse(response.text)
    assert len(chunks) == 2
    assert chunks[1] == {
        "error": {"message": "row failed", "type": "server_error", "param": None, "code": "nan_logits"}
    }
    (span,) = gateway.exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert gateway.observed() == {(CHAT, "5xx"): 1.0}


@pytest.mark.parametrize(
    "script",
    [
        [],
        [accepted()],
        [accepted(), delta("a")],
        [delta("a"), finished()],
        [accepted(), accepted(), finished()],
        [accepted(), finished(), delta("late")],
        [accepted(), finished(), finished()],
        [accepted(), delta("a", index=1), finished()],
        [accepted(), finished(reason=0)],
        [accepted(), finished(reason=77)],
        [accepted(), tokenizer_pb2.TokenizerServiceGenerateResponse()],
    ],
)
async def test_a_stream_that_breaks_the_protocol_is_never_a_success(script: list[Item]) -> None:
    gateway = Gateway(ScriptedEngine(script))
    whole = await gateway.post(CHAT, chat_body())
    assert whole.status_code == 500
    assert whole.json()["error"]["code"] == "broken_stream"
    streamed = await gateway.post(CHAT, chat_body(**STREAM))
    if streamed.status_code == 200:
        assert sse(streamed.text)[-1]["error"]["code"] == "broken_stream"
    else:
        assert streamed.json()["error"]["code"] == "broken_stream"


async def test_a_defect_tells_the_caller_nothing_but_the_request_id(caplog: pytest.LogCaptureFixture) -> None:
    for script in ([ValueError("secret")], [accepted(), delta("a"), ValueError("secret")]):
        gateway = Gateway(ScriptedEngine(script))  # type: ignore[arg-type]
        with caplog.at_level(logging.ERROR):
            response = await gateway.post(CHAT, chat_body(**STREAM), {"x-request-id": "id9"})
        assert "secret" not in response.text
        assert "id9" in response.text
        assert "internal error" in response.text
    assert "secret" in caplog.text


async def test_a_prompt_that_does_not_fit_is_named_as_the_endpoint_calls_it() -> None:
    gateway = Gateway(ScriptedEngine([errors.InvalidArgument("70 of 64", field="prompt_len", reason="DOES_NOT_FIT")]))
    for path, body, name in ((CHAT, chat_body(), "messages"), (COMPLETIONS, prompt_body(), "prompt")):
        error = (await gateway.post(path, body)).json()["error"]
        assert (error["param"], error["code"]) == (name, "does_not_fit")


async def test_long_messages_are_capped() -> None:
    gateway = Gateway(ScriptedEngine([errors.InvalidArgument("x" * 30_000)]))
    response = await gateway.post(CHAT, chat_body())
    assert response.status_code == 400
    assert len(response.json()["error"]["message"]) <= 1024


async def test_bodies_are_bounded() -> None:
    gateway = Gateway(ScriptedEngine(answer("a")), HttpLimits(max_body_bytes=1024))
    assert (await gateway.post(CHAT, json.dumps(chat_body()).ljust(1024).encode())).status_code == 200
    response = await gateway.post(CHAT, json.dumps(chat_body()).ljust(1025).encode())
    assert response.status_code == 413
    assert "1024" in response.json()["error"]["message"]
    assert response.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("raw", [b"", b"\xff", b"[]", b"{", b'{"a":' * 10_000, b'{"temperature": NaN}'])
async def test_a_body_that_is_no_json_object(raw: bytes) -> None:
    response = await Gateway(ScriptedEngine()).post(CHAT, raw, {"content-type": "text/plain"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


async def test_the_trace_goes_on_and_is_named() -> None:
    gateway = Gateway(ScriptedEngine(answer("a")))
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    response = await gateway.post(CHAT, chat_body(), {"traceparent": f"00-{trace_id}-{parent}-01"})
    (span,) = gateway.exporter.get_finished_spans()
    assert span.name == f"POST {CHAT}"
    assert format(span.get_span_context().trace_id, "032x") == trace_id  # type: ignore[union-attr]
    assert span.parent is not None
    assert format(span.parent.span_id, "016x") == parent
    assert response.headers["tercet-trace-id"] == trace_id
    attributes = dict(span.attributes or {})
    assert attributes[HTTP_RESPONSE_STATUS_CODE] == 200
    assert attributes[names.OUTPUT_TOKENS] == 1
    assert attributes[names.REQUEST_ID] == response.headers["x-request-id"]
    assert "hi" not in attributes.values()


async def test_a_broken_traceparent_starts_a_new_trace() -> None:
    gateway = Gateway(ScriptedEngine(answer("a")))
    response = await gateway.post(CHAT, chat_body(), {"traceparent": "00-zz-zz-01"})
    assert response.status_code == 200
    (span,) = gateway.exporter.get_finished_spans()
    assert span.parent is None


async def test_models() -> None:
    gateway = Gateway(ScriptedEngine())
    card = {"id": "toy", "object": "model", "created": CREATED, "owned_by": "tercet", "max_model_len": 64}
    async with gateway.client() as client:
        assert (await client.get("/v1/models")).json() == {"object": "list", "data": [card]}
        assert (await client.get("/v1/models/toy")).json() == card
        missing = await client.get("/v1/models/org/other")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"
        assert "org/other" in missing.json()["error"]["message"]
        gateway.engine.describe_error = errors.Unavailable("no executor", retry_after_s=3)
        down = await client.get("/v1/models")
        assert down.status_code == 503
        assert down.headers["retry-after"] == "3"
        assert down.json()["error"]["message"] == "no executor"


async def test_health_readiness_and_metrics() -> None:
    gateway = Gateway(ScriptedEngine(answer("a")))
    gateway.engine.unready = "no executor"
    async with gateway.client() as client:
        assert (await client.get("/health")).status_code == 200
        unready = await client.get("/ready")
        assert unready.status_code == 503
        assert unready.json()["reason"] == "no executor"
        gateway.engine.unready = None
        assert (await client.get("/ready")).status_code == 200
        await client.post(CHAT, json=chat_body())
        metrics = await client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert f'tercet_http_requests_total{{route="{CHAT}",status="2xx"}} 1.0' in metrics.text
        open_metrics = await client.get("/metrics", headers={"accept": "application/openmetrics-text"})
        assert open_metrics.text.endswith("# EOF\n")


async def test_unknown_paths_and_methods() -> None:
    gateway = Gateway(ScriptedEngine())
    async with gateway.client() as client:
        missing = await client.post("/v1/embeddings", json={})
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "unsupported_endpoint"
        unknown = await client.post("/v1/nothing", json={})
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "unknown_url"
        assert "/v1/embeddings" in missing.json()["error"]["message"]
        assert (await client.get("/v1/models/")).status_code == 404
        wrong = await client.get(CHAT)
        assert wrong.status_code == 405
        assert wrong.headers["allow"] == "POST"
        assert wrong.json()["error"]["code"] == "method_not_allowed"
        assert (await client.post("/health")).status_code == 405
        odd = await client.request("BREW", CHAT)
        assert odd.status_code == 405
    assert gateway.observed() == {}


async def test_the_series_do_not_grow_with_what_clients_send() -> None:
    gateway = Gateway(ScriptedEngine(answer("a")))
    async with gateway.client() as client:
        await client.post(CHAT, json=chat_body())
        before = len((await client.get("/metrics")).text.splitlines())
        for i in range(30):
            await client.post(CHAT, json=chat_body(model=f"m{i}"), headers={"tercet-tenant": f"t{i}"})
            await client.request(f"M{i}", f"/p{i}")
        assert len((await client.get("/metrics")).text.splitlines()) == before


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["model", "messages", "prompt", "stream", "n", "stop", "temperature", "odd"]),
        st.none()
        | st.booleans()
        | st.integers(-2, 3)
        | st.text(max_size=3)
        | st.just([{"role": "user", "content": "x"}]),
        max_size=5,
    ),
    st.sampled_from([CHAT, COMPLETIONS]),
)
async def test_no_body_makes_a_server_error(body: dict[str, Any], path: str) -> None:
    gateway = Gateway(ScriptedEngine([], per_answer=[finished()]))
    response = await gateway.post(path, body)
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
