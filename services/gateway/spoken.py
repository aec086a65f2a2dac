"""Chat replies whose text holds more than content: the parts of it put where OpenAI's clients look for them.

Pure. Owns `tool_calls`, `reasoning_content` and the finish reason "tool_calls", in whole answers and in chunks.
Invariant: the chunks of an answer, joined, are the whole one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

from services.gateway import shapes
from services.gateway.openai import Generation
from services.gateway.speech import (
    REASONING_FORMATS,
    CallArguments,
    CallBegin,
    Content,
    Part,
    Reasoning,
    ReasoningFormat,
    SpeechReader,
    ToolFormat,
)

CALLED: Final = "tool_calls"


@dataclass(frozen=True, slots=True)
class Listening:
    """How the answers to one request are read. draw_id: of a call."""

    reasoning: ReasoningFormat | None
    tools: ToolFormat | None
    forced: bool
    draw_id: Callable[[], str]

    @property
    def reads(self) -> bool:
        return self.reasoning is not None or self.tools is not None

    def reader(self) -> SpeechReader:
        return SpeechReader(self.reasoning, self.tools, forced=self.forced, draw_id=self.draw_id)


def listening_of(
    generation: Generation, tool_format: str, reasoning_format: str, draw_id: Callable[[], str]
) -> Listening:
    """Asks the engine for the tools, too. tool_format, reasoning_format: as it describes itself.

    Raises Unimplemented where tools are offered to a model that knows none.
    """
    form = None
    if generation.tools.offered:
        form = generation.tools.format(tool_format)
        generation.tools.apply(generation.request, form)
    formed = generation.request.sampling.HasField("grammar")  # then the form is the whole answer's
    reasoning = None if formed else REASONING_FORMATS.get(reasoning_format)
    return Listening(reasoning, form, generation.tools.demanded, draw_id)


def read_whole(reply: shapes.Reply, listening: Listening) -> None:
    """Takes each choice's content apart."""
    for choice in cast("list[shapes.ChatChoice]", reply["choices"]):
        reader = listening.reader()
        parts = [*reader.push(choice["message"]["content"] or ""), *reader.finish()]
        message = choice["message"]
        content = "".join(part.text for part in parts if isinstance(part, Content))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls = _calls(parts)
        message["content"] = content if content.strip() or not calls else None
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
            choice["finish_reason"] = _reason(choice["finish_reason"])


def _calls(parts: list[Part]) -> list[shapes.ToolCall]:
    calls: list[shapes.ToolCall] = []
    for part in parts:
        if isinstance(part, CallBegin):
            calls.append({"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": ""}})
        elif isinstance(part, CallArguments):
            calls[part.index]["function"]["arguments"] += part.text
    return calls


def _reason(reason: shapes.FinishReason) -> shapes.FinishReason:
    return CALLED if reason == "stop" else reason


class SpokenChunks:
    """The chunks of one streamed reply, taken apart as they come."""

    def __init__(self, listening: Listening) -> None:
        self._listening = listening
        self._readers: dict[int, SpeechReader] = {}
        self._opened: set[int] = set()
        self._logprobs: dict[int, list[Any]] = {}  # of chunks that showed nothing

    def split(self, reply: shapes.Reply) -> list[shapes.Reply]:
        """What is sent in place of a chunk: perhaps nothing."""
        if not reply["choices"]:
            return [reply]
        choice = cast("shapes.ChatChunkChoice", reply["choices"][0])
        index = choice["index"]
        reader = self._readers.setdefault(index, self._listening.reader())
        if choice["finish_reason"] is None:
            if choice["logprobs"] is not None:
                self._logprobs.setdefault(index, []).extend(choice["logprobs"]["content"])
            return [self._chunk(reply, index, delta) for delta in map(_delta, reader.push(_text(choice)))]
        chunks = [self._chunk(reply, index, delta) for delta in map(_delta, reader.finish())]
        ended = self._chunk(reply, index, {} if index in self._opened else {"content": ""})
        last = cast("shapes.ChatChunkChoice", ended["choices"][0])
        last["finish_reason"] = _reason(choice["finish_reason"]) if reader.calls else choice["finish_reason"]
        return [*chunks, ended]

    def _chunk(self, reply: shapes.Reply, index: int, delta: shapes.Delta) -> shapes.Reply:
        if index not in self._opened:
            self._opened.add(index)
            delta = {"role": "assistant", **delta}
        held = self._logprobs.pop(index, None)
        logprobs: shapes.ChatLogprobs | None = None if held is None else {"content": held, "refusal": None}
        choice: shapes.ChatChunkChoice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return {**reply, "choices": [choice]}


def _text(choice: shapes.ChatChunkChoice) -> str:
    return choice["delta"].get("content") or ""


def _delta(part: Part) -> shapes.Delta:
    match part:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallBegin(index, call_id, name):
            begin: shapes.ToolCallDelta = {
                "index": index,
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }
            return {"tool_calls": [begin]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
