"""The ASGI application: which path does what.

Owns the routes. Must not know how an engine works or which server runs it. Invariant: whatever is asked, also for a
path or method that is not there, errors have OpenAI's shape.
"""

import logging
import time
from collections.abc import Callable, Sequence

from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from services.config import HttpLimits
from services.errors import Internal, InvalidArgument, ServiceError
from services.gate import OPEN_GATE, Gate
from services.gateway import http_errors, openai, replies
from services.gateway.engine import TextEngine
from services.gateway.exchange import Desk, Endpoint
from services.gateway.frame import framed
from services.gateway.json_body import shown
from services.gateway.pages import Pages, unserved
from services.keys import Role
from services.metrics import GatewayMetrics
from services.rpc_errors import cap

CHAT_COMPLETIONS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

log = logging.getLogger(__name__)


def make_app(
    engine: TextEngine,
    limits: HttpLimits,
    *,
    tracer: Tracer,
    registry: CollectorRegistry,
    clock: Callable[[], float] = time.time,
    gate: Gate = OPEN_GATE,
    cors_origins: Sequence[str] = (),
) -> ASGIApp:
    """The gateway over `engine`. registry: shown at /metrics, and gets the gateway's own series. gate: who may call.
    cors_origins: whose pages may."""
    desk = Desk(engine, limits, tracer, GatewayMetrics.make(registry), clock, gate)
    pages = Pages(engine, registry, int(clock()), gate, limits)
    app = Starlette(
        routes=[
            Route(
                CHAT_COMPLETIONS,
                Endpoint(desk, CHAT_COMPLETIONS, openai.read_chat, replies.CHAT),
                methods=["POST"],
            ),
            Route(
                COMPLETIONS,
                Endpoint(desk, COMPLETIONS, openai.read_completion, replies.COMPLETION),
                methods=["POST"],
            ),
            Route("/v1/models", pages.keyed(pages.models), methods=["GET"]),
            Route("/v1/models/{model:path}", pages.keyed(pages.model), methods=["GET"]),
            Route("/tokenize", pages.keyed(pages.tokenize), methods=["POST"]),
            Route("/detokenize", pages.keyed(pages.detokenize), methods=["POST"]),
            Route("/health", pages.health, methods=["GET"]),
            Route("/ready", pages.ready, methods=["GET"]),
            Route("/metrics", pages.keyed(pages.metrics, Role.OPERATOR), methods=["GET"]),
        ],
        exception_handlers={ServiceError: _on_service_error, HTTPException: _on_http_exception, Exception: _on_defect},
    )
    app.router.redirect_slashes = False
    return framed(app, cors_origins)


def _respond(error: ServiceError) -> Response:
    return JSONResponse(
        http_errors.body_of(error), status_code=http_errors.row_of(error).status, headers=http_errors.headers_of(error)
    )


async def _on_service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)  # as registered
    return _respond(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such path, or not with this method."""
    assert isinstance(error, HTTPException)  # as registered
    path = shown(request.url.path)
    if error.status_code == 404:
        what = unserved(request.url.path)
        if what is not None:
            return _respond(
                http_errors.RouteNotFound(f"{path}: {what} is not served here", reason="UNSUPPORTED_ENDPOINT")
            )
        return _respond(http_errors.RouteNotFound(f"there is nothing at {path}"))
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{path} does not take {shown(request.method)}, only {allowed}"
        return _respond(http_errors.MethodNotAllowed(message, allowed))
    return _respond(InvalidArgument(cap(error.detail)))


async def _on_defect(request: Request, error: Exception) -> Response:
    log.error("uncaught %s in %s", type(error).__name__, shown(request.url.path), exc_info=error)
    return _respond(Internal("internal error, see the server log", reason="UNCAUGHT_EXCEPTION"))
