"""The way out of one HTTP exchange: a response that is started once, written within a time limit, ended once.

Owns ASGI's sending messages. Invariant: no write waits longer than the limit for a client that does not read.
"""

import asyncio
from collections.abc import Mapping

from starlette.types import Send


class SlowReader(Exception):
    """The client did not take what was sent within the limit."""


class Outlet:
    """common: headers of every response of this exchange. write_timeout_s: for one message."""

    def __init__(self, send: Send, common: Mapping[str, str], write_timeout_s: float) -> None:
        self._send = send
        self._common = dict(common)
        self._write_timeout_s = write_timeout_s
        self.started = False
        self.complete = False

    def add_header(self, name: str, value: str) -> None:
        """For a response that is not started yet."""
        self._common[name] = value

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        rows = [(key.encode("latin-1"), value.encode("latin-1")) for key, value in (self._common | {**headers}).items()]
        await self._within_limit({"type": "http.response.start", "status": status, "headers": rows})

    async def write(self, data: bytes, *, last: bool = False) -> None:
        self.complete = last
        await self._within_limit({"type": "http.response.body", "body": data, "more_body": not last})

    async def whole(self, status: int, content_type: str, data: bytes, headers: Mapping[str, str]) -> None:
        """A response in one piece."""
        await self.start(status, {"content-type": content_type, "content-length": str(len(data)), **headers})
        await self.write(data, last=True)

    async def _within_limit(self, message: dict[str, object]) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._send(message)
        except TimeoutError:
            raise SlowReader(f"nothing was read for {self._write_timeout_s:g} s") from None
