"""The gateway with keys, for other origins and over TLS; and its pages of tokens."""

import ssl
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gateway_support import CHAT, COMPLETIONS, Gateway, ScriptedEngine, answer, chat_body, prompt_body
from keys_support import SERVICE_KEY, Authority, make_key, write_keys, write_service_key

from services.address import Address
from services.certificates import Certificates
from services.gate import Gate
from services.gateway.server import serve

ALICE, ALICE_KEY = make_key(1, "alice", max_priority=5)
LOW, LOW_KEY = make_key(2, "low", max_priority=-3)
OPS, OPS_KEY = make_key(3, "ops", "operator")
PAGE = "https://page.example"


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(
        str(write_keys(tmp_path / "keys.json", ALICE, LOW, OPS)), str(write_service_key(tmp_path / "service.key"))
    )


def bearer(key: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **{name.replace("_", "-"): value for name, value in more.items()}}


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat_body()), (COMPLETIONS, prompt_body())])
async def test_generating_asks_for_a_key(gate: Gate, path: str, body: dict[str, Any]) -> None:
    gateway = Gateway(ScriptedEngine(answer("a")), gate=gate)
    for headers in ({}, bearer("wrong"), {"authorization": ALICE_KEY}):
        refused = await gateway.post(path, body, {**headers, "x-request-id": "r.1"})
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
        assert refused.headers["x-request-id"] == "r.1"
        assert refused.headers["www-authenticate"] == "Bearer"
    assert gateway.engine.requests == []
    assert gateway.observed() == {(path, "4xx"): 3.0}
    assert (await gateway.post(path, body, bearer(ALICE_KEY))).status_code == 200


async def test_the_engine_gets_the_keys_tenant_and_priority(gate: Gate) -> None:
    gateway = Gateway(ScriptedEngine(answer("a")), gate=gate)

    async def asked(headers: dict[str, str], **body: Any) -> tuple[str | None, int | None, int]:
        response = await gateway.post(CHAT, chat_body(**body), headers)
        assert response.status_code == 200, response.text
        call, request = gateway.engine.calls[-1], gateway.engine.requests[-1]
        return call.tenant, call.priority, request.context.priority

    assert await asked(bearer(ALICE_KEY)) == ("alice", 0, 0)
    assert await asked(bearer(ALICE_KEY, tercet_tenant="alice", tercet_priority="5")) == ("alice", 5, 5)
    assert await asked(bearer(ALICE_KEY), priority=4) == ("alice", 4, 4)
    assert await asked(bearer(LOW_KEY)) == ("low", -3, -3)
    assert await asked(bearer(SERVICE_KEY, tercet_tenant="zed", tercet_priority="50")) == ("zed", 50, 50)
    count = len(gateway.engine.requests)
    for headers, body in (
        (bearer(ALICE_KEY, tercet_tenant="bob"), {}),
        (bearer(ALICE_KEY, tercet_priority="6"), {}),
        (bearer(ALICE_KEY), {"priority": 6}),
    ):
        refused = await gateway.post(CHAT, chat_body(**body), headers)
        assert refused.status_code == 403
        assert refused.json()["error"]["type"] == "permission_error"
    assert len(gateway.engine.requests) == count


async def test_pages_and_their_roles(gate: Gate) -> None:
    gateway = Gateway(ScriptedEngine(), gate=gate)
    async with gateway.client() as client:
        for path in ("/health", "/ready"):
            assert (await client.get(path)).status_code == 200
        for path, user in (("/v1/models", 200), ("/v1/models/toy", 200), ("/metrics", 403)):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers=bearer(ALICE_KEY))).status_code == user
            assert (await client.get(path, headers=bearer(OPS_KEY))).status_code == 200
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})):
            assert (await client.post(path, json=body)).status_code == 401
            assert (await client.post(path, json=body, headers=bearer(ALICE_KEY))).status_code == 200


async def test_tokenize_and_detokenize() -> None:
    gateway = Gateway(ScriptedEngine())

    async def told(path: str, **body: Any) -> Any:
        response = await gateway.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    whole = await told("/tokenize", model="toy", prompt="hi")
    assert whole == {"count": 3, "tokens": [0, 104, 105], "max_model_len": 64}
    bare = await told("/tokenize", prompt="hé", add_special_tokens=False, return_token_strs=True, model=None)
    assert (bare["tokens"], bare["token_strs"]) == ([104, 195, 169], ["h", "�", "�"])
    message = {"role": "user", "content": "x"}
    chat = await told("/tokenize", messages=[message])
    assert bytes(chat["tokens"]) == b"user:x;assistant:"
    assert (await told("/tokenize", messages=[message], add_generation_prompt=False))["count"] == 7
    assert await told("/detokenize", tokens=[0, 104, 105]) == {"prompt": "\0hi"}
    assert await told("/detokenize", tokens=[0, 104, 105], skip_special_tokens=True) == {"prompt": "hi"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "prompt"),
        ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "tools": [1]}, 400, "tools"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "color": "a"}, 400, "color"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
async def test_bodies_are_refused_by_name(path: str, body: dict[str, Any], status: int, param: str) -> None:
    refused = await Gateway(ScriptedEngine()).post(path, body, {"x-request-id": "r.2"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)
    assert refused.headers["x-request-id"] == "r.2"


async def test_every_answer_has_a_request_id() -> None:
    gateway = Gateway(ScriptedEngine())
    async with gateway.client() as client:
        for path in ("/health", "/v1/models", "/nothing", "/metrics"):
            drawn = [(await client.get(path)).headers["x-request-id"] for _ in range(2)]
            assert drawn[0] != drawn[1]
            for header in ("x-request-id", "tercet-request-id"):
                assert (await client.get(path, headers={header: "mine"})).headers["x-request-id"] == "mine"
            assert (await client.get(path, headers={"x-request-id": "no good"})).headers["x-request-id"] != "no good"


async def test_what_openai_has_and_is_not_here_is_named() -> None:
    async with Gateway(ScriptedEngine()).client() as client:
        for path in ("/v1/responses", "/v1/audio/speech", "/v1/files/f-1", "/v1/embeddings"):
            for method in ("GET", "POST"):
                refused = await client.request(method, path)
                assert (refused.status_code, refused.json()["error"]["code"]) == (404, "unsupported_endpoint")
                assert path in refused.json()["error"]["message"]
        assert (await client.get("/v1/filesystem")).json()["error"]["code"] == "unknown_url"


async def test_other_origins_may_not_read_unless_they_are_named(gate: Gate) -> None:
    preflight = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    closed = Gateway(ScriptedEngine(answer("a")))
    async with closed.client() as client:
        asked = await client.options(CHAT, headers=preflight)
        assert asked.status_code == 405
        assert not any(name.startswith("access-control") for name in asked.headers)
    plain = await closed.post(CHAT, chat_body(), {"origin": PAGE})
    assert not any(name.startswith("access-control") for name in plain.headers)

    opened = Gateway(ScriptedEngine(answer("a")), gate=gate, cors_origins=[PAGE])
    async with opened.client() as client:
        allowed = await client.options(CHAT, headers=preflight)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in allowed.headers
        other = await client.options(CHAT, headers={**preflight, "origin": "https://other.example"})
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers
    for headers, status in (({}, 401), (bearer(ALICE_KEY), 200)):
        got = await opened.post(CHAT, chat_body(), {**headers, "origin": PAGE})
        assert got.status_code == status
        assert got.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in got.headers["access-control-expose-headers"]


async def test_openai_over_tls_with_a_key_and_a_client_certificate(tmp_path: Path, gate: Gate) -> None:
    authority, strangers = Authority(tmp_path, "ca"), Authority(tmp_path, "strangers")
    cert, key = map(str, authority.certificate("server"))
    gateway = Gateway(ScriptedEngine(answer("Hel", "lo")), gate=gate)
    tls = Certificates(cert, key, str(authority.ca))
    server = await serve(gateway.app, Address("127.0.0.1", 0), tls)
    base = f"https://localhost:{server.port}"
    try:
        context = ssl.create_default_context(cafile=str(authority.ca))
        context.load_cert_chain(*map(str, authority.certificate("mine")))
        async with (
            httpx.AsyncClient(verify=context) as http,
            openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=ALICE_KEY, http_client=http, max_retries=0) as client,
        ):
            messages: Any = [{"role": "user", "content": "hi"}]
            got = await client.chat.completions.create(model="toy", messages=messages)
            assert got.choices[0].message.content == "Hello"
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="sk-wrong").chat.completions.create(model="toy", messages=messages)
            with pytest.raises(openai.NotFoundError):
                await client.embeddings.create(model="toy", input="a")
        assert gateway.engine.calls[0].tenant == "alice"
        nobody = ssl.create_default_context(cafile=str(authority.ca))
        stranger = ssl.create_default_context(cafile=str(authority.ca))
        stranger.load_cert_chain(*map(str, strangers.certificate("stranger")))
        for wrong in (nobody, stranger):
            async with httpx.AsyncClient(verify=wrong) as http:
                with pytest.raises(httpx.HTTPError):
                    await http.get(f"{base}/health")
    finally:
        await server.close(0.0)
