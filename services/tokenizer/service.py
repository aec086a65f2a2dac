"""TokenizerService on the wire: the edge's generator and the tokenizer's verbs, behind gRPC. Thin."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from services.gateway.engine import EngineCall
from services.rpc_server import call_context
from services.tokenizer import verbs
from services.tokenizer.edge import TextEdge
from services.tokenizer.export import TokenizerZip
from services.tokenizer.prompts import Prompts
from services.tokenizer.text import TextModel
from tercet.v1 import tokenizer_pb2, tokenizer_pb2_grpc

NO_DEADLINE_S: Final = 24 * 3600.0  # the scheduler's own limits are far below

Context = Any  # grpc.aio.ServicerContext is generic in ways that the generated servicers don't name


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    def __init__(self, edge: TextEdge, model: TextModel, prompts: Prompts, archive: Callable[[], TokenizerZip]) -> None:
        """archive: may take a moment, is called in a thread."""
        self._edge = edge
        self._archive = archive
        self._model = model
        self._prompts = prompts

    def Generate(
        self, request: tokenizer_pb2.TokenizerServiceGenerateRequest, context: Context
    ) -> AsyncIterator[tokenizer_pb2.TokenizerServiceGenerateResponse]:
        """The edge's own generator, so that what is thrown into it (a slow reader) is told there."""
        call = call_context(context)
        left: float | None = context.time_remaining()
        engine_call = EngineCall(
            request_id=call.request_id,
            tenant=None,
            priority=None,
            context=call.context,
            timeout_s=NO_DEADLINE_S if left is None else left,
            started_ns=call.started_ns,
            principal=call.principal,
        )
        return self._edge.generate(request, engine_call, call.metadata)

    async def Tokenize(
        self, request: tokenizer_pb2.TokenizerServiceTokenizeRequest, context: Context
    ) -> tokenizer_pb2.TokenizerServiceTokenizeResponse:
        return await verbs.tokenize(self._model, self._prompts, request)

    async def Detokenize(
        self, request: tokenizer_pb2.TokenizerServiceDetokenizeRequest, context: Context
    ) -> tokenizer_pb2.TokenizerServiceDetokenizeResponse:
        return await verbs.detokenize(self._prompts, request)

    async def RenderChat(
        self, request: tokenizer_pb2.TokenizerServiceRenderChatRequest, context: Context
    ) -> tokenizer_pb2.TokenizerServiceRenderChatResponse:
        return await verbs.render_chat(self._prompts, request)

    async def GetTokenizer(
        self, request: tokenizer_pb2.TokenizerServiceGetTokenizerRequest, context: Context
    ) -> AsyncIterator[tokenizer_pb2.TokenizerServiceGetTokenizerResponse]:
        archive = await asyncio.to_thread(self._archive)
        *first, last = archive.chunks()
        for chunk in first:
            yield tokenizer_pb2.TokenizerServiceGetTokenizerResponse(chunk=chunk)
        yield tokenizer_pb2.TokenizerServiceGetTokenizerResponse(chunk=last, sha256=archive.sha256)

    async def Describe(
        self, request: tokenizer_pb2.TokenizerServiceDescribeRequest, context: Context
    ) -> tokenizer_pb2.TokenizerServiceDescribeResponse:
        return await self._edge.describe()
