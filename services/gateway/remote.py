"""The text engine at the other end of a channel: what `tercet gateway` alone stands on.

Owns the translation of a call to metadata, deadline and errors. Must not know HTTP. Invariant: when a generator is
closed or its task cancelled, the call is cancelled.
"""

from collections.abc import AsyncGenerator
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.trace import get_current_span

from services import trace_context
from services.errors import ServiceError
from services.gateway.engine import EngineCall
from services.health import READY, REASON_KEY
from services.rpc_errors import from_rpc_error
from tercet.v1 import tokenizer_pb2, tokenizer_pb2_grpc

ASIDE_TIMEOUT_S: Final = 3.0


class RemoteEngine:
    """channel: to a tokenizer; its owner closes it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)

    async def generate(
        self, request: tokenizer_pb2.TokenizerServiceGenerateRequest, call: EngineCall
    ) -> AsyncGenerator[tokenizer_pb2.TokenizerServiceGenerateResponse, None]:
        """See TextEngine. Refusals of the other side keep their kind, field, limit and delay."""
        stream = self._tokenizer.Generate(request, timeout=call.timeout_s, metadata=_metadata(call))
        try:
            async for response in stream:
                yield response
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            stream.cancel()

    async def describe(self) -> tokenizer_pb2.TokenizerServiceDescribeResponse:
        """See TextEngine."""
        try:
            return await self._tokenizer.Describe(
                tokenizer_pb2.TokenizerServiceDescribeRequest(), timeout=ASIDE_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def why_not_ready(self) -> str | None:
        """See TextEngine. Asks the tokenizer's health service each time."""
        call = self._health.Check(health_pb2.HealthCheckRequest(service=READY), timeout=ASIDE_TIMEOUT_S)
        try:
            answer = await call
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return None
            told = dict(await call.trailing_metadata()).get(REASON_KEY, b"it gives no reason")
        except grpc.aio.AioRpcError as error:
            return f"the tokenizer does not answer: {_told(from_rpc_error(error))}"
        return f"the tokenizer is not ready: {told.decode(errors='replace')}"


def _metadata(call: EngineCall) -> tuple[tuple[str, str], ...]:
    return (*call.metadata.items(), *trace_context.inject(get_current_span(call.context)))


def _told(error: ServiceError) -> str:
    return error.message or error.reason
