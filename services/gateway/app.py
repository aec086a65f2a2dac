"""The ASGI application: which path does what.

Owns the routes. Must not know how an engine works or which server runs it. Invariant: whatever is asked, also for a
path or method that is not there, errors have OpenAI's shape.
"""

import logging
import time
from collections.abc import Callable

from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.config import HttpLimits
from services.errors import Internal, InvalidArgument, NotFound, ServiceError
from services.gateway import http_errors, openai, replies
from services.gateway.engine import TextEngine
from services.gateway.exchange import Desk, Endpoint
from services.gateway.json_body import shown
from services.gateway.shapes import ModelList
from services.metrics import GatewayMetrics
from services.process_metrics import render
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
) -> Starlette:
    """The gateway over `engine`. registry: shown at /metrics, and gets the gateway's own series."""
    desk = Desk(engine, limits, tracer, GatewayMetrics.make(registry), clock)
    pages = _Pages(engine, registry, int(clock()))
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
            Route("/v1/models", pages.models, methods=["GET"]),
            Route("/v1/models/{model:path}", pages.model, methods=["GET"]),
            Route("/health", pages.health, methods=["GET"]),
            Route("/ready", pages.ready, methods=["GET"]),
            Route("/metrics", pages.metrics, methods=["GET"]),
        ],
        exception_handlers={ServiceError: _on_service_error, HTTPException: _on_http_exception, Exception: _on_defect},
    )
    app.router.redirect_slashes = False
    return app


class _Pages:
    """What is answered without generating. started: seconds since 1970, shown as the model's `created`."""

    def __init__(self, engine: TextEngine, registry: CollectorRegistry, started: int) -> None:
        self._engine = engine
        self._registry = registry
        self._started = started

    async def models(self, request: Request) -> Response:
        listed: ModelList = {
            "object": "list",
            "data": [replies.model_card(await self._engine.describe(), self._started)],
        }
        return JSONResponse(listed)

    async def model(self, request: Request) -> Response:
        wanted: str = request.path_params["model"]
        card = replies.model_card(await self._engine.describe(), self._started)
        if wanted != card["id"]:
            raise NotFound(f"the model {shown(wanted)} is not served here", field="model")
        return JSONResponse(card)

    async def health(self, request: Request) -> Response:
        """Liveness: this event loop answers."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        reason = await self._engine.why_not_ready()
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": cap(reason)}, status_code=503)

    async def metrics(self, request: Request) -> Response:
        body, content_type = render(self._registry, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})


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
        return _respond(http_errors.RouteNotFound(f"there is nothing at {path}"))
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{path} does not take {shown(request.method)}, only {allowed}"
        return _respond(http_errors.MethodNotAllowed(message, allowed))
    return _respond(InvalidArgument(cap(error.detail)))


async def _on_defect(request: Request, error: Exception) -> Response:
    log.error("uncaught %s in %s", type(error).__name__, shown(request.url.path), exc_info=error)
    return _respond(Internal("internal error, see the server log", reason="UNCAUGHT_EXCEPTION"))
