"""The async client: `ClientBase` over grpc.aio. Belongs to one event loop."""

import asyncio
import random
import time
import weakref
from collections.abc import Awaitable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeVar, Unpack

import grpc

from tercet._async_stream import AsyncStream, Call, task_is_cancelled
from tercet._base import ClientBase, UnaryCall
from tercet._replies import description, rendered_chat
from tercet._request import GenerateCall
from tercet._retry import Retries
from tercet._target import channel_options
from tercet.errors import (
    ErrorDetails,
    FailedPreconditionError,
    RequestCancelledError,
    from_rpc_error,
)
from tercet.options import CallOptions, ChatOptions, ClientOptions, GenerateOptions, RenderChatOptions
from tercet.types import Message, RenderedChat, ServerDescription
from tercet.v1 import tokenizer_pb2
from tercet.v1.tokenizer_pb2_grpc import TokenizerServiceStub

if TYPE_CHECKING:
    from tercet.v1.tokenizer_pb2_grpc import TokenizerServiceAsyncStub

_Request = TypeVar("_Request", contravariant=True)
_Reply = TypeVar("_Reply", covariant=True)


class _Method(Protocol[_Request, _Reply]):
    def __call__(
        self,
        request: _Request,
        *,
        timeout: float | None = None,
        metadata: tuple[tuple[str, str], ...] | None = None,
    ) -> Awaitable[_Reply]: ...


class AsyncClient(ClientBase):
    """A connection to a Tercet server, for asyncio. Make one and keep it: it is made for many calls at once.

    Belongs to the event loop of its first call. Everything else is as in `Client`: the same methods with the same
    arguments, where `generate` and `chat` give an `AsyncStream` at once and the others are awaited.
    """

    def __init__(self, target: str, **options: Unpack[ClientOptions]) -> None:
        super().__init__(target, **options)
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: weakref.WeakSet[AsyncStream] = weakref.WeakSet()

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Go on from a text, or from token ids. Options: see `SamplingOptions`, `GenerateOptions`, `CallOptions`."""
        return self._stream(self._new_generate(prompt, options))

    def chat(self, messages: Sequence[Message | Mapping[str, object]], **options: Unpack[ChatOptions]) -> AsyncStream:
        """Answer a conversation, oldest message first. Options: those of `generate`, and `RenderOptions`."""
        return self._stream(self._new_chat(messages, options))

    async def tokenize(
        self, text: str, *, add_special_tokens: bool | None = None, **options: Unpack[CallOptions]
    ) -> list[int]:
        """Text to token ids. Control tokens written in it stay text."""
        call = self._tokenize_call(text, add_special_tokens, options)
        return list((await self._call(self._stub().Tokenize, call)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, keep_special_tokens: bool | None = None, **options: Unpack[CallOptions]
    ) -> str:
        """Token ids to text; what is not UTF-8 becomes U+FFFD."""
        call = self._detokenize_call(token_ids, keep_special_tokens, options)
        return (await self._call(self._stub().Detokenize, call)).text

    async def render_chat(
        self, messages: Sequence[Message | Mapping[str, object]], **options: Unpack[RenderChatOptions]
    ) -> RenderedChat:
        """What the model would read of a conversation."""
        return rendered_chat(await self._call(self._stub().RenderChat, self._render_chat_call(messages, options)))

    async def describe(self, **options: Unpack[CallOptions]) -> ServerDescription:
        """What is served."""
        return description(await self._call(self._stub().Describe, self._describe_call(options)))

    async def close(self) -> None:
        """End what is under way and close the connection. Without effect the second time."""
        self._closed = True
        # grpc.aio itself leaves a reader waiting for ever.
        for stream in tuple(self._streams):
            stream.cancel()
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _stub(self) -> "TokenizerServiceAsyncStub":
        """The stub; opens the channel at the first call, since it binds to the loop that runs then."""
        self._check_open()
        loop = asyncio.get_running_loop()
        if self._channel is None:
            credentials = self._credentials()
            arguments = channel_options(self.target)
            self._loop = loop
            self._channel = (
                grpc.aio.insecure_channel(self.target, arguments)
                if credentials is None
                else grpc.aio.secure_channel(self.target, credentials, arguments)
            )
        elif loop is not self._loop:
            raise FailedPreconditionError(
                "an AsyncClient belongs to the event loop of its first call", ErrorDetails(reason="WRONG_EVENT_LOOP")
            )
        return TokenizerServiceStub(self._channel)

    def _stream(self, call: GenerateCall) -> AsyncStream:
        stub = self._stub()
        span = self._tracing.start(call)
        headers = self._metadata(call.identity, span.headers)

        def send(
            message: tokenizer_pb2.TokenizerServiceGenerateRequest,
            timeout: float,
        ) -> Call:
            self._check_open()
            return stub.Generate(message, timeout=timeout, metadata=headers)

        stream = AsyncStream(call, self._settings.retry, span, send)
        self._streams.add(stream)
        return stream

    async def _call(self, method: _Method[_Request, _Reply], call: UnaryCall[_Request]) -> _Reply:
        """Send until there is a reply, or a failure that stands."""
        retries = Retries(self._settings.retry, time.monotonic() + call.identity.timeout)
        while True:
            self._check_open()
            limit = retries.remaining(time.monotonic())
            try:
                return await method(call.message, timeout=limit, metadata=call.metadata)
            except asyncio.CancelledError:
                # grpc.aio raises it also for a call that closing the client has cancelled.
                if self._closed and not task_is_cancelled():
                    raise RequestCancelledError("the client was closed") from None
                raise
            except grpc.RpcError as raw:
                attempt = retries.attempt
                error = from_rpc_error(raw)
                delay = retries.after(error, time.monotonic(), random.random())
                if delay is None:
                    raise error.with_facts(request_id=call.identity.request_id, attempts=attempt) from raw
            await asyncio.sleep(delay)
