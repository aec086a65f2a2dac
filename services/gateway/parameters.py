"""The table of OpenAI's parameters: what each becomes in the contract, or why it is refused.

Pure. Owns the names. A row is a reader that puts one value into a draft of the request. Invariant: a parameter is
served, or accepted and documented to change nothing, or refused by name; a parameter that is in no row is refused
by name too. JSON null means absent, as OpenAI's clients send it.

Ranges are the contract's (`protos/tercet/v1/common.proto`), wider than OpenAI's in places (temperature to 100).
What depends on the model (vocabulary, context) is for the engine to check.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from services import wire_sampling
from services.callers import PRIORITY_BOUND
from services.errors import InvalidArgument, Unimplemented
from services.gateway import fields, messages, structured, tools
from services.gateway.json_body import JsonObject, JsonValue, shown
from services.gateway.tools import ToolUse
from tercet.v1 import common_pb2, tokenizer_pb2

MAX_STOPS: Final = 16
MAX_STOP_BYTES: Final = 1024
MAX_NAME_BYTES: Final = 256
MAX_LIMIT_S: Final = 86_400.0


@dataclass(slots=True)
class Draft:
    """A request while its parameters are being read."""

    request: tokenizer_pb2.TokenizerServiceGenerateRequest = field(
        default_factory=tokenizer_pb2.TokenizerServiceGenerateRequest
    )
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    wants_logprobs: bool = False
    top_logprobs: int | None = None
    tools: ToolUse = field(default_factory=ToolUse)
    form: str | None = None  # the parameter that asked for a grammar
    score_only: bool = False  # nothing of the answer is wanted, only the prompt with its logprobs
    best_of: int | None = None


Reader = Callable[[Draft, str, JsonValue], None]


class Support(Enum):
    SERVED = "served"
    WITHOUT_EFFECT = "accepted, changes nothing"
    REFUSED = "refused unless it asks for the default"


@dataclass(frozen=True, slots=True)
class Parameter:
    support: Support
    read: Reader


def read_parameters(table: Mapping[str, Parameter], body: JsonObject) -> Draft:
    """Every parameter of `body` through its row. Raises InvalidArgument or Unimplemented naming the parameter."""
    draft = Draft()
    for name, value in body.items():
        parameter = table.get(name)
        if parameter is None:
            raise InvalidArgument(
                f"unknown parameter {shown(name)}", reason="UNKNOWN_PARAMETER", field=fields.printable(name)
            )
        if value is not None:
            parameter.read(draft, name, value)
    _check_together(draft, body)
    return draft


def unsupported(name: str, what: str) -> Unimplemented:
    return Unimplemented(f"{name}: {what} is not supported", reason="UNSUPPORTED_PARAMETER", field=name)


def _check_together(draft: Draft, body: JsonObject) -> None:
    if body.get("stream_options") is not None and not draft.stream:
        raise fields.invalid("stream_options", "absent unless stream is true")
    if draft.top_logprobs is not None and not draft.wants_logprobs:
        raise fields.invalid("top_logprobs", "absent unless logprobs is true")
    if draft.wants_logprobs:
        draft.request.sampling.logprobs = draft.top_logprobs or 0
    draft.tools.check()
    if draft.form is not None and draft.tools.offered:
        raise fields.invalid(draft.form, "absent where tools are offered: an answer of that form could call none")
    sampling = draft.request.sampling
    if draft.request.echo and draft.wants_logprobs:
        sampling.prompt_logprobs = sampling.logprobs
    if draft.score_only and not draft.request.echo:
        raise fields.invalid("max_tokens", "at least 1, unless echo is true", limit=1)
    if draft.best_of is not None and draft.best_of != (sampling.n if sampling.HasField("n") else 1):
        raise unsupported("best_of", "a value other than n")
    if sampling.HasField("max_tokens") and sampling.min_tokens > sampling.max_tokens:
        raise fields.invalid("min_tokens", f"at most max_tokens ({sampling.max_tokens})", limit=sampling.max_tokens)


# Makers of readers, one for each shape of row


def _single(low: float, high: float, *, above_low: bool = False) -> Reader:
    def read(draft: Draft, name: str, value: JsonValue) -> None:
        setattr(draft.request.sampling, name, fields.single(name, value, low, high, above_low=above_low))

    return read


def _integer(low: int, high: int) -> Reader:
    def read(draft: Draft, name: str, value: JsonValue) -> None:
        setattr(draft.request.sampling, name, fields.integer(name, value, low, high))

    return read


def _checked_text(max_bytes: int) -> Reader:
    def read(draft: Draft, name: str, value: JsonValue) -> None:
        fields.text(name, value, max_bytes)

    return read


def _refused(*defaults: JsonValue) -> Reader:
    """Refused by name, unless the value is what would happen anyway."""

    def read(draft: Draft, name: str, value: JsonValue) -> None:
        if not any(type(value) is type(default) and value == default for default in defaults):
            raise unsupported(name, "this parameter" if not defaults else "this value")

    return read


# Readers of single parameters


def _model(draft: Draft, name: str, value: JsonValue) -> None:
    draft.request.model = fields.text(name, value, MAX_NAME_BYTES, empty=False)


def _messages(draft: Draft, name: str, value: JsonValue) -> None:
    draft.request.chat.messages.extend(messages.read_messages(name, value))


def _add_generation_prompt(draft: Draft, name: str, value: JsonValue) -> None:
    draft.request.chat.add_generation_prompt = fields.boolean(name, value)


def _prompt(draft: Draft, name: str, value: JsonValue) -> None:
    if isinstance(value, str):
        draft.request.text = fields.text(name, value)
        return
    if not isinstance(value, list):
        raise fields.invalid(name, f"a string or a list of token ids, not {fields.kind(value)}")
    items = fields.array(name, value, 1)
    if not isinstance(items[0], (str, list)):
        draft.request.token_ids.ids.extend(fields.token_ids(name, items, 1))
    elif len(items) > 1:
        raise unsupported(name, "more than one prompt in a request")
    elif isinstance(items[0], str):
        draft.request.text = fields.text(f"{name}[0]", items[0])
    else:
        draft.request.token_ids.ids.extend(fields.token_ids(f"{name}[0]", items[0], 1))


def _max_tokens(draft: Draft, name: str, value: JsonValue) -> None:
    count = fields.integer(name, value, 1, fields.UINT32_MAX)
    sampling = draft.request.sampling
    if sampling.HasField("max_tokens") and sampling.max_tokens != count:
        raise fields.invalid(name, "equal to its other spelling: max_tokens and max_completion_tokens differ")
    sampling.max_tokens = count


def _completion_max_tokens(draft: Draft, name: str, value: JsonValue) -> None:
    """With `echo` it may be 0: the prompt alone is wanted. The contract draws one token at least, which is dropped."""
    draft.score_only = value == 0 and not isinstance(value, bool)
    _max_tokens(draft, name, 1 if draft.score_only else value)


def _echo(draft: Draft, name: str, value: JsonValue) -> None:
    draft.request.echo = fields.boolean(name, value)


def _best_of(draft: Draft, name: str, value: JsonValue) -> None:
    draft.best_of = fields.integer(name, value, 1, wire_sampling.MAX_N)


def _logit_bias(draft: Draft, name: str, value: JsonValue) -> None:
    entries = fields.mapping(name, value)
    if len(entries) > wire_sampling.MAX_LOGIT_BIAS:
        raise fields.invalid(
            name, f"at most {wire_sampling.MAX_LOGIT_BIAS} entries", limit=wire_sampling.MAX_LOGIT_BIAS
        )
    seen: set[int] = set()
    for key, bias in entries.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) <= fields.UINT32_MAX):
            raise fields.invalid(name, f"keyed by token ids in decimal, not {shown(key)}")
        token_id = int(key)
        if token_id in seen:
            raise fields.invalid(name, f"keyed by each token id once: {token_id} comes twice")
        seen.add(token_id)
        draft.request.sampling.logit_bias.add(
            token_id=token_id, bias=fields.single(f"{name}[{key}]", bias, -100.0, 100.0)
        )


def _stop(draft: Draft, name: str, value: JsonValue) -> None:
    if isinstance(value, str):
        draft.request.stop.append(fields.text(name, value, MAX_STOP_BYTES, empty=False))
        return
    for i, item in enumerate(fields.array(name, value, 0, MAX_STOPS)):
        draft.request.stop.append(fields.text(f"{name}[{i}]", item, MAX_STOP_BYTES, empty=False))


def _stop_token_ids(draft: Draft, name: str, value: JsonValue) -> None:
    draft.request.sampling.stop_token_ids.extend(fields.token_ids(name, value, 0, wire_sampling.MAX_STOP_TOKEN_IDS))


def _ignore_eos(draft: Draft, name: str, value: JsonValue) -> None:
    draft.request.sampling.ignore_eos = fields.boolean(name, value)


def _chat_logprobs(draft: Draft, name: str, value: JsonValue) -> None:
    draft.wants_logprobs = fields.boolean(name, value)


def _top_logprobs(draft: Draft, name: str, value: JsonValue) -> None:
    draft.top_logprobs = fields.integer(name, value, 0, wire_sampling.MAX_LOGPROBS)


def _completion_logprobs(draft: Draft, name: str, value: JsonValue) -> None:
    draft.top_logprobs = fields.integer(name, value, 0, wire_sampling.MAX_LOGPROBS)
    draft.wants_logprobs = True


def _stream(draft: Draft, name: str, value: JsonValue) -> None:
    draft.stream = fields.boolean(name, value)


def _stream_options(draft: Draft, name: str, value: JsonValue) -> None:
    for key, option in fields.mapping(name, value).items():
        path = f"{name}.{fields.printable(key)}"
        if option is None:
            continue
        if key == "include_usage":
            draft.include_usage = fields.boolean(path, option)
        elif key == "continuous_usage_stats":
            draft.continuous_usage = fields.boolean(path, option)
        elif key == "include_obfuscation":
            if fields.boolean(path, option):
                raise unsupported(path, "this value")
        else:
            raise InvalidArgument(f"unknown parameter {path}", reason="UNKNOWN_PARAMETER", field=path)


def _time_limits(draft: Draft, name: str, value: JsonValue) -> None:
    for key, limit in fields.mapping(name, value).items():
        path = f"{name}.{fields.printable(key)}"
        if key not in ("queue", "first_token", "between_tokens", "total"):
            raise InvalidArgument(f"unknown parameter {path}", reason="UNKNOWN_PARAMETER", field=path)
        if limit is not None:
            setattr(draft.request.limits, f"{key}_ns", fields.nanoseconds(path, limit, MAX_LIMIT_S))


def _priority(draft: Draft, name: str, value: JsonValue) -> None:
    draft.request.context.priority = fields.integer(name, value, -PRIORITY_BOUND, PRIORITY_BOUND)


def _skip_special_tokens(draft: Draft, name: str, value: JsonValue) -> None:
    draft.request.keep_special_tokens = not fields.boolean(name, value)


def _include_stop(draft: Draft, name: str, value: JsonValue) -> None:
    draft.request.include_stop = fields.boolean(name, value)


def _cache_salt(draft: Draft, name: str, value: JsonValue) -> None:
    draft.request.cache.salt = fields.text(name, value, MAX_NAME_BYTES, empty=False)


def _formed(read: Callable[[str, JsonValue], common_pb2.Grammar | None]) -> Reader:
    """A parameter that gives the answer a form."""

    def reader(draft: Draft, name: str, value: JsonValue) -> None:
        grammar = read(name, value)
        if grammar is None:
            return
        if draft.form is not None:
            raise fields.invalid(name, f"absent: {draft.form} has given the answer a form")
        draft.form = name
        draft.request.sampling.grammar.CopyFrom(grammar)

    return reader


def _tool_use(read: Callable[[ToolUse, str, JsonValue], None]) -> Reader:
    def reader(draft: Draft, name: str, value: JsonValue) -> None:
        read(draft.tools, name, value)

    return reader


def _metadata(draft: Draft, name: str, value: JsonValue) -> None:
    fields.mapping(name, value)


def _served(read: Reader) -> Parameter:
    return Parameter(Support.SERVED, read)


def _without_effect(read: Reader) -> Parameter:
    return Parameter(Support.WITHOUT_EFFECT, read)


def _unserved(*defaults: JsonValue) -> Parameter:
    return Parameter(Support.REFUSED, _refused(*defaults))


_SHARED: Final[Mapping[str, Parameter]] = {
    "model": _served(_model),
    "max_tokens": _served(_max_tokens),
    "temperature": _served(_single(0.0, 100.0)),
    "top_p": _served(_single(0.0, 1.0, above_low=True)),
    "top_k": _served(_integer(0, fields.UINT32_MAX)),
    "min_p": _served(_single(0.0, 1.0)),
    "seed": _served(_integer(0, fields.UINT64_MAX)),
    "stop": _served(_stop),
    "stop_token_ids": _served(_stop_token_ids),
    "ignore_eos": _served(_ignore_eos),
    "min_tokens": _served(_integer(0, fields.UINT32_MAX)),
    "presence_penalty": _served(_single(-2.0, 2.0)),
    "frequency_penalty": _served(_single(-2.0, 2.0)),
    "repetition_penalty": _served(_single(0.0, 10.0, above_low=True)),
    "logit_bias": _served(_logit_bias),
    "n": _served(_integer(1, wire_sampling.MAX_N)),
    "stream": _served(_stream),
    "stream_options": _served(_stream_options),
    "priority": _served(_priority),
    "time_limits": _served(_time_limits),
    "skip_special_tokens": _served(_skip_special_tokens),
    "include_stop_str_in_output": _served(_include_stop),
    "cache_salt": _served(_cache_salt),
    "user": _without_effect(_checked_text(4096)),
    "prompt_logprobs": _unserved(),
    "use_beam_search": _unserved(False),
    "length_penalty": _unserved(1, 1.0),
    "truncate_prompt_tokens": _unserved(),
    "bad_words": _unserved([]),
    **{name: _served(_formed(form)) for name, form in structured.GUIDED.items()},
    "structured_outputs": _served(_formed(structured.structured_outputs)),
    "response_format": _served(_formed(structured.response_format)),
}

CHAT: Final[Mapping[str, Parameter]] = {
    **_SHARED,
    "messages": _served(_messages),
    "max_completion_tokens": _served(_max_tokens),
    "logprobs": _served(_chat_logprobs),
    "top_logprobs": _served(_top_logprobs),
    "add_generation_prompt": _served(_add_generation_prompt),
    "metadata": _without_effect(_metadata),
    "safety_identifier": _without_effect(_checked_text(4096)),
    "prompt_cache_key": _without_effect(_checked_text(4096)),
    "parallel_tool_calls": _served(_tool_use(tools.read_parallel)),
    "store": _unserved(False),
    "service_tier": _unserved("auto", "default"),
    "tools": _served(_tool_use(tools.read_tools)),
    "tool_choice": _served(_tool_use(tools.read_tool_choice)),
    "functions": _unserved([]),
    "function_call": _unserved("none", "auto"),
    "modalities": _unserved(["text"]),
    "audio": _unserved(),
    "prediction": _unserved(),
    "moderation": _unserved(),
    "reasoning_effort": _unserved("none"),
    "verbosity": _unserved("medium"),
    "web_search_options": _unserved(),
    "prompt_cache_retention": _unserved(),
    "prompt_cache_options": _unserved(),
    "chat_template": _unserved(),
    "chat_template_kwargs": _unserved({}),
    "continue_final_message": _unserved(False),
    "documents": _unserved([]),
    "mm_processor_kwargs": _unserved({}),
}

COMPLETIONS: Final[Mapping[str, Parameter]] = {
    **_SHARED,
    "prompt": _served(_prompt),
    "max_tokens": _served(_completion_max_tokens),
    "logprobs": _served(_completion_logprobs),
    "best_of": _served(_best_of),
    "echo": _served(_echo),
    "suffix": _unserved(""),
    "prompt_embeds": _unserved(),
}
