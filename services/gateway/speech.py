"""What a model's text is made of beside plain content: reasoning, and calls of tools.

Pure. Owns the forms in which families of models write them, a table each, and reading them as the text comes. Knows no
JSON of a reply. Invariant: the parts depend on the text, not on where it was cut into deltas; text that looks like a
call and is none is content, in full.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from services.gateway.call_scanner import CallScanner


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """index: from 0 in its answer."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments' JSON of the call that began last."""

    index: int
    text: str


Part = Content | Reasoning | CallBegin | CallArguments


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are written.

    begin, end: around each, or before all of them. bare: an answer that begins with a brace is calls. control: `begin`
    is a control token, to be seen only where these are kept. call: one call, up to and from the arguments' JSON, with
    %s for the name's. opens, separates, closes: around the calls of an answer that is nothing but calls.
    """

    begin: str
    end: str = ""
    bare: bool = False
    control: bool = False
    call: tuple[str, str] = ('{"name": %s, "arguments": ', "}")
    opens: str = ""
    separates: str = "\n"
    closes: str = ""


TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    "hermes": ToolFormat(
        "<tool_call>",
        "</tool_call>",
        call=('<tool_call>\n{"name": %s, "arguments": ', "}\n</tool_call>"),
    ),
    "llama3": ToolFormat(
        "<|python_tag|>", bare=True, control=True, call=('{"name": %s, "parameters": ', "}"), separates="; "
    ),
    "mistral": ToolFormat("[TOOL_CALLS]", control=True, opens="[", separates=", ", closes="]"),
}


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """begin, end: around it. open: the prompt has written `begin` already."""

    begin: str
    end: str
    open: bool = False


REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = {
    "think": ReasoningFormat("<think>", "</think>"),
    "think-open": ReasoningFormat("<think>", "</think>", open=True),
}


def calls_grammar(form: ToolFormat, tools: Mapping[str, object], *, parallel: bool) -> str:
    """Lark for an answer that is calls of these tools alone: name -> JSON Schema of its arguments."""
    options = {"whitespace_flexible": False}
    rules = []
    for number, (name, schema) in enumerate(tools.items()):
        before, after = form.call
        given = {**(schema if isinstance(schema, dict) else {}), "x-guidance": options}
        rules.append(
            f"call_{number}: {_literal(before % json.dumps(name))} arguments_{number} {_literal(after)}\n"
            f"arguments_{number}: %json {json.dumps(given)}"
        )
    one = " | ".join(f"call_{number}" for number in range(len(tools)))
    more = f" ({_literal(form.separates)} call)*" if parallel else ""
    around = [f"{_literal(text)} " if text else "" for text in (form.opens, form.closes)]
    return "\n".join((f"start: {around[0]}call{more} {around[1]}".rstrip(), f"call: {one}", *rules))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class SpeechReader:
    """One answer's text to its parts.

    tools: None takes calls for content. forced: the answer is calls and nothing else. draw_id: the id of a call.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        tools: ToolFormat | None,
        *,
        forced: bool = False,
        draw_id: Callable[[], str],
    ) -> None:
        self._reasoning = None if reasoning is None else _ReasoningReader(reasoning)
        self._tools = None if tools is None else _ToolReader(tools, forced, draw_id)

    @property
    def calls(self) -> int:
        return 0 if self._tools is None else self._tools.calls

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = [Content(text)] if text else []
        if self._reasoning is not None:
            parts = self._reasoning.push(text)
        return self._with_calls(parts)

    def finish(self) -> list[Part]:
        """What was held back."""
        parts = self._with_calls([] if self._reasoning is None else self._reasoning.finish())
        return parts if self._tools is None else parts + self._tools.finish()

    def _with_calls(self, parts: list[Part]) -> list[Part]:
        if self._tools is None:
            return parts
        read: list[Part] = []
        for part in parts:
            read += self._tools.push(part.text) if isinstance(part, Content) else [part]
        return read


def held_back(text: str, marker: str) -> int:
    """How many of the last characters may be the beginning of a marker."""
    for count in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:count]):
            return count
    return 0


class _ReasoningReader:
    """At the start white space, then perhaps `begin`; inside up to `end`; behind it all is content."""

    def __init__(self, form: ReasoningFormat) -> None:
        self._form = form
        self._held = ""
        self._inside = form.open
        self._behind = False
        self._strips = form.open  # white space that follows a marker is the form's, not the text's

    def push(self, text: str) -> list[Part]:
        self._held += text
        if self._behind:
            return self._content()
        if not self._inside:
            seen = self._held.lstrip()
            if seen.startswith(self._form.begin):
                self._held, self._inside, self._strips = seen[len(self._form.begin) :], True, True
            elif self._form.begin.startswith(seen):
                return []  # may still become one
            else:
                self._behind = True
                return self._content()
        before, marker, after = self._held.partition(self._form.end)
        if marker:
            parts = self._reasoned(before)
            self._held, self._behind, self._strips = after, True, True
            return parts + self._content()
        keep = held_back(self._held, self._form.end)
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return self._reasoned(ready)

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if not held:
            return []
        return self._reasoned(held) if self._inside and not self._behind else [Content(held)]

    def _reasoned(self, text: str) -> list[Part]:
        text = self._stripped(text)
        return [Reasoning(text)] if text else []

    def _content(self) -> list[Part]:
        text, self._held = self._stripped(self._held), ""
        return [Content(text)] if text else []

    def _stripped(self, text: str) -> str:
        if self._strips:
            text = text.lstrip()
            self._strips = not text
        return text


class _ToolReader:
    """Content until a call begins; calls; content again behind them.

    `_raw` is what would be content if no call came.
    """

    def __init__(self, form: ToolFormat, forced: bool, draw_id: Callable[[], str]) -> None:
        self._form = form
        self._draw_id = draw_id
        self._held = ""
        self._raw = ""
        self._scanner: CallScanner | None = None
        self._in_calls = forced and not form.end  # what ends each call begins each, too
        self._at_start = True
        self.calls = 0

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._held:
            found = self._advance()
            if found is None:
                break
            parts += found
        return parts

    def finish(self) -> list[Part]:
        scanner = self._scanner
        if scanner is not None and scanner.name is not None and scanner.begun:
            return []  # cut off in the middle of its arguments
        text = self._raw + self._held
        self._raw = self._held = ""
        between = " \t\r\n[],;" if self._in_calls else None  # None: white space
        if self.calls and not text.strip(between):
            return []
        return [Content(text)] if text else []

    def _advance(self) -> list[Part] | None:
        """None: more text is needed to go on."""
        if self._scanner is not None:
            return self._scan(self._scanner)
        return self._between() if self._in_calls else self._look()

    def _look(self) -> list[Part] | None:
        """For the beginning of calls."""
        form = self._form
        if self._at_start and form.bare:
            seen = self._held.lstrip()
            if not seen:
                return None
            if seen.startswith("{"):
                self._at_start, self._in_calls = False, True
                return []
        before, marker, after = self._held.partition(form.begin)
        if marker:
            self._held, self._raw, self._in_calls, self._at_start = after, marker, True, False
            if self.calls and not before.strip():
                before = ""
            return [Content(before)] if before else []
        keep = held_back(self._held, form.begin)
        if self.calls:  # white space between two calls is the form's
            keep = max(keep, len(self._held) - len(self._held.rstrip()))
            if self._held[: len(self._held) - keep].strip() == "":
                keep = len(self._held)
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._at_start = self._at_start and not ready.strip()
        return [Content(ready)] if ready else None

    def _between(self) -> list[Part] | None:
        """In calls, outside of each."""
        first = self._held[0]
        if first == "{":
            self._scanner = CallScanner()
            return []
        if first.isspace() or first in "[],;":
            self._raw, self._held = self._raw + first, self._held[1:]
            return []
        end = self._form.end
        if end and self._held.startswith(end):
            self._held, self._in_calls = self._held[len(end) :], False
            if self._raw.startswith(self._form.begin) and not self.calls:
                return self._give_up(end)
            self._raw = ""
            return []
        if end and end.startswith(self._held):
            return None
        if not self.calls or self._raw.startswith(self._form.begin):
            return self._give_up("")
        self._in_calls, self._raw = False, ""
        return []

    def _give_up(self, more: str) -> list[Part]:
        text, self._raw, self._in_calls = self._raw + more, "", False
        return [Content(text)] if text else []

    def _scan(self, scanner: CallScanner) -> list[Part]:
        used = scanner.push(self._held)
        self._raw, self._held = self._raw + self._held[:used], self._held[used:]
        parts: list[Part] = []
        if scanner.name is not None and scanner.begun:
            if not scanner.told:
                scanner.told = True
                parts.append(CallBegin(self.calls, self._draw_id(), scanner.name))
                self.calls += 1
            arguments = scanner.take()
            if arguments:
                parts.append(CallArguments(self.calls - 1, arguments))
        if scanner.broken or (scanner.done and not scanner.told):
            self._scanner = None
            return parts if scanner.told else self._give_up("")
        if scanner.done:
            self._scanner, self._raw = None, ""
        return parts
