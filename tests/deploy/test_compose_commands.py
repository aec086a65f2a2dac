"""The very commands of docker-compose.yml, as plain processes of this machine, answer a question and end in order.

Only addresses are rewritten (compose_file.on_loopback); the file's own health checks tell when the chain is complete.
"""

import asyncio
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx
import pytest
from compose_file import ROOT, Container, container, load_compose
from keys_support import Authority, make_key, write_keys, write_service_key

from services.otlp_sink import OtlpSink
from services.spans import SpanRecord

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

HOSTS: Final = {name: name for name in ("executor", "scheduler", "tokenizer")}
READY_S: Final = 180.0
END_S: Final = 60.0
METRICS: Final = 9464


@dataclass
class LoopbackPorts:
    """A free port of this machine for each port of each container, the same one every time."""

    taken: dict[tuple[str, int], int] = field(default_factory=dict)

    def __call__(self, owner: str, port: int) -> int:
        if (owner, port) not in self.taken:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.taken[owner, port] = probe.getsockname()[1]
        return self.taken[owner, port]


@dataclass
class Started:
    container: Container
    environment: Mapping[str, str]
    process: asyncio.subprocess.Process
    log: Path

    async def healthy(self) -> None:
        """When the container's own check says so."""
        async with asyncio.timeout(READY_S):
            while not await self._check():
                assert self.process.returncode is None, self.log.read_text()
                await asyncio.sleep(0.2)

    async def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(END_S):
            return await self.process.wait()

    async def _check(self) -> bool:
        quiet = asyncio.subprocess.DEVNULL
        check = await asyncio.create_subprocess_exec(
            *self.container.health, env=self.environment, stdin=quiet, stdout=quiet, stderr=quiet
        )
        try:
            return await check.wait() == 0
        finally:
            if check.returncode is None:
                check.kill()
                await check.wait()


@dataclass
class Chain:
    started: Mapping[str, Started]
    ports: LoopbackPorts
    sink: OtlpSink


@asynccontextmanager
async def chain_of(model_path: Path, folder: Path, more: Mapping[str, str]) -> AsyncIterator[Chain]:
    """more: variables that a user adds to each container, as docs/deploy.md says; an empty one counts as absent."""
    ports = LoopbackPorts()
    async with OtlpSink() as sink:
        # What a user may set.
        compose = load_compose({"TERCET_OTLP_ENDPOINT": sink.endpoint, "TERCET_EXECUTOR_THREADS": "1"})
        # The image sets the cache's place; here it is where the model was found: <cache>/models/<file>.
        image = {"PATH": os.environ["PATH"], "TERCET_CACHE": str(model_path.parents[1])}
        started: dict[str, Started] = {}
        try:
            for name in HOSTS:
                here = container(compose, name).on_loopback(ports, HOSTS)
                log = folder / f"{name}.log"
                environment = image | dict(here.environment) | dict(more)
                with log.open("wb") as stream:
                    process = await asyncio.create_subprocess_exec(
                        *here.command, env=environment, cwd=folder, stdin=asyncio.subprocess.DEVNULL, stderr=stream
                    )
                started[name] = Started(here, environment, process, log)
            yield Chain(started, ports, sink)
        finally:
            for one in started.values():
                if one.process.returncode is None:
                    one.process.kill()
                    await one.process.wait()


@pytest.fixture
async def chain(default_model_path: Path, tmp_path: Path) -> AsyncIterator[Chain]:
    async with chain_of(default_model_path, tmp_path, {}) as made:
        yield made


async def test_the_commands_of_the_file_with_keys_and_certificates(default_model_path: Path, tmp_path: Path) -> None:
    """With the variables that docs/deploy.md names, and without the leave to be open."""
    documented = (ROOT / "docs" / "deploy.md").read_text()
    authority, (alice, key) = Authority(tmp_path), make_key(1, "alice")
    cert, private = authority.certificate("services")
    more = {
        "TERCET_API_KEYS": str(write_keys(tmp_path / "keys.json", alice)),
        "TERCET_SERVICE_KEY_FILE": str(write_service_key(tmp_path / "service.key")),
        "TERCET_TLS_CERT": str(cert),
        "TERCET_TLS_KEY": str(private),
        "TERCET_TLS_CA": str(authority.ca),
    }
    assert all(f"`{name}`" in documented for name in more)
    async with chain_of(default_model_path, tmp_path, {**more, "TERCET_ALLOW_INSECURE": ""}) as secured:
        async with asyncio.TaskGroup() as checks:
            for one in secured.started.values():
                checks.create_task(one.healthy())
        gateway = f"127.0.0.1:{secured.ports('tokenizer', 8000)}"
        trusting = ssl.create_default_context(cafile=str(authority.ca))
        body = {"model": "smollm2-135m", "prompt": "One, two,", "temperature": 0, "max_tokens": 4}
        async with httpx.AsyncClient(timeout=120, trust_env=False, verify=trusting) as client:
            for headers, status in (({}, 401), ({"authorization": f"Bearer {key}"}, 200)):
                answer = await client.post(f"https://{gateway}/v1/completions", json=body, headers=headers)
                assert answer.status_code == status, answer.text
            for name in HOSTS:
                metrics = await client.get(f"https://127.0.0.1:{secured.ports(name, METRICS)}/metrics")
                assert f'tercet_build_info{{service="{name}"' in metrics.text
            with pytest.raises(httpx.HTTPError):
                await client.post(f"http://{gateway}/v1/completions", json=body)
        for name in ("tokenizer", "scheduler", "executor"):
            assert await secured.started[name].terminate() == 0, secured.started[name].log.read_text()
            log = secured.started[name].log.read_text()
            assert "unencrypted" not in log
            assert key not in log


async def test_the_commands_of_the_file_answer_and_end(chain: Chain) -> None:
    async with asyncio.TaskGroup() as checks:
        for one in chain.started.values():
            checks.create_task(one.healthy())

    gateway = f"http://127.0.0.1:{chain.ports('tokenizer', 8000)}"
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        answer = await client.post(
            f"{gateway}/v1/chat/completions",
            json={
                "model": "smollm2-135m",
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "temperature": 0,
                "max_tokens": 40,
            },
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "The capital of France is Paris."
        for name in HOSTS:
            metrics = await client.get(f"http://127.0.0.1:{chain.ports(name, METRICS)}/metrics")
            assert f'tercet_build_info{{service="{name}"' in metrics.text

    # In the order in which compose stops them: who depends on others first.
    for name in ("tokenizer", "scheduler", "executor"):
        assert await chain.started[name].terminate() == 0, chain.started[name].log.read_text()
    await chain.sink.wait_for(lambda spans: _services(spans) == {f"tercet-{name}" for name in HOSTS}, 10)


def _services(spans: Sequence[SpanRecord]) -> set[str]:
    return {span.service for span in spans}
