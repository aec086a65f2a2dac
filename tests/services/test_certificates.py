"""Certificates that change under a running port: shown from the next connection on, and only if they are good."""

import asyncio
import logging
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from keys_support import Authority
from opentelemetry.trace import NoOpTracer
from prometheus_client import CollectorRegistry

from services.address import Address
from services.certificates import Certificates
from services.errors import ServiceError
from services.gateway.server import serve
from services.health import Readiness, add_health, check
from services.metrics_http import MetricsServer
from services.rpc import Outgoing, bind, make_channel, make_server
from services.trust import channel_credentials

Shown = Callable[[ssl.SSLContext], Awaitable[bytes]]


def put(made: tuple[Path, Path], cert: Path, key: Path) -> None:
    """As tools do it: one file after the other, each by a rename."""
    for source, target in zip(made, (cert, key), strict=True):
        copy = target.with_suffix(".new")
        shutil.copy(source, copy)
        copy.replace(target)


async def app(scope: object, receive: object, send: object) -> None:
    raise AssertionError("nobody asks")


@asynccontextmanager
async def grpc_port(files: Certificates) -> AsyncIterator[int]:
    server = make_server(NoOpTracer())
    readiness = Readiness(())
    readiness.set_ready()
    add_health(server, readiness)
    address = bind(server, "127.0.0.1:0", files.grpc_credentials())
    await server.start()
    try:
        yield int(address.rpartition(":")[2])
    finally:
        await server.stop(0)


@asynccontextmanager
async def http_port(files: Certificates) -> AsyncIterator[int]:
    server = await serve(app, Address("127.0.0.1", 0), files)  # type: ignore[arg-type]
    try:
        yield server.port
    finally:
        await server.close(0.0)


@asynccontextmanager
async def metrics_port(files: Certificates) -> AsyncIterator[int]:
    server = MetricsServer("127.0.0.1:0", CollectorRegistry(), Readiness(()), files.lasting_context())
    async with server:
        yield int(server.address.rpartition(":")[2])


async def shown(port: int, client: ssl.SSLContext) -> bytes:
    """The certificate that a new connection is shown. Raises where the client is not let in."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname="127.0.0.1")
    try:
        layer: ssl.SSLObject = writer.get_extra_info("ssl_object")
        certificate = layer.getpeercert(binary_form=True)
        assert certificate is not None
        return certificate
    finally:
        writer.close()


def der(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text()[: path.read_text().index("-----END") + 25] + "\n")


def client(ca: Path, pair: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(ca))
    context.set_alpn_protocols(["h2", "http/1.1"])
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # there a client hears within the handshake that it is not let in
    if pair is not None:
        context.load_cert_chain(*map(str, pair))
    return context


@pytest.mark.parametrize("port_of", [grpc_port, http_port, metrics_port])
async def test_a_new_certificate_is_shown_to_who_connects_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, port_of: Callable[[Certificates], object]
) -> None:
    caplog.set_level(logging.INFO, "services.certificates")
    authority = Authority(tmp_path)
    first, second, third = (authority.certificate(name) for name in ("first", "second", "third"))
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    put(first, cert, key)
    trusting = client(authority.ca)
    async with port_of(Certificates(str(cert), str(key))) as port:  # type: ignore[attr-defined]
        assert await shown(port, trusting) == der(first[0])
        put(second, cert, key)
        assert await shown(port, trusting) == der(second[0])
        assert await shown(port, trusting) == der(second[0])

        shutil.copy(third[0], cert)  # its key is still to come: the old pair goes on, and one line says so
        caplog.clear()
        for _ in range(2):
            assert await shown(port, trusting) == der(second[0])
        assert [record.levelname for record in caplog.records if record.name == "services.certificates"] == ["ERROR"]
        shutil.copy(third[1], key)
        assert await shown(port, trusting) == der(third[0])

        key.unlink()
        assert await shown(port, trusting) == der(third[0])
        put(first, cert, key)
        assert await shown(port, trusting) == der(first[0])


@pytest.mark.parametrize("port_of", [grpc_port, http_port, metrics_port])
async def test_whose_clients_are_let_in_changes_too(tmp_path: Path, port_of: Callable[[Certificates], object]) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    cert, key = old.certificate("server")
    ca = tmp_path / "clients.pem"
    shutil.copy(old.ca, ca)
    of_old = client(old.ca, old.certificate("one"))
    of_new = client(old.ca, new.certificate("two"))
    async with port_of(Certificates(str(cert), str(key), str(ca))) as port:  # type: ignore[attr-defined]
        await shown(port, of_old)
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            await shown(port, of_new)
        ca.write_bytes(old.ca.read_bytes() + new.ca.read_bytes())
        await shown(port, of_old)
        await shown(port, of_new)
        shutil.copy(new.ca, ca)
        await shown(port, of_new)
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            await shown(port, of_old)


async def test_a_channel_that_stands_goes_on_and_a_new_one_trusts_the_new_authority(tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    put(old.certificate("one"), cert, key)
    async with grpc_port(Certificates(str(cert), str(key))) as port:
        target = f"127.0.0.1:{port}"
        before = Outgoing(channel_credentials(str(old.ca), None, None))
        after = Outgoing(channel_credentials(str(new.ca), None, None))
        async with make_channel(target, outgoing=before) as channel:
            ask = channel.unary_unary("/grpc.health.v1.Health/Check")
            await ask(b"", timeout=10)
            put(new.certificate("two"), cert, key)
            await ask(b"", timeout=10)
            assert await check(target, outgoing=after) is None
            assert await check(target, outgoing=before, timeout=2.0) is not None
            await ask(b"", timeout=10)


def test_files_that_are_no_good_from_the_start_are_named(tmp_path: Path) -> None:
    cert, _ = Authority(tmp_path).certificate("one")
    for made in (Certificates(str(cert), str(tmp_path / "none.pem")), Certificates(str(cert), str(cert))):
        for use in (made.lasting_context, made.grpc_credentials):
            with pytest.raises(ServiceError, match="--tls-cert"):
                use()
