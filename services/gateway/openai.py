"""OpenAI's requests to the contract's, and the contract's field names back to OpenAI's.

Pure. Owns the two endpoints' bodies as a whole; single parameters are `services.gateway.parameters`, replies are
`services.gateway.replies`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from services.errors import InvalidArgument
from services.gateway import parameters
from services.gateway.json_body import JsonObject
from services.gateway.tools import ToolUse
from tercet.v1 import tokenizer_pb2


@dataclass(frozen=True, slots=True)
class Generation:
    """A body understood: the message to the engine, and how the caller wants the reply.

    choices: answers to expect. echo: the prompt comes first in each; score_only: and nothing behind it.
    include_usage: a chunk with the whole usage ends the stream. continuous_usage: each chunk carries the usage so far.
    form: the parameter that gives the answer a form, if one does.
    """

    request: tokenizer_pb2.TokenizerServiceGenerateRequest
    stream: bool
    include_usage: bool
    continuous_usage: bool
    choices: int
    logprobs: bool
    tools: ToolUse = field(default_factory=ToolUse)
    form: str | None = None
    echo: bool = False
    score_only: bool = False


def read_chat(body: JsonObject) -> Generation:
    """A body of /v1/chat/completions. Raises InvalidArgument or Unimplemented naming the parameter."""
    return _generation("messages", parameters.read_parameters(parameters.CHAT, body), body)


def read_completion(body: JsonObject) -> Generation:
    """A body of /v1/completions. Raises InvalidArgument or Unimplemented naming the parameter."""
    return _generation("prompt", parameters.read_parameters(parameters.COMPLETIONS, body), body)


def _generation(required: str, draft: parameters.Draft, body: JsonObject) -> Generation:
    if body.get(required) is None:
        raise InvalidArgument(f"the parameter {required} is missing", reason="MISSING_PARAMETER", field=required)
    sampling = draft.request.sampling
    return Generation(
        request=draft.request,
        stream=draft.stream,
        include_usage=draft.include_usage,
        continuous_usage=draft.continuous_usage,
        choices=sampling.n if sampling.HasField("n") else 1,
        logprobs=draft.wants_logprobs,
        tools=draft.tools,
        form=draft.form,
        echo=draft.request.echo,
        score_only=draft.score_only,
    )


_PARAMETER_OF_FIELD: Final[Mapping[str, str]] = {
    "keep_special_tokens": "skip_special_tokens",
    "include_stop": "include_stop_str_in_output",
    "cache.salt": "cache_salt",
    "context.priority": "priority",
    "limits.queue_ns": "time_limits.queue",
    "limits.first_token_ns": "time_limits.first_token",
    "limits.between_tokens_ns": "time_limits.between_tokens",
    "limits.total_ns": "time_limits.total",
}
_PROMPT_FIELDS: Final = ("chat.messages", "chat", "token_ids.ids", "token_ids", "text", "prompt_ids", "prompt_len")


def parameter_of(field: str, prompt: str, form: str | None = None) -> str:
    """The caller's name of a field that an engine complains about; the field itself where there is none.

    prompt: what the endpoint calls its prompt, "messages" or "prompt". form: the parameter that asked for a grammar.
    """
    if form is not None and field.startswith("sampling.grammar"):
        return form
    known = _PARAMETER_OF_FIELD.get(field)
    if known is not None:
        return known
    for name in _PROMPT_FIELDS:
        if field == name or field.startswith(f"{name}["):
            return prompt + field[len(name) :]
    return field.removeprefix("sampling.")
