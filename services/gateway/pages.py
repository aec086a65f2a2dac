"""What the gateway answers without generating: models, tokens, health, figures.

Owns each page's content and the role that it needs. Must not know how an engine works. Invariant: a page that shows
anything of what is served asks for a key where there are keys; only health and readiness never do.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from services import names, trace_context
from services.config import HttpLimits
from services.errors import Cancelled, InvalidArgument, NotFound
from services.gate import Gate, check_role
from services.gateway import replies, tokens
from services.gateway.engine import EngineCall, TextEngine
from services.gateway.intake import draw_request_id, header_rows, only_header, read_body, read_head
from services.gateway.json_body import JsonObject, parse_object, shown
from services.gateway.shapes import ModelList
from services.keys import Principal, Role
from services.process_metrics import render
from services.rpc_errors import cap
from tercet.v1 import tokenizer_pb2

Page = Callable[[Request], Awaitable[Response]]

# What OpenAI has at these paths and nobody serves here: told so, rather than that the path is unknown.
UNSERVED: Final[Mapping[str, str]] = {
    "/v1/responses": "the Responses API",
    "/v1/conversations": "conversations",
    "/v1/embeddings": "embeddings",
    "/v1/audio": "audio",
    "/v1/images": "images",
    "/v1/videos": "videos",
    "/v1/moderations": "moderations",
    "/v1/files": "files",
    "/v1/uploads": "uploads",
    "/v1/batches": "batches",
    "/v1/fine_tuning": "fine tuning",
    "/v1/vector_stores": "vector stores",
    "/v1/assistants": "assistants",
    "/v1/threads": "threads",
    "/v1/realtime": "the Realtime API",
    "/v1/evals": "evals",
    "/v1/containers": "containers",
    "/v1/rerank": "rerank",
    "/v1/messages": "the Messages API",
}


class Pages:
    """started: seconds since 1970, shown as the model's `created`."""

    def __init__(
        self, engine: TextEngine, registry: CollectorRegistry, started: int, gate: Gate, limits: HttpLimits
    ) -> None:
        self._engine = engine
        self._registry = registry
        self._started = started
        self._gate = gate
        self._limits = limits

    def keyed(self, page: Page, least: Role = Role.USER) -> Page:
        """`page` for those whose key is of that role."""

        async def checked(request: Request) -> Response:
            self._admit(request, least)
            return await page(request)

        return checked

    async def models(self, request: Request) -> Response:
        listed: ModelList = {
            "object": "list",
            "data": [replies.model_card(await self._engine.describe(), self._started)],
        }
        return JSONResponse(listed)

    async def model(self, request: Request) -> Response:
        return JSONResponse(replies.model_card(await self._check_model(request.path_params["model"]), self._started))

    async def tokenize(self, request: Request) -> Response:
        body = tokens.read_tokenize(await self._body(request))
        described = await self._check_model(body.model)
        call = self._call(request)
        pieces = None
        answer: tokenizer_pb2.TokenizerServiceTokenizeResponse | tokenizer_pb2.TokenizerServiceRenderChatResponse
        if isinstance(body.asked, tokenizer_pb2.TokenizerServiceTokenizeRequest):
            answer = await self._engine.tokenize(body.asked, call)
            pieces = list(answer.pieces) if body.strings else None
        else:
            answer = await self._engine.render_chat(body.asked, call)
        return JSONResponse(tokens.tokenized(answer, described.model.max_model_len, pieces))

    async def detokenize(self, request: Request) -> Response:
        body = tokens.read_detokenize(await self._body(request))
        await self._check_model(body.model)
        try:
            answer = await self._engine.detokenize(body.asked, self._call(request))
        except InvalidArgument as error:
            raise InvalidArgument(error.message, reason=error.reason, field="tokens", limit=error.limit) from error
        told: tokens.Detokenized = {"prompt": answer.text}
        return JSONResponse(told)

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

    def _admit(self, request: Request, least: Role) -> Principal | None:
        principal = self._gate.admit(only_header(header_rows(request.scope), names.MD_AUTHORIZATION))
        check_role(principal, least, shown(request.url.path))
        return principal

    async def _check_model(self, wanted: str | None) -> tokenizer_pb2.TokenizerServiceDescribeResponse:
        described = await self._engine.describe()
        if wanted is not None and wanted != described.model.name:
            raise NotFound(f"the model {shown(wanted)} is not served here", field="model")
        return described

    async def _body(self, request: Request) -> JsonObject:
        head = read_head(header_rows(request.scope), draw_request_id())
        limits = self._limits
        try:
            raw = await read_body(request.receive, head, limits.max_body_bytes, limits.body_timeout_s)
        except ClientDisconnect:
            raise Cancelled("the client left") from None
        return parse_object(raw)

    def _call(self, request: Request) -> EngineCall:
        rows = header_rows(request.scope)
        head = read_head(rows, draw_request_id())
        return EngineCall(
            request_id=head.request_id,
            tenant=None,
            priority=None,
            context=trace_context.extract(rows),
            timeout_s=self._limits.request_timeout_s,
            started_ns=time.monotonic_ns(),
        )


def unserved(path: str) -> str | None:
    """What OpenAI has at `path`, where it is known and not served."""
    return next((what for prefix, what in UNSERVED.items() if path == prefix or path.startswith(f"{prefix}/")), None)
