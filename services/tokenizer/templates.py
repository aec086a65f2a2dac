"""Chat messages to a prompt, by the template in the model file.

Owns the shape of a message, the limits, and the split of what a template wrote into control tokens and text.
Knows no token ids, clock or network; the time is an argument. Invariant: a segment with control tokens holds
characters of the template alone (see `masking`), so nothing that a request sends becomes a control token.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2

from services.tokenizer.budget import Run
from services.tokenizer.invalid import (
    InvalidField,
    InvalidText,
    InvalidTokenizer,
    TemplateFailure,
    require_scalar_values,
)
from services.tokenizer.masking import JsonValue, Mask
from services.tokenizer.sandbox import TemplateEnvironment
from services.tokenizer.text import Segment, TextModel, control_pattern, split_control

ROLES = ("system", "user", "assistant", "tool")
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
_FIELD = "tokenizer.chat_template"


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What one rendering may cost.

    Attributes:
        template_chars: length of a template's source.
        messages: number of messages.
        content_chars: characters of a request's strings, all together.
        output_chars: characters of the prompt, and of any single value on the way there.
        depth: nesting of tool calls, tools and variables.
        work: steps of the interpreter, to which come 1,000 for each message and one for each character sent.
    """

    template_chars: int = 128 * 1024
    messages: int = 4096
    content_chars: int = 8 * 1024 * 1024
    output_chars: int = 16 * 1024 * 1024
    depth: int = 32
    work: int = 1_000_000


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message. `content` may be absent only where an assistant called tools.

    Attributes:
        role: one of `ROLES`.
        content: text, taken literally: control tokens written in it stay text.
        name: of the speaker.
        tool_call_id: the call that a tool message answers.
        tool_calls: JSON objects in OpenAI's shape.
    """

    role: str
    content: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: tuple[JsonValue, ...] = ()


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt: `text` to read, `segments` for `TextModel.encode_segments`."""

    text: str
    segments: tuple[Segment, ...]


def load_chat_template(
    metadata: Mapping[str, object], model: TextModel, limits: TemplateLimits | None = None
) -> "ChatTemplate | None":
    """The template of a GGUF file, or None where it has none.

    Raises:
        InvalidTokenizer: the template is malformed or not supported.
    """
    source = metadata.get(_FIELD)
    if source is None:
        return None
    if not isinstance(source, str):
        raise InvalidTokenizer(_FIELD, f"must be a string, not {type(source).__name__}")
    return make_chat_template(source, model, limits)


def make_chat_template(source: str, model: TextModel, limits: TemplateLimits | None = None) -> "ChatTemplate":
    """A template's source with the tokens of its model. Raises InvalidTokenizer as `load_chat_template`."""
    return ChatTemplate(
        source,
        control_tokens=model.control_tokens,
        bos_token="" if model.bos_id is None else model.token_text(model.bos_id),
        eos_token="" if model.eos_id is None else model.token_text(model.eos_id),
        limits=limits or TemplateLimits(),
    )


class ChatTemplate:
    """A compiled template. Immutable; may be used from several threads.

    Raises:
        InvalidTokenizer: too long, a syntax error, or a construct that is not supported.
    """

    def __init__(
        self,
        source: str,
        *,
        control_tokens: Collection[str],
        bos_token: str,
        eos_token: str,
        limits: TemplateLimits,
    ) -> None:
        if len(source) > limits.template_chars:
            raise InvalidTokenizer(_FIELD, f"{len(source)} characters; at most {limits.template_chars}")
        self.source = source
        self.control_tokens = tuple(control_tokens)
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.limits = limits
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        # White space may stand in content unmasked, so a token of white space alone is never parsed.
        visible = [token for token in control_tokens if not token.isspace()]
        self._control: re.Pattern[str] = control_pattern(visible)
        self._risky = "".join(sorted(set("".join(visible))))
        self._environment = TemplateEnvironment()
        self._code = self._environment.compile_guarded(source)

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[JsonValue] | None = None,
        variables: Mapping[str, JsonValue] | None = None,
        now: datetime | None = None,
    ) -> RenderedChat:
        """Write the prompt for these messages.

        Args:
            messages: at least one.
            add_generation_prompt: end with the beginning of the assistant's answer.
            tools: JSON objects that describe tools, for templates that know of them.
            variables: further values that the template may read, such as `enable_thinking`.
            now: what `strftime_now` tells; a template that asks without it fails.

        Raises:
            InvalidText: names the field, as `messages[3].role`, and the limit; also when the template itself
                refuses the messages.
            TemplateFailure: the template failed or went beyond a limit.
        """
        limits = self.limits
        request = _Request(limits)
        listed = request.messages(messages)
        extra: dict[str, JsonValue] = {"tools": None if tools is None else list(tools)}
        request.check("tools", extra["tools"], 0)
        for name, value in (variables or {}).items():
            if not name.isidentifier() or name.startswith("_") or name in _RESERVED:
                raise InvalidText(f"variables.{name:.64}", "is no name that a template variable may have")
            request.check(f"variables.{name:.64}", value, 0)
            extra[name] = value

        run = Run(
            work=limits.work + 1000 * len(messages) + request.chars,
            text_chars=limits.output_chars,
            depth=limits.depth,
            template_chars=len(self.source),
            now=now,
        )
        run.mask = Mask(self._risky, [self.source, *self._tokens.values(), *request.strings], run.charge)
        values: dict[str, Any] = {name: run.mask.mask_value(value) for name, value in extra.items()}
        values |= self._tokens | {"add_generation_prompt": add_generation_prompt}
        # Roles are a closed list, and templates build control tokens from them: they stay as they are.
        values["messages"] = [
            {key: value if key == "role" else run.mask.mask_value(value) for key, value in message.items()}
            for message in listed
        ]
        return self._split(self._render(run, values), run)

    def _render(self, run: Run, values: Mapping[str, Any]) -> str:
        environment = self._environment.begin(run)
        template = jinja2.Template.from_code(environment, self._code, environment.make_globals(None))
        chunks: list[str] = []
        size = 0
        try:
            for chunk in template.generate(**values):
                size += len(chunk)
                run.charge(len(chunk))
                if size > self.limits.output_chars:
                    raise TemplateFailure(_FIELD, f"writes more than {self.limits.output_chars} characters")
                chunks.append(chunk)
        except (InvalidField, MemoryError):
            raise
        except RecursionError:
            raise TemplateFailure(_FIELD, "calls itself too deeply") from None
        except Exception as error:  # whatever a program in a model file may raise
            reason = run.mask.unmask(str(error)[:400])
            raise TemplateFailure(_FIELD, f"{type(error).__name__}: {reason}") from None
        return "".join(chunks)

    def _split(self, masked: str, run: Run) -> RenderedChat:
        segments = tuple(
            Segment(piece if is_control else run.mask.unmask(piece), is_control)
            for piece, is_control in split_control(self._control, masked)
        )
        return RenderedChat("".join(segment.text for segment in segments), segments)


class _Request:
    """Checks a request's values and counts what they hold."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self.strings: list[str] = []
        self.chars = 0

    def messages(self, messages: Sequence[ChatMessage]) -> list[dict[str, JsonValue]]:
        if not 0 < len(messages) <= self._limits.messages:
            raise InvalidText("messages", f"{len(messages)} given; 1 to {self._limits.messages} are accepted")
        return [self._message(f"messages[{i}]", message) for i, message in enumerate(messages)]

    def _message(self, field: str, message: ChatMessage) -> dict[str, JsonValue]:
        if message.role not in ROLES:
            raise InvalidText(f"{field}.role", f"{message.role!r:.40} is none of {', '.join(ROLES)}")
        if message.tool_calls and message.role != "assistant":
            raise InvalidText(f"{field}.tool_calls", "only the assistant calls tools")
        if message.tool_call_id is not None and message.role != "tool":
            raise InvalidText(f"{field}.tool_call_id", "only a tool message answers a call")
        if message.content is None and not message.tool_calls:
            raise InvalidText(f"{field}.content", "missing")
        shown: dict[str, JsonValue] = {"role": message.role, "content": message.content}
        if message.name is not None:
            shown["name"] = message.name
        if message.tool_call_id is not None:
            shown["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            shown["tool_calls"] = list(message.tool_calls)
        for name, value in shown.items():
            self.check(f"{field}.{name}", value, 0)
        return shown

    def check(self, field: str, value: JsonValue, depth: int) -> None:
        if depth > self._limits.depth:
            raise InvalidText(field, f"nests deeper than {self._limits.depth}")
        self.chars += 1
        if isinstance(value, str):
            self.chars += len(value)
            self._require_room(field)
            require_scalar_values(field, value)
            self.strings.append(value)
        elif isinstance(value, list):
            for item in value:
                self.check(field, item, depth + 1)
        elif isinstance(value, dict):
            for key, item in value.items():
                self.check(field, key, depth + 1)
                self.check(field, item, depth + 1)
        elif not (value is None or isinstance(value, int | float)):
            raise InvalidText(field, f"{type(value).__name__} is no JSON value")
        self._require_room(field)

    def _require_room(self, field: str) -> None:
        limit = self._limits.content_chars
        if self.chars > limit:
            raise InvalidText(field, f"the request holds more than {limit} characters (content_chars)")
