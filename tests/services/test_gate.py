"""Who gets in: keys, roles, tenants and priorities; files that change; addresses that may not be listened on."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_stack import until
from keys_support import SERVICE_KEY, Authority, make_key, write_keys, write_service_key
from opentelemetry.trace import NoOpTracer

from services import gate as gates
from services.callers import read_caller
from services.config import GatewayConfig, TokenizerConfig
from services.errors import PermissionDenied, ServiceError, Unauthenticated
from services.gate import OPEN_GATE, Gate, check_role, least_role
from services.health import Readiness, add_health, check
from services.keys import Principal, Role
from services.rpc import Outgoing, bind, make_channel, make_server
from services.rpc_errors import from_rpc_error
from services.rpc_server import call_context
from services.settings import ConfigError, load
from services.trust import Trust, channel_credentials, open_trust
from services.trust_settings import CallTrust, ServerTrust
from tercet.v1 import common_pb2, executor_pb2, scheduler_pb2, tokenizer_pb2, tokenizer_pb2_grpc

ALICE, ALICE_KEY = make_key(1, "alice", max_priority=5)
LOW, LOW_KEY = make_key(2, "low", max_priority=-3)
OPS, OPS_KEY = make_key(3, "ops", "operator")


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(
        str(write_keys(tmp_path / "keys.json", ALICE, LOW, OPS)), str(write_service_key(tmp_path / "service.key"))
    )


def test_a_gate_without_keys_is_open() -> None:
    assert OPEN_GATE.admit(None) is None
    assert OPEN_GATE.admit("Bearer anything") is None


def test_each_key_is_its_principal(gate: Gate) -> None:
    def name_of(key: str) -> tuple[str | None, Role]:
        principal = gate.admit(f"Bearer {key}")
        assert principal is not None
        return principal.tenant, principal.role

    assert name_of(ALICE_KEY) == ("alice", Role.USER)
    assert name_of(OPS_KEY) == ("ops", Role.OPERATOR)
    assert name_of(SERVICE_KEY) == (None, Role.SERVICE)
    assert gate.admit(f"bearer  {ALICE_KEY} ") == ALICE.principal


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer ", f"Basic {ALICE_KEY}", "Bearer x", ALICE_KEY])
def test_others_are_refused(gate: Gate, given: str | None) -> None:
    with pytest.raises(Unauthenticated) as caught:
        gate.admit(given)
    assert ALICE_KEY not in caught.value.message


def test_every_method_of_the_contract_has_its_role() -> None:
    found = {
        method.full_name.rpartition(".")[0] + "/" + method.name: least_role(f"{service.full_name}/{method.name}")
        for module in (tokenizer_pb2, scheduler_pb2, executor_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    users = {name for name, role in found.items() if role is Role.USER}
    operators = {name.rpartition("/")[2] for name, role in found.items() if role is Role.OPERATOR}
    services = {name for name, role in found.items() if role is Role.SERVICE}
    assert {name for name in users if "Tokenizer" in name} == {name for name in found if "Tokenizer" in name}
    assert operators == {"GetLoad", "WatchKvEvents", "ListRequests", "Drain", "SetPolicy", "FlushCache"}
    assert services == {"tercet.v1.ExecutorService/Describe", "tercet.v1.ExecutorService/Run"}
    assert least_role("other.Service/Method") is Role.SERVICE
    assert least_role("tercet.v1.TokenizerServiceExtra/Generate") is Role.SERVICE


def test_over_vllm_only_operators_hear_of_everybodys_prompts() -> None:
    roles = {name: least_role(f"vllm.grpc.engine.VllmEngine/{name}") for name in ("Generate", "Abort", "GetTokenizer")}
    assert set(roles.values()) == {Role.USER}
    assert least_role("vllm.grpc.engine.VllmEngine/SubscribeKvEvents") is Role.OPERATOR
    assert least_role("vllm.grpc.engine.VllmEngine/GetLoads") is Role.OPERATOR
    assert least_role("vllm.grpc.engine.VllmEngine/FlushCache") is Role.OPERATOR


def test_a_lower_role_is_refused_by_name() -> None:
    for has, needs in itertools.product(Role, Role):
        principal = Principal("x", has, "t")
        if has >= needs:
            check_role(principal, needs, "m")
        else:
            with pytest.raises(PermissionDenied, match="m needs the key of"):
                check_role(principal, needs, "m")


def caller(principal: Principal | None, metadata: dict[str, str], **context: Any) -> tuple[str, int]:
    found = read_caller(common_pb2.RequestContext(**context), metadata, "id", principal)
    return found.tenant, found.priority


def test_the_tenant_and_the_priority_are_the_keys() -> None:
    alice, low, service = ALICE.principal, LOW.principal, gates.SERVICE
    assert caller(None, {"tercet-tenant": "zed", "tercet-priority": "9"}) == ("zed", 9)
    assert caller(alice, {}) == ("alice", 0)
    assert caller(alice, {"tercet-tenant": "alice", "tercet-priority": "5"}) == ("alice", 5)
    assert caller(alice, {}, tenant="alice", priority=-100) == ("alice", -100)
    assert caller(low, {}) == ("low", -3)
    assert caller(service, {"tercet-tenant": "zed", "tercet-priority": "100"}) == ("zed", 100)
    for metadata, context in (
        ({"tercet-tenant": "bob"}, {}),
        ({}, {"tenant": "bob"}),
        ({"tercet-tenant": "default"}, {}),
    ):
        with pytest.raises(PermissionDenied) as caught:
            caller(alice, metadata, **context)
        assert caught.value.reason == "OTHER_TENANT"
    with pytest.raises(PermissionDenied) as caught:
        caller(alice, {"tercet-priority": "6"})
    assert (caught.value.reason, caught.value.limit) == ("PRIORITY_TOO_HIGH", "5")


class WhoAmI(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Tells the caller as it was understood."""

    async def Detokenize(
        self, request: tokenizer_pb2.TokenizerServiceDetokenizeRequest, context: Any
    ) -> tokenizer_pb2.TokenizerServiceDetokenizeResponse:
        call = call_context(context)
        found = read_caller(common_pb2.RequestContext(), call.metadata, call.request_id, call.principal)
        return tokenizer_pb2.TokenizerServiceDetokenizeResponse(text=f"{found.tenant} {found.priority}")


@asynccontextmanager
async def running(trust: Trust) -> AsyncIterator[str]:
    server = make_server(NoOpTracer(), gate=trust.gate)
    tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(WhoAmI(), server)
    readiness = Readiness(())
    readiness.set_ready()
    add_health(server, readiness)
    address = bind(server, "127.0.0.1:0", trust.server)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


async def ask(address: str, outgoing: Outgoing, **metadata: str) -> str:
    async with make_channel(address, outgoing=outgoing) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        rows = tuple((key.replace("_", "-"), value) for key, value in metadata.items())
        try:
            answer = await stub.Detokenize(tokenizer_pb2.TokenizerServiceDetokenizeRequest(), metadata=rows, timeout=10)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return answer.text


async def refusal(address: str, outgoing: Outgoing = Outgoing(), **metadata: str) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await ask(address, outgoing, **metadata)
    return caught.value


async def test_keys_over_grpc(gate: Gate) -> None:
    async with running(Trust(gate)) as address:
        assert await ask(address, Outgoing(key=lambda: ALICE_KEY)) == "alice 0"
        assert await ask(address, Outgoing(), authorization=f"Bearer {ALICE_KEY}", tercet_priority="4") == "alice 4"
        assert await ask(address, Outgoing(key=lambda: SERVICE_KEY), tercet_tenant="zed") == "zed 0"
        nobody = await refusal(address)
        assert isinstance(nobody, Unauthenticated)
        assert nobody.reason == "NO_API_KEY"
        wrong = await refusal(address, Outgoing(key=lambda: ALICE_KEY[:-1] + "x"))
        assert isinstance(wrong, Unauthenticated)
        other = await refusal(address, Outgoing(key=lambda: ALICE_KEY), tercet_tenant="bob")
        assert isinstance(other, PermissionDenied)
        assert await check(address) is None  # a probe has no key


async def test_a_changed_file_is_read_and_a_bad_one_is_not(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "POLL_S", 0.01)
    path = tmp_path / "keys.json"
    reload = asyncio.Event()
    watching = asyncio.create_task(gate.watch(reload))
    try:
        write_keys(path, OPS)
        await until(lambda: ALICE.id not in gate.users.keys, "the revocation")
        assert gate.admit(f"Bearer {OPS_KEY}") == OPS.principal
        path.write_text("{")
        reload.set()
        await until(lambda: not reload.is_set(), "a forced reading")
        assert gate.admit(f"Bearer {OPS_KEY}") == OPS.principal
        path.unlink()
        await asyncio.sleep(0.05)
        assert gate.admit(f"Bearer {OPS_KEY}") == OPS.principal
        write_keys(path, ALICE)
        await until(lambda: ALICE.id in gate.users.keys, "the new key")
        (tmp_path / "service.key").write_text("n" * 40 + "\n" + SERVICE_KEY)
        await until(lambda: gate.service_key == "n" * 40, "the new service key")
        assert gate.admit(f"Bearer {SERVICE_KEY}") == gates.SERVICE  # the old one is still taken
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.parametrize("content", ["", "short\n", "x" * 40 + " y", "ü" * 40])
def test_bad_service_keys(tmp_path: Path, content: str) -> None:
    path = tmp_path / "service.key"
    path.write_text(content)
    with pytest.raises(ConfigError, match="--service-key-file"):
        Gate(service_keys=str(path))


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--api-keys: .*none.json: No such file"):
        Gate(api_keys=str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="--tls-ca"):
        channel_credentials(str(tmp_path / "none.pem"), None, None)
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(ConfigError, match="--tls-ca"):
        channel_credentials(str(tmp_path / "empty.pem"), None, None)


async def test_tls_and_client_certificates(tmp_path: Path) -> None:
    good, bad = Authority(tmp_path, "good"), Authority(tmp_path, "bad")
    cert, key = map(str, good.certificate("server"))
    mine = tuple(map(str, good.certificate("mine")))
    theirs = tuple(map(str, bad.certificate("theirs")))
    alone = open_trust(ServerTrust(tls_cert=cert, tls_key=key))
    async with running(alone) as address:
        assert await ask(address, Outgoing(channel_credentials(str(good.ca), None, None))) == "default 0"
        for wrong in (Outgoing(), Outgoing(channel_credentials(str(bad.ca), None, None))):
            assert (await refusal(address, wrong)).reason == "UNAVAILABLE"
    mutual = open_trust(ServerTrust(tls_cert=cert, tls_key=key, tls_client_ca=str(good.ca)), CallTrust(str(good.ca)))
    async with running(mutual) as address:
        assert await ask(address, mutual.outgoing) == "default 0"
        assert await ask(address, Outgoing(channel_credentials(str(good.ca), *mine))) == "default 0"
        assert await check(address, outgoing=mutual.outgoing) is None
        for shown in ((None, None), theirs):
            wrong = Outgoing(channel_credentials(str(good.ca), *shown))
            assert (await refusal(address, wrong)).reason == "UNAVAILABLE"


def test_certificates_that_do_not_belong_together_are_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, _ = authority.certificate("one")
    _, key = authority.certificate("two")
    with pytest.raises(ConfigError, match="--tls-cert"):
        open_trust(ServerTrust(tls_cert=str(cert), tls_key=str(key)))
    with pytest.raises(ConfigError, match="go together"):
        open_trust(ServerTrust(tls_cert=str(cert)))
    with pytest.raises(ConfigError, match="needs --tls-cert"):
        open_trust(ServerTrust(tls_client_ca=str(cert)))
    with pytest.raises(ConfigError, match="needs --tls-cert"):
        Trust().http(str(cert))


@pytest.mark.parametrize(
    ("listen", "is_local"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("unix:/tmp/x", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("host.example:1", False),
    ],
)
def test_beyond_loopback_somebody_must_be_asked_for_something(listen: str, is_local: bool, gate: Gate) -> None:
    open_door, keyed = Trust(), Trust(gate)
    if is_local:
        open_door.check_listen("--listen", listen, None)
    else:
        with pytest.raises(ConfigError, match=r"--listen .* is beyond loopback") as caught:
            open_door.check_listen("--listen", listen, None)
        assert caught.value.reason == "INSECURE_LISTEN"
    keyed.check_listen("--listen", listen, None)
    Trust(allow_insecure=True).check_listen("--listen", listen, None)


def test_keys_in_plain_text_are_warned_of(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    Trust(gate).check_listen("--listen", "127.0.0.1:1", None)
    outgoing = Outgoing(key=lambda: SERVICE_KEY)
    Trust(gate, outgoing=outgoing).check_targets(["unix:/tmp/x", "127.0.0.1:5"])
    assert not caplog.records
    Trust(gate).check_listen("--listen", "0.0.0.0:1", None)
    Trust(gate, outgoing=outgoing).check_targets(["scheduler:50052"])
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert SERVICE_KEY not in caplog.text


def test_settings_are_shared_by_their_variables() -> None:
    config = load(
        TokenizerConfig, {"TERCET_API_KEYS": "/a", "TERCET_SERVICE_KEY_FILE": "/s", "TERCET_TLS_CA": "/c"}, {}
    )
    assert (config.keys.api_keys, config.trust.service_key_file, config.calls.tls_ca) == ("/a", "/s", "/c")
    assert load(
        GatewayConfig, {}, {"cors_origins": "https://a.example,http://b.example:3000"}
    ).http_trust.cors_origins == (
        "https://a.example",
        "http://b.example:3000",
    )
    for wrong in ("a.example", "https://a.example/path", "ftp://a"):
        with pytest.raises(ConfigError, match="no origin"):
            load(GatewayConfig, {}, {"cors_origins": wrong})


def test_a_service_key_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_service_key(tmp_path / "service.key")
    open_trust(ServerTrust(service_key_file=str(path)))
    assert not caplog.records
    os.chmod(path, 0o644)
    open_trust(ServerTrust(service_key_file=str(path)))
    assert "others may read" in caplog.text
