"""Reads an HTTP/1.1 response and a stream of server-sent events from bytes as they come. Pure.

Small on purpose: what a load tester costs falls on the same machine as what it measures.
"""

from collections.abc import Iterator
from typing import Final

HEAD_LIMIT: Final = 64 << 10
LINE_LIMIT: Final = 4 << 20


class ProtocolError(Exception):
    """The bytes are no HTTP response."""


class ResponseReader:
    """`feed` gives what is new of the body. status: 0 until the head is there. complete: the body has ended."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self._buffer = b""
        self._left: int | None = None  # bytes of the body, or of the chunk; None: until the connection closes
        self._chunked = False

    def feed(self, data: bytes) -> bytes:
        """Raises ProtocolError."""
        self._buffer += data
        while not self.status:
            if not self._read_head():
                return b""
        return b"".join(self._body())

    def close(self) -> None:
        """The peer has closed: the end of a body that nothing else ends."""
        if self.status and self._left is None and not self._chunked:
            self.complete = True

    def _read_head(self) -> bool:
        """False: more bytes are needed. An interim response (1xx) is passed over."""
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            if len(self._buffer) > HEAD_LIMIT:
                raise ProtocolError(f"the response's head has no end within {HEAD_LIMIT} bytes")
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        parts = first.split(" ", 2)
        if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not (parts[1].isdecimal() and len(parts[1]) == 3):
            raise ProtocolError(f"{first[:80]!r} begins no HTTP/1 response")
        self._buffer = rest
        status = int(parts[1])
        if 100 <= status < 200:
            return bool(rest)
        self.status = status
        self.headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length")
        if self._chunked:
            self._left = 0
        elif length is not None:
            if not length.isdecimal():
                raise ProtocolError(f"content-length is {length[:40]!r}")
            self._left = int(length)
            self.complete = self._left == 0
        elif status in (204, 304):
            self.complete = True
        return True

    def _body(self) -> Iterator[bytes]:
        while self._buffer and not self.complete:
            if self._chunked and not self._left and not self._next_chunk():
                return
            if self.complete:
                return
            if self._left is None:
                piece, self._buffer = self._buffer, b""
            else:
                piece, self._buffer = self._buffer[: self._left], self._buffer[self._left :]
                self._left -= len(piece)
                self.complete = not self._left and not self._chunked
            yield piece

    def _next_chunk(self) -> bool:
        """Reads a chunk's size. The line break after the chunk before is an empty line in front of it."""
        while True:
            line, end, rest = self._buffer.partition(b"\r\n")
            if not end:
                return False
            self._buffer = rest
            if line:
                break
        size = line.split(b";", 1)[0].strip()
        try:
            self._left = int(size, 16)
        except ValueError as error:
            raise ProtocolError(f"{line[:40]!r} is no chunk size") from error
        if self._left < 0:
            raise ProtocolError(f"{line[:40]!r} is no chunk size")
        self.complete = self._left == 0
        return True


class EventReader:
    """The `data` of server-sent events; other fields and comments are passed over."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Raises ProtocolError."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_LIMIT:
            raise ProtocolError(f"an event's line has no end within {LINE_LIMIT} bytes")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
