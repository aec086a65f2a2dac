"""The sync client: `ClientBase` over plain gRPC. Safe to share among threads."""

import random
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc

from tercet._base import ClientBase, UnaryCall
from tercet._replies import description, rendered_chat
from tercet._request import GenerateCall
from tercet._retry import Retries
from tercet._sync_stream import Call, Stream
from tercet._target import channel_options
from tercet.errors import RequestCancelledError, from_rpc_error
from tercet.options import CallOptions, ChatOptions, ClientOptions, GenerateOptions, RenderChatOptions
from tercet.types import Message, RenderedChat, ServerDescription
from tercet.v1 import tokenizer_pb2
from tercet.v1.tokenizer_pb2_grpc import TokenizerServiceStub

_Request = TypeVar("_Request", contravariant=True)
_Reply = TypeVar("_Reply", covariant=True)


class _Method(Protocol[_Request, _Reply]):
    def __call__(
        self, request: _Request, timeout: float | None = None, metadata: tuple[tuple[str, str], ...] | None = None
    ) -> _Reply: ...


class Client(ClientBase):
    """A connection to a Tercet server. Make one and keep it: it is made for many calls, from many threads.

    target: `host:port` or `unix:/path`. Options: see `ClientOptions`. Every call has a time limit, `timeout`, 120 s
    unless given. Failures are `TercetError`s. Close it, or use it in a `with` block.
    """

    def __init__(self, target: str, **options: Unpack[ClientOptions]) -> None:
        super().__init__(target, **options)
        credentials = self._credentials()
        arguments = channel_options(target)
        self._channel = (
            grpc.insecure_channel(target, arguments)
            if credentials is None
            else grpc.secure_channel(target, credentials, arguments)
        )
        self._stub = TokenizerServiceStub(self._channel)
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._streams_lock = threading.Lock()

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Stream:
        """Go on from a text, or from token ids. Options: see `SamplingOptions`, `GenerateOptions`, `CallOptions`."""
        return self._stream(self._new_generate(prompt, options))

    def chat(self, messages: Sequence[Message | Mapping[str, object]], **options: Unpack[ChatOptions]) -> Stream:
        """Answer a conversation, oldest message first. Options: those of `generate`, and `RenderOptions`."""
        return self._stream(self._new_chat(messages, options))

    def tokenize(
        self, text: str, *, add_special_tokens: bool | None = None, **options: Unpack[CallOptions]
    ) -> list[int]:
        """Text to token ids. Control tokens written in it stay text."""
        reply = self._call(self._stub.Tokenize, self._tokenize_call(text, add_special_tokens, options))
        return list(reply.token_ids)

    def detokenize(
        self, token_ids: Sequence[int], *, keep_special_tokens: bool | None = None, **options: Unpack[CallOptions]
    ) -> str:
        """Token ids to text; what is not UTF-8 becomes U+FFFD."""
        return self._call(self._stub.Detokenize, self._detokenize_call(token_ids, keep_special_tokens, options)).text

    def render_chat(
        self, messages: Sequence[Message | Mapping[str, object]], **options: Unpack[RenderChatOptions]
    ) -> RenderedChat:
        """What the model would read of a conversation."""
        return rendered_chat(self._call(self._stub.RenderChat, self._render_chat_call(messages, options)))

    def describe(self, **options: Unpack[CallOptions]) -> ServerDescription:
        """What is served."""
        return description(self._call(self._stub.Describe, self._describe_call(options)))

    def close(self) -> None:
        """End what is under way and close the connection. Without effect the second time."""
        self._closed = True
        with self._streams_lock:
            streams = tuple(self._streams)
        for stream in streams:
            stream.cancel()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _stream(self, call: GenerateCall) -> Stream:
        self._check_open()
        span = self._tracing.start(call)
        headers = self._metadata(call.identity, span.headers)

        def send(message: tokenizer_pb2.TokenizerServiceGenerateRequest, timeout: float) -> Call:
            return self._open(lambda: self._stub.Generate(message, timeout=timeout, metadata=headers))

        stream = Stream(call, self._settings.retry, span, send)
        with self._streams_lock:
            self._streams.add(stream)
        return stream

    def _call(self, method: _Method[_Request, _Reply], call: UnaryCall[_Request]) -> _Reply:
        """Send until there is a reply, or a failure that stands."""
        now = time.monotonic()
        retries = Retries(self._settings.retry, now + call.identity.timeout)
        while True:
            limit = retries.remaining(now)
            try:
                return self._open(lambda: method(call.message, timeout=limit, metadata=call.metadata))  # noqa: B023 - it runs now
            except grpc.RpcError as raw:
                attempt = retries.attempt
                error = from_rpc_error(raw)
                delay = retries.after(error, time.monotonic(), random.random())
                if delay is None:
                    raise error.with_facts(request_id=call.identity.request_id, attempts=attempt) from raw
            time.sleep(delay)
            now = time.monotonic()

    def _open(self, start: Callable[[], _Reply]) -> _Reply:
        self._check_open()
        try:
            return start()
        except ValueError as error:
            # What gRPC raises for a channel that another thread has closed meanwhile.
            if self._closed:
                raise RequestCancelledError("the client was closed") from error
            raise
