"""A small HTTP server for processes without the gateway: GET /metrics, /health and /ready.

Owns just enough HTTP/1.1 for a scraper and a probe: GET and HEAD, no bodies, one request per connection. Must
not grow into a web framework; the gateway is one. Invariant: a peer that sends nothing, too much or nonsense
costs a bounded buffer for a bounded time.
"""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Self

from prometheus_client import CollectorRegistry

from services.address import parse_address
from services.errors import FailedPrecondition
from services.health import Readiness
from services.process_metrics import render

HEAD_LIMIT: Final = 16 << 10
PATIENCE_S: Final = 5.0
PLAIN: Final = "text/plain; charset=utf-8"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reply:
    status: HTTPStatus
    body: bytes
    content_type: str = PLAIN
    allow: str = ""


class MetricsServer:
    """Serves a registry and a readiness on `listen`; `address` is where, once started. tls: for host:port."""

    def __init__(
        self, listen: str, registry: CollectorRegistry, readiness: Readiness, tls: ssl.SSLContext | None = None
    ) -> None:
        self._listen = listen
        self._tls = tls
        self._registry = registry
        self._readiness = readiness
        self._server: asyncio.Server | None = None
        self.address = ""
        self._routes: dict[str, Callable[[str], Reply]] = {
            "/metrics": self._metrics,
            "/health": lambda _: Reply(HTTPStatus.OK, b"alive\n"),
            "/ready": self._ready,
        }

    async def start(self) -> None:
        """Raises FailedPrecondition naming the address when it cannot be had."""
        where = parse_address(self._listen)
        try:
            if where.is_unix:
                self._server = await asyncio.start_unix_server(self._serve, where.host, limit=HEAD_LIMIT)
                self.address = where.target
            else:
                self._server = await asyncio.start_server(
                    self._serve, where.host, where.port, limit=HEAD_LIMIT, ssl=self._tls
                )
                port = self._server.sockets[0].getsockname()[1]
                self.address = f"{where.target.rpartition(':')[0]}:{port}"
        except OSError as error:
            raise FailedPrecondition(
                f"cannot listen on {where.target}: {error.strerror or error}",
                reason="CANNOT_LISTEN",
                field="metrics_listen",
            ) from error

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except asyncio.LimitOverrunError:
            writer.write(_encode(Reply(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b"header too large\n"), True))
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            pass  # the peer went, or never asked
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _answer(self, head: bytes) -> bytes:
        first, *rows = head.decode("latin-1").split("\r\n")
        parts = first.split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            return _encode(Reply(HTTPStatus.BAD_REQUEST, b"this is no HTTP/1 request\n"), True)
        method, target, _ = parts
        headers = {name.strip().lower(): value.strip() for name, _, value in (row.partition(":") for row in rows)}
        route = self._routes.get(target.partition("?")[0])
        if route is None:
            reply = Reply(HTTPStatus.NOT_FOUND, f"there is: {', '.join(self._routes)}\n".encode())
        elif method not in ("GET", "HEAD"):
            reply = Reply(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET and HEAD\n", allow="GET, HEAD")
        else:
            try:
                reply = route(headers.get("accept", ""))
            except Exception:
                log.exception("%s failed", target.partition("?")[0])
                reply = Reply(HTTPStatus.INTERNAL_SERVER_ERROR, b"internal error, see the log\n")
        return _encode(reply, method != "HEAD")

    def _metrics(self, accept: str) -> Reply:
        body, content_type = render(self._registry, accept)
        return Reply(HTTPStatus.OK, body, content_type)

    def _ready(self, accept: str) -> Reply:
        if self._readiness.ready:
            return Reply(HTTPStatus.OK, b"ready\n")
        return Reply(HTTPStatus.SERVICE_UNAVAILABLE, f"{self._readiness.reason}\n".encode())


def _encode(reply: Reply, with_body: bool) -> bytes:
    allow = f"Allow: {reply.allow}\r\n" if reply.allow else ""
    head = (
        f"HTTP/1.1 {reply.status.value} {reply.status.phrase}\r\n"
        f"Content-Type: {reply.content_type}\r\n"
        f"Content-Length: {len(reply.body)}\r\n"
        f"{allow}Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (reply.body if with_body else b"")
