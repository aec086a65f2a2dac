"""What the sync and the async client share: from arguments to messages, and from settings to a channel's parts."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar, Unpack

import grpc

from tercet import _request
from tercet._request import GenerateCall, Identity
from tercet._tracing import Headers, make_tracing
from tercet.errors import ErrorDetails, FailedPreconditionError
from tercet.options import CallOptions, ChatOptions, ClientOptions, GenerateOptions, RenderChatOptions, Settings
from tercet.types import Message
from tercet.v1 import tokenizer_pb2

_CALL_OPTIONS: Final = CallOptions.__required_keys__ | CallOptions.__optional_keys__
_RENDER_OPTIONS: Final = RenderChatOptions.__required_keys__ | RenderChatOptions.__optional_keys__

_Request = TypeVar("_Request")


@dataclass(frozen=True, slots=True)
class UnaryCall(Generic[_Request]):
    """A unary call ready to be sent."""

    identity: Identity
    metadata: tuple[tuple[str, str], ...]
    message: _Request


class ClientBase:
    """Builds calls; the subclasses send them."""

    def __init__(self, target: str, **options: Unpack[ClientOptions]) -> None:
        self._settings = Settings(target, **options)
        self._tracing = make_tracing(self._settings)
        self._closed = False

    @property
    def target(self) -> str:
        """The server, as given."""
        return self._settings.target

    def _credentials(self) -> grpc.ChannelCredentials | None:
        """None: plain text."""
        tls = self._settings.tls
        if isinstance(tls, bool):
            return grpc.ssl_channel_credentials() if tls else None
        return tls

    def _check_open(self) -> None:
        if self._closed:
            raise FailedPreconditionError("the client is closed", ErrorDetails(reason="CLIENT_CLOSED"))

    def _metadata(self, who: Identity, trace: Headers) -> tuple[tuple[str, str], ...]:
        return _request.metadata(who, self._settings, trace)

    def _unary(self, name: str, message: _Request, options: CallOptions) -> UnaryCall[_Request]:
        _request.check_names(name, options, _CALL_OPTIONS)
        who = _request.identity(options, self._settings, _new_id())
        return UnaryCall(who, self._metadata(who, self._tracing.headers()), message)

    def _tokenize_call(
        self, text: str, add_special_tokens: bool | None, options: CallOptions
    ) -> UnaryCall[tokenizer_pb2.TokenizerServiceTokenizeRequest]:
        message = tokenizer_pb2.TokenizerServiceTokenizeRequest(
            text=_request.text("text", text), add_special_tokens=add_special_tokens
        )
        return self._unary("tokenize", message, options)

    def _detokenize_call(
        self, token_ids: Sequence[int], keep_special_tokens: bool | None, options: CallOptions
    ) -> UnaryCall[tokenizer_pb2.TokenizerServiceDetokenizeRequest]:
        message = tokenizer_pb2.TokenizerServiceDetokenizeRequest(
            token_ids=_request.token_ids("token_ids", token_ids), keep_special_tokens=keep_special_tokens
        )
        return self._unary("detokenize", message, options)

    def _render_chat_call(
        self, messages: Sequence[Message | Mapping[str, object]], options: RenderChatOptions
    ) -> UnaryCall[tokenizer_pb2.TokenizerServiceRenderChatRequest]:
        _request.check_names("render_chat", options, _RENDER_OPTIONS)
        message = tokenizer_pb2.TokenizerServiceRenderChatRequest(chat=_request.chat_prompt(messages, options))
        who = _request.identity(options, self._settings, _new_id())
        return UnaryCall(who, self._metadata(who, self._tracing.headers()), message)

    def _describe_call(self, options: CallOptions) -> UnaryCall[tokenizer_pb2.TokenizerServiceDescribeRequest]:
        return self._unary("describe", tokenizer_pb2.TokenizerServiceDescribeRequest(), options)

    def _new_generate(self, prompt: str | Sequence[int], options: GenerateOptions) -> GenerateCall:
        return _request.generate_call(prompt, options, self._settings, _new_id())

    def _new_chat(self, messages: Sequence[Message | Mapping[str, object]], options: ChatOptions) -> GenerateCall:
        return _request.chat_call(messages, options, self._settings, _new_id())


def _new_id() -> str:
    return uuid.uuid4().hex
