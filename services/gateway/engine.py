"""What the gateway stands on: a source of text, defined by its consumer.

Owns the interface alone. Must not know HTTP (the app does) nor how the text comes about: the tokenizer's service
satisfies it in its own process, `services.gateway.remote.RemoteEngine` over a channel. Invariant: every failure
that leaves an engine is a `services.errors.ServiceError`; anything else is a defect of the engine.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from opentelemetry.context import Context

from services import names
from services.keys import Principal
from tercet.v1 import tokenizer_pb2


@dataclass(frozen=True, slots=True)
class EngineCall:
    """What a call carries beside its message; over gRPC, its metadata and deadline.

    request_id: always set, valid. tenant, priority: as the caller gave them in headers; None leaves the message's
    own, or the server's default. context: holds the caller's span, the parent of whatever the engine starts.
    timeout_s: the whole call's, from now. started_ns: `time.monotonic_ns` when the request arrived here. principal:
    whose key came with the request; None where no keys are asked for.
    """

    request_id: str
    tenant: str | None
    priority: int | None
    context: Context
    timeout_s: float
    started_ns: int
    principal: Principal | None = None

    @property
    def metadata(self) -> dict[str, str]:
        """Who asks, as metadata of a gRPC call; the trace is not in it."""
        given = {
            names.MD_REQUEST_ID: self.request_id,
            names.MD_TENANT: self.tenant,
            names.MD_PRIORITY: None if self.priority is None else str(self.priority),
        }
        return {key: value for key, value in given.items() if value is not None}


class TextEngine(Protocol):
    def generate(
        self, request: tokenizer_pb2.TokenizerServiceGenerateRequest, call: EngineCall
    ) -> AsyncGenerator[tokenizer_pb2.TokenizerServiceGenerateResponse, None]:
        """Accepted, then deltas, then one Finished per answer; then it ends.

        An async generator: closing it, or cancelling the task that waits on it, cancels the work in every phase,
        and when that returns the work is given up. Raises ServiceError, before or after any event.
        """
        ...

    async def tokenize(
        self, request: tokenizer_pb2.TokenizerServiceTokenizeRequest, call: EngineCall
    ) -> tokenizer_pb2.TokenizerServiceTokenizeResponse: ...

    async def detokenize(
        self, request: tokenizer_pb2.TokenizerServiceDetokenizeRequest, call: EngineCall
    ) -> tokenizer_pb2.TokenizerServiceDetokenizeResponse: ...

    async def render_chat(
        self, request: tokenizer_pb2.TokenizerServiceRenderChatRequest, call: EngineCall
    ) -> tokenizer_pb2.TokenizerServiceRenderChatResponse: ...

    async def describe(self) -> tokenizer_pb2.TokenizerServiceDescribeResponse:
        """The model served. Raises Unavailable while the chain is not complete."""
        ...

    async def why_not_ready(self) -> str | None:
        """None when a request sent now can be served, else what is missing, for people.

        Never raises and never waits longer than a few seconds.
        """
        ...
