"""HTTP/1.1 whose writes of one turn of the event loop leave together.

uvicorn writes the head of a response, each of its chunks and its end one by one. Each write is a system call and wakes
the client, for nothing where the rest follows at once. Invariant: bytes leave in the order written, none later than the
next turn; what is held never grows beyond `MOST_BYTES` and one write.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_BYTES: Final = 64 << 10  # what asyncio itself holds before it tells the writer to pause


class JoinedWrites(asyncio.Transport):
    """Over a transport, which stays in charge of all but the moment. call_soon: runs a function in the next turn."""

    def __init__(self, under: asyncio.Transport, call_soon: Callable[[Callable[[], None]], object]) -> None:
        super().__init__()
        self._under = under
        self._call_soon = call_soon
        self._held: list[bytes] = []
        self._size = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not data:
            return
        if not self._held:
            self._call_soon(self._flush)
        self._held.append(bytes(data))
        self._size += len(data)
        if self._size >= MOST_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._under.close()

    def abort(self) -> None:
        self._held, self._size = [], 0
        self._under.abort()

    def is_closing(self) -> bool:
        return self._under.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._under.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._under.pause_reading()

    def resume_reading(self) -> None:
        self._under.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._under.set_protocol(protocol)

    def _flush(self) -> None:
        held, self._held, self._size = self._held, [], 0
        if held:
            self._under.write(b"".join(held))


class JoiningProtocol(H11Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(JoinedWrites(transport, self.loop.call_soon))
