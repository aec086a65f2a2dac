"""uvicorn inside an event loop that belongs to somebody else.

Owns the listening socket and the server's life. Touches no signal handler, no logging configuration and no event
loop policy: its host has its own. Invariant: `close` returns within the grace plus a few seconds, whatever clients
and requests do, and then nothing of the server runs.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from services.address import Address
from services.certificates import Certificates
from services.errors import FailedPrecondition

BACKLOG: Final = 1024
HEADER_LIMIT_BYTES: Final = 64 << 10
KEEP_ALIVE_S: Final = 15
DEAD_CLIENT_MS: Final = 60_000
LAST_WORDS_S: Final = 2.0  # for telling a cut request's client, and for what was written to leave

log = logging.getLogger(__name__)


class HttpServer:
    """A running server. port: the one in use, also where 0 was asked for; None on a Unix socket."""

    def __init__(self, server: uvicorn.Server, task: asyncio.Task[None], address: Address) -> None:
        self._server = server
        self._task = task
        self.address = address

    @property
    def port(self) -> int | None:
        return self.address.port

    async def close(self, grace_s: float) -> None:
        """Take no more connections, let requests go on for `grace_s` seconds, then cancel them.

        Can be called again, with a shorter grace, while an earlier call waits.
        """
        for listener in self._server.servers:
            listener.close()
        self._server.should_exit = True
        await asyncio.wait({self._task}, timeout=grace_s)
        state = self._server.server_state
        cut = set(state.tasks)
        for request in cut:
            request.cancel()
        if cut:
            await asyncio.wait(cut, timeout=LAST_WORDS_S)
        await asyncio.wait({self._task}, timeout=LAST_WORDS_S)
        for connection in list(state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self.address.is_unix:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address.host)


async def serve(app: ASGIApp, address: Address, tls: Certificates | None = None) -> HttpServer:
    """Serve `app` at `address` in the running event loop.

    tls: for host:port; a Unix socket is plain. Raises FailedPrecondition naming the address and the reason when it
    cannot be had.
    """
    listener = _listen(address)
    # h11 bounds the size of a request's head; httptools does not.
    config = uvicorn.Config(
        _quiet_when_cancelled(app),
        http="h11",
        h11_max_incomplete_event_size=HEADER_LIMIT_BYTES,
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    config.load()
    if tls is not None and not address.is_unix:
        config.ssl = tls.lasting_context()  # uvicorn's own would be of the files as they are now
    server = _Server(config)
    task = asyncio.get_running_loop().create_task(server.serve([listener]), name="gateway-http")
    while not server.started:
        if task.done():
            listener.close()
            raise FailedPrecondition(f"cannot serve HTTP on {address.target}", reason="CANNOT_LISTEN") from (
                None if task.cancelled() else task.exception()
            )
        await asyncio.sleep(0)
    if not address.is_unix:
        address = Address(address.host, listener.getsockname()[1])
    return HttpServer(server, task, address)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _quiet_when_cancelled(app: ASGIApp) -> ASGIApp:
    """The end of a request's task. A request cancelled at shutdown was told so; uvicorn would log a traceback."""

    async def outermost(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            log.info("a request was cut short by the end of the server")

    return outermost


def _listen(address: Address) -> socket.socket:
    try:
        listener = _listen_unix(address.host) if address.port is None else _listen_tcp(address.host, address.port)
    except OSError as error:
        why = error.strerror or str(error)
        raise FailedPrecondition(
            f"cannot listen on {address.target}: {why}", reason="CANNOT_LISTEN", field="http"
        ) from None
    listener.setblocking(False)
    return listener


def _listen_tcp(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it: a client that stopped reading is dropped
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_CLIENT_MS)
        listener.bind(where)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _listen_unix(path: str) -> socket.socket:
    """A socket file of a dead process makes way; one that answers does not."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            listener.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or _answers(path):
                raise
            os.unlink(path)
            listener.bind(path)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        return True
