"""An HTTP request's head and body, read within limits, to what a call needs.

Owns headers and the reading of bodies. Must not know what a body means. Invariant: nothing larger than the limit is
ever held, and a body that comes too slowly ends in a refusal, not in a parked task.
"""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from services import names
from services.callers import PRIORITY_BOUND
from services.errors import InvalidArgument
from services.gateway.http_errors import BodyTimeout, BodyTooLarge
from services.rpc_server import REQUEST_ID_FORMAT

X_REQUEST_ID: Final = "x-request-id"


@dataclass(frozen=True, slots=True)
class Head:
    """Headers that mean something here. Names are in lower case."""

    request_id: str
    tenant: str | None
    priority: int | None
    content_length: int | None


def header_rows(scope: Scope) -> list[tuple[str, str]]:
    return [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]


def read_head(rows: Sequence[tuple[str, str]], new_request_id: str) -> Head:
    """Check the headers. Raises InvalidArgument naming the header; new_request_id serves where none was given."""
    encoding = only_header(rows, "content-encoding")
    if encoding not in (None, "identity"):
        raise InvalidArgument(
            "content-encoding must be identity: bodies are not decompressed", field="content-encoding"
        )
    return Head(
        request_id=_request_id(rows) or new_request_id,
        tenant=_name(rows, names.MD_TENANT),
        priority=_priority(rows),
        content_length=_content_length(rows),
    )


def draw_request_id() -> str:
    return uuid.uuid4().hex


async def read_body(receive: Receive, head: Head, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises BodyTooLarge before reading further, BodyTimeout, or ClientDisconnect."""
    if head.content_length is not None and head.content_length > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise BodyTimeout(f"the body did not arrive within {timeout_s:g} s", limit=f"{timeout_s:g} s") from None
    return bytes(body)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {max_bytes} bytes", limit=max_bytes)


def only_header(rows: Sequence[tuple[str, str]], name: str) -> str | None:
    """Its value; None: it isn't there. Raises InvalidArgument where it comes twice with different values."""
    values = {value for key, value in rows if key == name}
    if len(values) > 1:
        raise InvalidArgument(f"the header {name} comes twice with different values", field=name)
    return values.pop() if values else None


def _request_id(rows: Sequence[tuple[str, str]]) -> str | None:
    given = {key: _name(rows, key) for key in (X_REQUEST_ID, names.MD_REQUEST_ID)}
    ids = {value for value in given.values() if value is not None}
    if len(ids) > 1:
        raise InvalidArgument(f"the headers {X_REQUEST_ID} and {names.MD_REQUEST_ID} differ", field=X_REQUEST_ID)
    return ids.pop() if ids else None


def _name(rows: Sequence[tuple[str, str]], header: str) -> str | None:
    value = only_header(rows, header)
    if value is not None and REQUEST_ID_FORMAT.fullmatch(value) is None:
        raise InvalidArgument(
            f"the header {header} must be 1 to 128 characters of A-Z a-z 0-9 . _ : -", field=header, limit=128
        )
    return value


def _priority(rows: Sequence[tuple[str, str]]) -> int | None:
    value = only_header(rows, names.MD_PRIORITY)
    if value is None:
        return None
    digits = value.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 3 and int(digits) <= PRIORITY_BOUND):
        raise InvalidArgument(
            f"the header {names.MD_PRIORITY} must be an integer from -{PRIORITY_BOUND} to {PRIORITY_BOUND}",
            field=names.MD_PRIORITY,
            limit=PRIORITY_BOUND,
        )
    return int(value)


def _content_length(rows: Sequence[tuple[str, str]]) -> int | None:
    value = only_header(rows, "content-length")
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) <= 18):
        raise InvalidArgument("the header content-length must be a number", field="content-length")
    return int(value)
