"""One HTTP request over one connection, its body told as it comes. Knows nothing of models.

A protocol, not a stream: nobody has to be woken for each message, so the client costs little and times are those of
the arrival.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from services.bench.http1 import ProtocolError, ResponseReader

ERROR_BODY_LIMIT: Final = 64 << 10

OnBody = Callable[[bytes, int], None]
"""(what is new of the body, when it came in ns)"""


class BadUrl(ValueError):
    """A URL that can't be asked."""


@dataclass(frozen=True, slots=True)
class Site:
    """base: the path that the API's paths are put behind. headers: of every request."""

    host: str
    port: int
    secure: bool
    base: str
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Response:
    """body: of an answer that nobody listened to, or that is an error. whole: it came to its end."""

    status: int
    body: bytes
    whole: bool


def parse_url(url: str, key: str | None = None) -> Site:
    """`http(s)://host[:port][/base]`; a trailing /v1 may be there or not. key: a bearer token. Raises BadUrl."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadUrl(f"{url!r} is no URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise BadUrl(f"{url!r} is not http(s)://host:port/path")
    secure = parts.scheme == "https"
    base = parts.path.rstrip("/").removesuffix("/v1")
    headers = () if key is None else (("Authorization", f"Bearer {key}"),)
    return Site(parts.hostname, port or (443 if secure else 80), secure, base, headers)


async def request(site: Site, path: str, body: object = None, on_body: OnBody | None = None) -> Response:
    """GET, or POST with a JSON body. on_body: listens to the body of a 2xx answer.

    Raises OSError where there is no connection, ProtocolError where what comes is no HTTP. Cancelling ends it.
    """
    loop = asyncio.get_running_loop()
    message = _message(site, path, body)
    exchange = _Exchange(on_body, loop.create_future())
    context = ssl.create_default_context() if site.secure else None
    transport, _ = await loop.create_connection(lambda: exchange, site.host, site.port, ssl=context)
    try:
        transport.write(message)
        await exchange.done
    finally:
        transport.abort()
    return Response(exchange.reader.status, bytes(exchange.kept), exchange.reader.complete)


def _message(site: Site, path: str, body: object) -> bytes:
    content = b"" if body is None else json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    headers: Mapping[str, str] = {
        "Host": site.authority,
        "Connection": "close",
        "Accept": "application/json, text/event-stream",
        **({} if body is None else {"Content-Type": "application/json", "Content-Length": str(len(content))}),
        **dict(site.headers),
    }
    method = "GET" if body is None else "POST"
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"{method} {site.base}{path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + content


class _Exchange(asyncio.Protocol):
    def __init__(self, on_body: OnBody | None, done: "asyncio.Future[None]") -> None:
        self.reader = ResponseReader()
        self.kept = bytearray()
        self.done = done
        self._on_body = on_body

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter_ns()
        if self.done.done():
            return
        try:
            piece = self.reader.feed(data)
            if self._on_body is not None and 200 <= self.reader.status < 300:
                self._on_body(piece, now)
            elif len(self.kept) < ERROR_BODY_LIMIT or self._on_body is None:
                self.kept += piece
        except ProtocolError as error:
            self.done.set_exception(error)
            return
        if self.reader.complete:
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.reader.close()
        if not self.done.done():
            self.done.set_result(None)
