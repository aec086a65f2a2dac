"""What every answer of the gateway has around it, whichever page gave it: a request id, and leave for other origins.

ASGI, outermost. Owns the headers of CORS. Invariant: without origins in the settings no page of another origin may read
an answer; a request's own id is never replaced by one of ours.
"""

from collections.abc import Sequence
from typing import Any, Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services import names
from services.gateway.intake import X_REQUEST_ID, draw_request_id, header_rows
from services.rpc_server import REQUEST_ID_FORMAT

MAX_AGE_S: Final = 600
ALLOWED: Final = (
    "authorization",
    "content-type",
    X_REQUEST_ID,
    names.MD_REQUEST_ID,
    names.MD_TENANT,
    names.MD_PRIORITY,
    names.MD_TRACEPARENT,
    names.MD_TRACESTATE,
)
EXPOSED: Final = (X_REQUEST_ID, "tercet-trace-id", "retry-after")


class RequestIds:
    """Answers that have no `x-request-id` yet get the request's own where it is a good one, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                rows = list(message.get("headers", ()))
                if not any(key.lower() == X_REQUEST_ID.encode() for key, _ in rows):
                    rows.append((X_REQUEST_ID.encode(), _id_of(scope).encode()))
                    message = {**message, "headers": rows}
            await send(message)

        await self._app(scope, receive, named)


def framed(app: ASGIApp, cors_origins: Sequence[str]) -> ASGIApp:
    """cors_origins: whose pages may call; "*" is all, none is nobody."""
    if cors_origins:
        # A key travels in a header that the page sets, never in a cookie: credentials stay forbidden.
        options: dict[str, Any] = {"allow_methods": ("GET", "POST"), "allow_headers": ALLOWED}
        app = CORSMiddleware(
            app, allow_origins=tuple(cors_origins), expose_headers=EXPOSED, max_age=MAX_AGE_S, **options
        )
    return RequestIds(app)


def _id_of(scope: Scope) -> str:
    given = [value for key, value in header_rows(scope) if key in (X_REQUEST_ID, names.MD_REQUEST_ID)]
    if given and REQUEST_ID_FORMAT.fullmatch(given[0]) is not None:
        return given[0]
    return draw_request_id()
