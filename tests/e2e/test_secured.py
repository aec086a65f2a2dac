"""The chain as processes over TCP with everything on: mutual TLS, service key, API keys; and what is kept out."""

import asyncio
import json
import signal
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from fake_stack import until
from keys_support import Authority, make_key, write_keys, write_service_key
from processes import Processes, Running, processes

import tercet
from services.conform.__main__ import conform
from services.conform.kit import Outcome
from services.health import check
from services.rpc import Outgoing, make_channel
from services.trust import channel_credentials
from tercet.v1 import scheduler_pb2, scheduler_pb2_grpc

ALICE, ALICE_KEY = make_key(1, "alice", max_priority=5)
OPS, OPS_KEY = make_key(2, "ops", "operator")
ANY = "127.0.0.1:0"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def logged(one: Running, word: str) -> str | None:
    """The address in the first log line with this message."""
    for line in one.log.read_text().splitlines():
        found = json.loads(line)
        if found.get("message") == word:
            return str(found["address"])
    return None


@dataclass
class Secured:
    folder: Path
    outgoing: Outgoing
    executor: str
    scheduler: str
    tokenizer: str
    gateway: str
    running: dict[str, Running]
    context: ssl.SSLContext

    def with_key(self, key: str | None) -> Outgoing:
        return Outgoing(self.outgoing.tls, lambda: key)

    def openai(self, base: str, key: str) -> openai.AsyncOpenAI:
        http = httpx.AsyncClient(verify=self.context)
        return openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=key, http_client=http, max_retries=0)


async def _start(started: Processes, name: str, *flags: str, word: str = "listening") -> tuple[Running, str]:
    one = await started.start(name, *flags, target=ANY)
    await until(lambda: logged(one, word) is not None or one.process.returncode is not None, f"the {name}", 60)
    address = logged(one, word)
    assert address is not None, one.log.read_text()
    return one, address


@asynccontextmanager
async def secured(folder: Path, model: Path) -> AsyncIterator[Secured]:
    authority = Authority(folder)
    cert, key = map(str, authority.certificate("services"))
    mine = tuple(map(str, authority.certificate("mine")))
    ca = str(authority.ca)
    keys = write_keys(folder / "keys.json", ALICE, OPS, quotas={"alice": "concurrency:1"})
    service = write_service_key(folder / "service.key")
    common = ("--service-key-file", str(service), "--tls-cert", cert, "--tls-key", key, "--tls-client-ca", ca)
    caller = ("--tls-ca", ca, "--api-keys", str(keys))
    slow = ("--fake", "hash", "--fake-delay-s", "0.01")
    outgoing = Outgoing(channel_credentials(ca, *mine))
    context = ssl.create_default_context(cafile=ca)
    async with processes() as started:
        executor, at_executor = await _start(started, "executor", "--model", str(model), *slow, *common)
        scheduler, at_scheduler = await _start(started, "scheduler", "--executors", at_executor, *common, *caller)
        flags = ("--model", str(model), "--scheduler", at_scheduler, *common, *caller)
        tokenizer, at_tokenizer = await _start(started, "tokenizer", *flags)
        gateway = await _gateway(started, "--tokenizer", at_tokenizer, *common, *caller)
        for _ in range(600):
            reason = await check(at_tokenizer, outgoing=outgoing)
            if reason is None:
                break
            await asyncio.sleep(0.1)
        assert reason is None, reason
        at_gateway = f"https://{logged(gateway, 'listening')}"
        all_of_them = {"executor": executor, "scheduler": scheduler, "tokenizer": tokenizer, "gateway": gateway}
        yield Secured(folder, outgoing, at_executor, at_scheduler, at_tokenizer, at_gateway, all_of_them, context)
        for one in (gateway, tokenizer, scheduler, executor):
            assert await one.end() == 0, one.log.read_text()


async def _gateway(started: Processes, *flags: str) -> Running:
    log = started.directory / "gateway.log"
    with log.open("wb") as stream:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.gateway", "--http", ANY, *flags, stderr=stream
        )
    one = Running("gateway", process, ANY, log)
    started.running.append(one)
    await until(lambda: logged(one, "listening") is not None or process.returncode is not None, "the gateway", 60)
    return one


async def code_of(target: str, outgoing: Outgoing, method: str = "ListRequests") -> grpc.StatusCode:
    async with make_channel(target, outgoing=outgoing) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        message = getattr(scheduler_pb2, f"SchedulerService{method}Request")()
        try:
            await getattr(stub, method)(message, timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


@pytest.mark.model
@pytest.mark.timeout(240)
async def test_the_chain_with_everything_on(tmp_path: Path, default_model_path: Path) -> None:
    async with secured(tmp_path, default_model_path) as chain:
        tls = chain.outgoing.tls
        assert tls is not None
        async with tercet.AsyncClient(chain.tokenizer, tls=tls, api_key=ALICE_KEY) as client:
            first = (await client.generate("hello", max_tokens=4, temperature=0).collect())[0].token_ids
            with pytest.raises(tercet.PermissionDeniedError):
                await client.generate("hello", max_tokens=4, tenant="bob").collect()
            with pytest.raises(tercet.PermissionDeniedError):
                await client.generate("hello", max_tokens=4, priority=6).collect()
        with tercet.Client(chain.tokenizer, tls=tls, api_key=ALICE_KEY) as sync:
            again = await asyncio.to_thread(
                lambda: sync.generate("hello", max_tokens=4, temperature=0).collect()[0].token_ids
            )
            assert again == first

        # The gateway alone: its own callers' keys, its service key behind. The quota of the key's tenant holds.
        async with chain.openai(chain.gateway, ALICE_KEY) as client_:
            (model,) = (await client_.models.list()).data
            stream = await client_.chat.completions.create(
                model=model.id, messages=MESSAGES, stream=True, max_tokens=400
            )
            async for _ in stream:
                break
            seen = await _requests(chain)
            assert [one.tenant for one in seen] == ["alice"]
            with pytest.raises(openai.RateLimitError):
                await client_.completions.create(model=model.id, prompt="a", max_tokens=1)
            await stream.close()
        for key in ("", "sk-nothing", ALICE_KEY[:-1]):
            async with chain.openai(chain.gateway, key or "none") as client_:
                with pytest.raises(openai.AuthenticationError):
                    await client_.models.list()

        # Keys of users don't open what is for others, nor does a certificate alone.
        assert await code_of(chain.scheduler, chain.with_key(ALICE_KEY)) is grpc.StatusCode.PERMISSION_DENIED
        assert await code_of(chain.scheduler, chain.with_key(ALICE_KEY), "Describe") is grpc.StatusCode.OK
        assert await code_of(chain.scheduler, chain.with_key(OPS_KEY)) is grpc.StatusCode.OK
        assert await code_of(chain.scheduler, chain.with_key(None)) is grpc.StatusCode.UNAUTHENTICATED
        assert await code_of(chain.scheduler, Outgoing()) is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await conform("executor", chain.executor, outgoing=chain.with_key(OPS_KEY))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED  # it knows no keys but the services'

        # A user's key passes the tokenizer's suite.
        results = await conform(
            "tokenizer", chain.tokenizer, outgoing=chain.with_key(OPS_KEY), only=["accepted", "stop"]
        )
        assert {result.outcome for result in results} == {Outcome.PASS}

        # A revoked key is refused once the file is read again.
        write_keys(tmp_path / "keys.json", OPS)
        for one in chain.running.values():
            if one.name != "executor":
                one.process.send_signal(signal.SIGHUP)
        async with tercet.AsyncClient(chain.tokenizer, tls=tls, api_key=ALICE_KEY) as client:
            for _ in range(200):
                try:
                    await client.describe()
                except tercet.UnauthenticatedError:
                    break
                await asyncio.sleep(0.05)
            else:
                raise AssertionError("the revoked key still opens")
        for one in chain.running.values():
            text = one.log.read_text()
            assert ALICE_KEY not in text
            assert "s" * 40 not in text


async def _requests(chain: Secured) -> list[scheduler_pb2.RequestSnapshot]:
    async with make_channel(chain.scheduler, outgoing=chain.with_key(OPS_KEY)) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        return list((await stub.ListRequests(scheduler_pb2.SchedulerServiceListRequestsRequest(), timeout=10)).requests)


@pytest.mark.parametrize("flags", [("--listen", "0.0.0.0:0"), ("--api-keys", "/nowhere.json")])
async def test_a_process_that_would_be_open_or_has_no_keys_does_not_start(flags: tuple[str, ...]) -> None:
    async with processes() as started:
        target = flags[1] if flags[0] == "--listen" else None
        more = () if flags[0] == "--listen" else flags
        one = await started.start("scheduler", *more, target=target)
        async with asyncio.timeout(60):
            assert await one.process.wait() == 2
        text = one.log.read_text()
        assert "beyond loopback" in text or "--api-keys" in text
