"""`/tokenize` and `/detokenize`: bodies to the contract's messages, and its answers to JSON, in the shape that vLLM's
clients know. Pure. Invariant: a parameter that is not in a table is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NotRequired, TypedDict

from services.errors import InvalidArgument
from services.gateway import fields, messages
from services.gateway.json_body import JsonObject, JsonValue
from tercet.v1 import tokenizer_pb2

_TEXT: Final = frozenset({"model", "prompt", "add_special_tokens", "return_token_strs"})
_CHAT: Final = frozenset({"model", "messages", "add_generation_prompt", "return_token_strs"})
_IDS: Final = frozenset({"model", "tokens", "skip_special_tokens"})


class Tokenized(TypedDict):
    """max_model_len: tokens; absent while no executor has told it."""

    count: int
    tokens: list[int]
    max_model_len: NotRequired[int]
    token_strs: NotRequired[list[str]]


class Detokenized(TypedDict):
    prompt: str


@dataclass(frozen=True, slots=True)
class TokenizeBody:
    """model: the one that the caller expects. asked: a text, or a conversation. strings: tokens' texts are wanted."""

    model: str | None
    asked: tokenizer_pb2.TokenizerServiceTokenizeRequest | tokenizer_pb2.TokenizerServiceRenderChatRequest
    strings: bool


@dataclass(frozen=True, slots=True)
class DetokenizeBody:
    model: str | None
    asked: tokenizer_pb2.TokenizerServiceDetokenizeRequest


def read_tokenize(body: JsonObject) -> TokenizeBody:
    """Raises InvalidArgument naming the parameter."""
    given = {name: value for name, value in body.items() if value is not None}
    is_chat = "messages" in given
    if is_chat == ("prompt" in given):
        raise InvalidArgument("one of prompt and messages must be given", reason="MISSING_PARAMETER", field="prompt")
    _only(given, _CHAT if is_chat else _TEXT)
    strings = fields.boolean("return_token_strs", given.get("return_token_strs", False))
    if not is_chat:
        text = tokenizer_pb2.TokenizerServiceTokenizeRequest(
            text=fields.text("prompt", given["prompt"]),
            add_special_tokens=fields.boolean("add_special_tokens", given.get("add_special_tokens", True)),
            return_pieces=strings,
        )
        return TokenizeBody(_model(given), text, strings)
    chat = tokenizer_pb2.ChatPrompt(
        messages=messages.read_messages("messages", given["messages"]),
        add_generation_prompt=fields.boolean("add_generation_prompt", given.get("add_generation_prompt", True)),
    )
    if strings:
        raise InvalidArgument("return_token_strs goes with prompt only", field="return_token_strs")
    return TokenizeBody(_model(given), tokenizer_pb2.TokenizerServiceRenderChatRequest(chat=chat), strings)


def read_detokenize(body: JsonObject) -> DetokenizeBody:
    """Raises InvalidArgument naming the parameter."""
    given = {name: value for name, value in body.items() if value is not None}
    _only(given, _IDS)
    if "tokens" not in given:
        raise InvalidArgument("the parameter tokens is missing", reason="MISSING_PARAMETER", field="tokens")
    skip = fields.boolean("skip_special_tokens", given.get("skip_special_tokens", False))
    return DetokenizeBody(
        _model(given),
        tokenizer_pb2.TokenizerServiceDetokenizeRequest(
            token_ids=fields.token_ids("tokens", given["tokens"], 0), keep_special_tokens=not skip
        ),
    )


def tokenized(
    answer: tokenizer_pb2.TokenizerServiceTokenizeResponse | tokenizer_pb2.TokenizerServiceRenderChatResponse,
    max_model_len: int,
    pieces: list[bytes] | None,
) -> Tokenized:
    told = Tokenized(count=len(answer.token_ids), tokens=list(answer.token_ids))
    if max_model_len:
        told["max_model_len"] = max_model_len
    if pieces is not None:
        told["token_strs"] = [piece.decode(errors="replace") for piece in pieces]
    return told


def _model(given: Mapping[str, JsonValue]) -> str | None:
    return fields.text("model", given["model"]) if "model" in given else None


def _only(given: Mapping[str, JsonValue], known: frozenset[str]) -> None:
    for name in given:
        if name not in known:
            shown = fields.printable(name)
            raise InvalidArgument(f"unknown parameter {shown}", reason="UNKNOWN_PARAMETER", field=shown)
