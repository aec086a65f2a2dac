"""What users hand in, as messages of the contract. Pure.

Owns the one way from arguments to the wire, and the refusal of what the wire cannot hold (a wrong type, a negative
count, text that is not Unicode). Must not know what a server allows: ranges are its own to check. Invariant: an
argument that is there is written, be it zero; one that is absent or None is not.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, TypeVar, cast

from tercet import _resume
from tercet.options import CallOptions, ChatOptions, GenerateOptions, RenderOptions, Settings, check_timeout, invalid
from tercet.types import Grammar, GrammarKind, Message, SamplingParams, TimeLimits
from tercet.v1 import common_pb2, tokenizer_pb2

MAX_ANSWERS: Final = 128
_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SAMPLING_FIELDS: Final = frozenset(field.name for field in fields(SamplingParams))
_GENERATE_OPTIONS: Final = GenerateOptions.__required_keys__ | GenerateOptions.__optional_keys__
_CHAT_OPTIONS: Final = ChatOptions.__required_keys__ | ChatOptions.__optional_keys__
_MESSAGE_KEYS: Final = frozenset(field.name for field in fields(Message))

_GRAMMARS: Final[Mapping[GrammarKind, common_pb2.GrammarKind.ValueType]] = {
    GrammarKind.JSON_OBJECT: common_pb2.GRAMMAR_KIND_JSON_OBJECT,
    GrammarKind.JSON_SCHEMA: common_pb2.GRAMMAR_KIND_JSON_SCHEMA,
    GrammarKind.REGEX: common_pb2.GRAMMAR_KIND_REGEX,
    GrammarKind.EBNF: common_pb2.GRAMMAR_KIND_EBNF,
    GrammarKind.CHOICE: common_pb2.GRAMMAR_KIND_CHOICE,
}

_Options = TypeVar("_Options")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks, in this call: what rides in the metadata. timeout: seconds for the whole call."""

    request_id: str
    tenant: str | None
    timeout: float


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A generation ready to be sent: `message` lacks only its attempt. operation: "chat" or "generate". resumes: it
    goes on where a server dies, for which the server has to send the prompt's ids."""

    operation: str
    identity: Identity
    sampling: SamplingParams
    message: tokenizer_pb2.TokenizerServiceGenerateRequest
    resumes: bool = False

    def attempt(self, number: int) -> tokenizer_pb2.TokenizerServiceGenerateRequest:
        """The message of the try `number`, from 1."""
        message = tokenizer_pb2.TokenizerServiceGenerateRequest()
        message.CopyFrom(self.message)
        message.context.attempt = number
        if self.resumes:
            message.return_prompt_ids = True
        return message

    def resumed(
        self, number: int, seed: int, so_far: common_pb2.Resume
    ) -> tokenizer_pb2.TokenizerServiceGenerateRequest:
        """The same, to go on behind what was delivered."""
        return _resume.resumed(self.attempt(number), number, seed, so_far)


def identity(options: CallOptions, settings: Settings, drawn_id: str) -> Identity:
    """Who asks; `drawn_id` is used where the caller gives no request id."""
    request_id = options.get("request_id")
    tenant = options.get("tenant")
    tenant = settings.tenant if tenant is None else tenant
    return Identity(
        request_id=drawn_id if request_id is None else _id("request_id", request_id),
        tenant=None if tenant is None else _id("tenant", tenant),
        timeout=check_timeout(options.get("timeout", settings.timeout)),
    )


def metadata(who: Identity, settings: Settings, trace: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """The headers of a call."""
    headers = [*settings.metadata.items(), ("tercet-request-id", who.request_id), *trace]
    if who.tenant is not None:
        headers.append(("tercet-tenant", who.tenant))
    if settings.api_key is not None:
        headers.append(("authorization", f"Bearer {settings.api_key}"))
    return tuple(headers)


def generate_call(
    prompt: str | Sequence[int], options: GenerateOptions, settings: Settings, drawn_id: str
) -> GenerateCall:
    """A generation from text or token ids."""
    check_names("generate", options, _GENERATE_OPTIONS)
    call = _call("generate", options, settings, drawn_id)
    if isinstance(prompt, str):
        call.message.text = text("prompt", prompt)
    else:
        call.message.token_ids.SetInParent()
        call.message.token_ids.ids.extend(token_ids("prompt", prompt))
    return call


def chat_call(
    messages: Sequence[Message | Mapping[str, object]], options: ChatOptions, settings: Settings, drawn_id: str
) -> GenerateCall:
    """A generation from a conversation."""
    check_names("chat", options, _CHAT_OPTIONS)
    call = _call("chat", options, settings, drawn_id)
    call.message.chat.CopyFrom(chat_prompt(messages, options))
    return call


def _call(operation: str, options: GenerateOptions, settings: Settings, drawn_id: str) -> GenerateCall:
    who = identity(options, settings, drawn_id)
    params = sampling_of(options)
    request = tokenizer_pb2.TokenizerServiceGenerateRequest(
        context=_context(who, options.get("priority")),
        sampling=_sampling(params),
        limits=_limits(options.get("limits")),
        stop=_stop(params.stop),
        include_stop=_flag("include_stop", params.include_stop),
        keep_special_tokens=_flag("keep_special_tokens", options.get("keep_special_tokens")),
        cache=_cache(options.get("cache_salt"), options.get("cache_bypass")),
        echo=_flag("echo", options.get("echo")),
        return_prompt_ids=_flag("return_prompt_ids", options.get("return_prompt_ids")),
        model=_optional_text("model", options.get("model")),
    )
    return GenerateCall(operation, who, params, request, settings.resume)


def sampling_of(options: GenerateOptions) -> SamplingParams:
    """`sampling`, with the keywords beside it in place of its own fields."""
    base = options.get("sampling", SamplingParams())
    if not isinstance(base, SamplingParams):
        raise invalid("sampling", f"must be a SamplingParams, not {type(base).__name__}")
    return replace(base, **{name: value for name, value in options.items() if name in _SAMPLING_FIELDS})  # type: ignore[arg-type]


def chat_prompt(messages: Sequence[Message | Mapping[str, object]], options: RenderOptions) -> tokenizer_pb2.ChatPrompt:
    """A conversation as the contract has it."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise invalid("messages", f"must be a list of messages, not {type(messages).__name__}")
    tools = options.get("tools")
    return tokenizer_pb2.ChatPrompt(
        messages=[_message(f"messages[{index}]", message) for index, message in enumerate(messages)],
        add_generation_prompt=_flag("add_generation_prompt", options.get("add_generation_prompt")),
        tools_json=[_json(f"tools[{index}]", tool) for index, tool in enumerate(tools or ())],
    )


def _message(name: str, message: Message | Mapping[str, object]) -> tokenizer_pb2.ChatMessage:
    if isinstance(message, Mapping):
        message = _message_of_mapping(name, message)
    elif not isinstance(message, Message):
        raise invalid(name, f"must be a Message or a mapping, not {type(message).__name__}")
    return tokenizer_pb2.ChatMessage(
        role=text(f"{name}.role", message.role),
        content=text(f"{name}.content", message.content),
        name=_optional_text(f"{name}.name", message.name),
        tool_calls_json=None if message.tool_calls is None else _json(f"{name}.tool_calls", message.tool_calls),
        tool_call_id=_optional_text(f"{name}.tool_call_id", message.tool_call_id),
    )


def _message_of_mapping(name: str, message: Mapping[str, object]) -> Message:
    unknown = sorted(set(message) - _MESSAGE_KEYS)
    if unknown:
        raise invalid(f"{name}.{unknown[0]}", "is not a part of a message")
    for key in ("role", "content"):
        if key not in message:
            raise invalid(f"{name}.{key}", "is missing")
    return Message(**cast("dict[str, str]", dict(message)))  # type: ignore[arg-type]


def _context(who: Identity, priority: int | None) -> common_pb2.RequestContext:
    return common_pb2.RequestContext(
        request_id=who.request_id,
        tenant=who.tenant,
        priority=None if priority is None else _integer("priority", priority, -(2**31), 2**31 - 1),
    )


def _sampling(params: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        logit_bias=[
            common_pb2.LogitBias(token_id=_u32("logit_bias", token), bias=_number(f"logit_bias[{token}]", bias))
            for token, bias in (params.logit_bias or {}).items()
        ],
        repetition_penalty=_optional_number("repetition_penalty", params.repetition_penalty),
        presence_penalty=_optional_number("presence_penalty", params.presence_penalty),
        frequency_penalty=_optional_number("frequency_penalty", params.frequency_penalty),
        min_tokens=_optional_u32("min_tokens", params.min_tokens),
        stop_token_ids=() if params.stop_token_ids is None else token_ids("stop_token_ids", params.stop_token_ids),
        ignore_eos=_flag("ignore_eos", params.ignore_eos),
        grammar=_grammar(params.grammar),
        temperature=_optional_number("temperature", params.temperature),
        top_k=_optional_u32("top_k", params.top_k),
        top_p=_optional_number("top_p", params.top_p),
        min_p=_optional_number("min_p", params.min_p),
        seed=None if params.seed is None else _integer("seed", params.seed, 0, 2**64 - 1),
        max_tokens=_optional_u32("max_tokens", params.max_tokens),
        # Checked here too, since the client holds state for each answer.
        n=None if params.n is None else _integer("n", params.n, 1, MAX_ANSWERS),
        logprobs=_optional_u32("logprobs", params.logprobs),
        prompt_logprobs=_optional_u32("prompt_logprobs", params.prompt_logprobs),
    )


def _grammar(grammar: Grammar | None) -> common_pb2.Grammar | None:
    if grammar is None:
        return None
    return common_pb2.Grammar(kind=_GRAMMARS[GrammarKind(grammar.kind)], source=text("grammar.source", grammar.source))


def _limits(limits: TimeLimits | None) -> common_pb2.TimeLimits | None:
    if limits is None:
        return None
    return common_pb2.TimeLimits(
        queue_ns=_nanoseconds("limits.queue", limits.queue),
        first_token_ns=_nanoseconds("limits.first_token", limits.first_token),
        between_tokens_ns=_nanoseconds("limits.between_tokens", limits.between_tokens),
        total_ns=_nanoseconds("limits.total", limits.total),
    )


def _nanoseconds(name: str, seconds: float | None) -> int | None:
    if seconds is None:
        return None
    nanoseconds = _number(name, seconds) * 1e9
    if not 0 <= nanoseconds < 2**64:
        raise invalid(name, f"must be 0 to {2**64 / 1e9:.0f} seconds, not {seconds!r}", 2**64 // 10**9)
    # Never rounded to zero, which has a meaning of its own.
    return math.ceil(nanoseconds) if nanoseconds < 1 else round(nanoseconds)


def _cache(salt: str | None, bypass: bool | None) -> common_pb2.CacheControl | None:
    if salt is None and bypass is None:
        return None
    return common_pb2.CacheControl(salt=_optional_text("cache_salt", salt), bypass=_flag("cache_bypass", bypass))


def _stop(stop: str | Sequence[str] | None) -> list[str]:
    if stop is None:
        return []
    return [text("stop", piece) for piece in ([stop] if isinstance(stop, str) else stop)]


def check_names(call: str, options: Mapping[str, object], known: frozenset[str]) -> None:
    """Refuse an argument that does not exist, as Python does."""
    unknown = sorted(set(options) - known)
    if unknown:
        raise TypeError(f"{call}() got an unexpected keyword argument {unknown[0]!r}")


def text(name: str, value: object) -> str:
    """`value` as text that UTF-8 can hold."""
    if not isinstance(value, str):
        raise invalid(name, f"must be a string, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(name, f"is not Unicode text: a lone surrogate at character {error.start}") from error
    return value


def token_ids(name: str, values: object) -> list[int]:
    """`values` as ids that the wire can hold."""
    if isinstance(values, str | bytes | bytearray | Mapping) or not isinstance(values, Sequence):
        raise invalid(name, f"must be a sequence of token ids, not {type(values).__name__}")
    return [_u32(f"{name}[{index}]", value) for index, value in enumerate(values)]


def _optional_text(name: str, value: str | None) -> str | None:
    return None if value is None else text(name, value)


def _id(name: str, value: object) -> str:
    if not isinstance(value, str) or _ID.fullmatch(value) is None:
        raise invalid(name, "must be 1 to 128 characters of A-Z a-z 0-9 . _ : -", 128)
    return value


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(name, f"must be an integer, not {value!r}")
    if not low <= value <= high:
        raise invalid(name, f"must be {low} to {high}, not {value}", high if value > high else low)
    return value


def _u32(name: str, value: object) -> int:
    return _integer(name, value, 0, 2**32 - 1)


def _optional_u32(name: str, value: int | None) -> int | None:
    return None if value is None else _u32(name, value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(name, f"must be a number, not {value!r}")
    return float(value)


def _optional_number(name: str, value: float | None) -> float | None:
    return None if value is None else _number(name, value)


def _flag(name: str, value: object) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise invalid(name, f"must be True or False, not {value!r}")
    return value


def _json(name: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise invalid(name, f"is not JSON: {error}") from error
