"""The Node SDK over TLS and mutual TLS, with a key: what it reaches, and what it is kept from."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import missing
from keys_support import Authority, make_key, write_keys
from opentelemetry.trace import NoOpTracer

import services
from services.certificates import Certificates
from services.gate import Gate
from services.rpc import bind, make_server
from services.rpc_server import call_context
from tercet.v1 import tokenizer_pb2, tokenizer_pb2_grpc

PACKAGE = Path(services.__file__).parents[1] / "clients" / "node"
ALICE, KEY = make_key(1, "alice")
SCRIPT = """
import { readFileSync } from "node:fs";
import { credentials } from "@grpc/grpc-js";
import { Client } from "./dist/src/index.js";
const [target, ca, cert, key, apiKey] = process.argv.slice(-5);
const read = (path) => (path === "-" ? null : readFileSync(path));
const tls = ca === "node" ? true : credentials.createSsl(read(ca), read(key), read(cert));
const keys = apiKey === "-" ? {} : { apiKey };
const client = new Client(target, { tls, timeoutMs: 5000, retry: { attempts: 1 }, ...keys });
try {
  console.log(JSON.stringify({ text: await client.detokenize([1]) }));
} catch (error) {
  console.log(JSON.stringify({ error: error.name }));
}
client.close();
"""


class WhoAmI(tokenizer_pb2_grpc.TokenizerServiceServicer):
    async def Detokenize(
        self, request: tokenizer_pb2.TokenizerServiceDetokenizeRequest, context: Any
    ) -> tokenizer_pb2.TokenizerServiceDetokenizeResponse:
        principal = call_context(context).principal
        assert principal is not None
        return tokenizer_pb2.TokenizerServiceDetokenizeResponse(text=principal.tenant)


@pytest.fixture(scope="module")
async def node() -> str:
    found, npm = shutil.which("node"), shutil.which("npm")
    if found is None or npm is None or not (PACKAGE / "node_modules").is_dir():
        missing("npm with the Node SDK's packages (npm ci in clients/node)")
    build = await asyncio.create_subprocess_exec(npm, "run", "build", cwd=PACKAGE, stdout=asyncio.subprocess.DEVNULL)
    assert await build.wait() == 0
    return found


@asynccontextmanager
async def served(files: Certificates, gate: Gate) -> AsyncIterator[str]:
    server = make_server(NoOpTracer(), gate=gate)
    tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(WhoAmI(), server)
    address = bind(server, "127.0.0.1:0", files.grpc_credentials())
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


async def ask(node: str, target: str, ca: str, pair: tuple[Path, Path] | None, key: str = KEY) -> dict[str, str]:
    shown = ("-", "-") if pair is None else tuple(map(str, pair))
    process = await asyncio.create_subprocess_exec(
        *(node, "--input-type=module", "-e", SCRIPT, "--", target, ca, *shown, key),
        cwd=PACKAGE,
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    answer: dict[str, str] = json.loads(out)
    return answer


async def test_tls_and_mutual_tls_with_a_key(node: str, tmp_path: Path) -> None:
    authority, strangers = Authority(tmp_path), Authority(tmp_path, "strangers")
    cert, key = map(str, authority.certificate("server"))
    mine, theirs = authority.certificate("mine"), strangers.certificate("theirs")
    gate = Gate(str(write_keys(tmp_path / "keys.json", ALICE)))
    ca, other_ca = str(authority.ca), str(strangers.ca)
    async with served(Certificates(cert, key), gate) as target:
        assert await ask(node, target, ca, None) == {"text": "alice"}
        assert await ask(node, target, ca, None, "-") == {"error": "UnauthenticatedError"}
        assert await ask(node, target, other_ca, None) == {"error": "UnavailableError"}
        assert await ask(node, target, "node", None) == {"error": "UnavailableError"}  # its own roots know neither
    async with served(Certificates(cert, key, ca), gate) as target:
        assert await ask(node, target, ca, mine) == {"text": "alice"}
        for pair in (None, theirs):
            assert await ask(node, target, ca, pair) == {"error": "UnavailableError"}
