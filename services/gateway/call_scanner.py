"""One call of a tool, read from its JSON as it comes: {"name": ..., "arguments": {...}}, keys in any order.

Pure. Owns one object. Invariant: what `take` gave, joined, is the arguments' JSON as the model wrote it.
"""

import json
from typing import Final

ARGUMENT_KEYS: Final = ("arguments", "parameters")
MAX_CHARS: Final = 1 << 20


class CallScanner:
    """`push` from the opening brace on.

    name: once it is known. begun: something may be told, the arguments have begun or there are none. done: the object
    is closed. broken: it is no object of this kind. told: the caller's own note.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self.broken = False
        self.told = False
        self._depth = 0
        self._string: list[str] | None = None  # of the string that is open
        self._escaped = False
        self._key: str | None = None  # whose value comes, at depth 1
        self._last = ""  # the last string at depth 1
        self._expects_key = True
        self._has_arguments = False
        self._ready: list[str] = []
        self._chars = 0

    @property
    def begun(self) -> bool:
        return self._has_arguments or self.done

    def take(self) -> str:
        """Arguments since the last call."""
        text = "".join(self._ready)
        self._ready.clear()
        if self.done and not self._has_arguments:
            self._has_arguments, text = True, "{}"
        return text

    def push(self, text: str) -> int:
        """How many characters belong to the object."""
        for position, char in enumerate(text):
            self._chars += 1
            self._step(char)
            if self._chars > MAX_CHARS:
                self.broken = True
            if self.done or self.broken:
                return position + 1
        return len(text)

    @property
    def _in_arguments(self) -> bool:
        return self._key in ARGUMENT_KEYS

    def _step(self, char: str) -> None:
        if self._string is not None:
            self._in_string(self._string, char)
            return
        if char == '"':
            self._string = [char]
            if self._in_arguments and self._depth > 1:
                self._argument(char)
            return
        if char in "{[":
            self._depth += 1
            if self._depth == 1:
                return
        if self._depth == 1 and char in ",}":
            self._key, self._expects_key = None, True
            self.done = char == "}"
            return
        if self._depth == 1 and char == ":":
            self._key, self._expects_key = self._last, False
            return
        if char in "}]":
            self._depth -= 1
            if self._depth < 1:
                self.broken = True
                return
        if self._depth == 1 and self._expects_key and not char.isspace():
            self.broken = True
            return
        if self._in_arguments and not (self._depth == 1 and char.isspace()):
            self._argument(char)

    def _in_string(self, string: list[str], char: str) -> None:
        string.append(char)
        if self._in_arguments and self._depth > 1:
            self._argument(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            written, self._string = "".join(string), None
            if self._depth == 1:
                self._string_ended(written)

    def _string_ended(self, written: str) -> None:
        try:
            value = json.loads(written, strict=False)
        except ValueError:
            self.broken = True
            return
        if self._expects_key:
            self._last = value
        elif self._key == "name":
            self.name = value
        elif self._in_arguments:
            self._argument(value)

    def _argument(self, text: str) -> None:
        self._has_arguments = True
        self._ready.append(text)
