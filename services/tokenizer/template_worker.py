"""The process in which a chat template runs: it is a program that came with a model file, so it may loop, eat memory or
crash without harm.

Owns the form of its messages: a template with its model's tokens, then chats, one rendering for each. Must not know
gRPC. Texts travel as bytes beside the JSON, so that a long chat costs the event loop next to nothing.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from services.tokenizer.invalid import InvalidField, InvalidText, TemplateFailure
from services.tokenizer.masking import JsonValue
from services.tokenizer.templates import ChatMessage, ChatTemplate, RenderedChat, TemplateLimits
from services.tokenizer.text import Segment
from services.tokenizer.worker import MEMORY_BYTES, Message, pack_texts, unpack_texts, work

_FIELD = "tokenizer.chat_template"
PER_MESSAGE = 5  # texts: role, content, name, tool_call_id, tool calls as JSON


def template_message(template: ChatTemplate) -> Message:
    return Message(
        {
            "source": template.source,
            "control_tokens": template.control_tokens,
            "bos_token": template.bos_token,
            "eos_token": template.eos_token,
            "limits": asdict(template.limits),
        }
    )


def chat_message(
    messages: Sequence[tuple[str | None, ...]], tools: Sequence[str], *, add_generation_prompt: bool
) -> Message:
    """messages: of `PER_MESSAGE` texts each. tools: JSON."""
    lengths, body = pack_texts([*(text for message in messages for text in message), *tools])
    return Message({"messages": len(messages), "texts": lengths, "generate": add_generation_prompt}, body)


def read_rendered(answer: Message) -> RenderedChat:
    """Raises InvalidText and TemplateFailure, as the worker did."""
    head = answer.head
    if "problem" in head:
        raise (TemplateFailure if head["is_template"] else InvalidText)(str(head["field"]), str(head["problem"]))
    texts = [text or "" for text in unpack_texts(head["texts"], answer.body)]
    segments = tuple(Segment(text, bool(is_control)) for text, is_control in zip(texts, head["control"], strict=True))
    return RenderedChat("".join(texts), segments)


def _begin(opening: Message) -> Callable[[Message], Message]:
    given = opening.head
    template = ChatTemplate(
        given["source"],
        control_tokens=given["control_tokens"],
        bos_token=given["bos_token"],
        eos_token=given["eos_token"],
        limits=TemplateLimits(**given["limits"]),
    )
    return lambda asked: _answer(template, asked)


def _answer(template: ChatTemplate, asked: Message) -> Message:
    try:
        return _rendered(template, asked)
    except InvalidField as error:
        return _problem(error.field, error.problem, is_template=isinstance(error, TemplateFailure))
    except MemoryError:
        return _problem(_FIELD, f"takes more memory than {MEMORY_BYTES} bytes", is_template=True)


def _rendered(template: ChatTemplate, asked: Message) -> Message:
    texts = unpack_texts(asked.head["texts"], asked.body)
    end = asked.head["messages"] * PER_MESSAGE
    messages = [_chat_message(at // PER_MESSAGE, texts[at : at + PER_MESSAGE]) for at in range(0, end, PER_MESSAGE)]
    tools = [_json(f"tools_json[{index}]", text or "") for index, text in enumerate(texts[end:])] or None
    rendered = template.render_chat(
        messages, add_generation_prompt=asked.head["generate"], tools=tools, now=datetime.now()
    )
    lengths, body = pack_texts(segment.text for segment in rendered.segments)
    return Message({"texts": lengths, "control": [one.is_control_allowed for one in rendered.segments]}, body)


def _problem(field: str, problem: str, *, is_template: bool) -> Message:
    return Message({"field": field, "problem": problem, "is_template": is_template})


def _chat_message(index: int, texts: Sequence[str | None]) -> ChatMessage:
    role, content, name, tool_call_id, tool_calls = texts
    return ChatMessage(
        role=role or "",
        content=None if tool_calls is not None and not content else content,
        name=name,
        tool_call_id=tool_call_id,
        tool_calls=() if tool_calls is None else _json_list(f"messages[{index}].tool_calls_json", tool_calls),
    )


def _json_list(field: str, text: str) -> tuple[JsonValue, ...]:
    value = _json(field, text)
    if not isinstance(value, list):
        raise InvalidText(field, "must be a JSON list")
    return tuple(value)


def _json(field: str, text: str) -> JsonValue:
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidText(field, "is not JSON") from None
    checked: JsonValue = value
    return checked


if __name__ == "__main__":
    work(_begin)
