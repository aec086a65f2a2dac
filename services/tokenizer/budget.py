"""What one rendering of a chat template may cost, and what it works with.

Owns the budget of work, the bound on values and the mask of one rendering; the sandbox charges it. The time
is a value, so it knows no clock. Invariant: a value is paid for before it is made.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from services.tokenizer.invalid import TemplateFailure
from services.tokenizer.masking import Content, Mask

CHARS_PER_UNIT = 64  # of work; a unit is about one step of the interpreter
UNITS_PER_CALL = 8  # besides the template's text, all of which a call may write

_FIELD = "tokenizer.chat_template"


class Run:
    """The budget, the mask and the time of one rendering."""

    def __init__(
        self,
        *,
        work: int,
        text_chars: int,
        depth: int,
        template_chars: int,
        now: datetime | None,
    ) -> None:
        self.now = now
        self.mask = Mask("", (), self.charge)
        self._left = work
        self._text_chars = text_chars
        self._depth = depth
        self._call_chars = template_chars

    def charge(self, chars: int = 0) -> None:
        """Pay for one step that looks at so many characters."""
        self._left -= 1 + chars // CHARS_PER_UNIT
        if self._left < 0:
            raise TemplateFailure(_FIELD, "does more work than the limit allows")

    def charge_call(self) -> None:
        self.charge(self._call_chars + UNITS_PER_CALL * CHARS_PER_UNIT)

    def allow(self, size: int) -> None:
        """Pay for a value of so many characters or items before it is made."""
        if size > self._text_chars:
            raise TemplateFailure(_FIELD, f"makes a value of size {size}; the limit is {self._text_chars}")
        self.charge(size)

    def content(self, text: str) -> Content:
        return text if isinstance(text, Content) else Content(text, self.mask)

    def plain(self, value: Any) -> Any:
        """An unmasked copy of a JSON-like value, after its size and depth were checked."""
        pending = [(value, 0)]
        while pending:
            item, depth = pending.pop()
            if depth > self._depth:
                raise TemplateFailure(_FIELD, f"nests a value deeper than {self._depth}")
            self.charge(len(item) if isinstance(item, str) else 0)
            if isinstance(item, Mapping):
                pending += ((part, depth + 1) for pair in item.items() for part in pair)
            elif isinstance(item, list | tuple):
                pending += ((part, depth + 1) for part in item)
        return self.mask.unmask_value(value)

    def text(self, value: Any) -> str:
        """What a template prints for a value."""
        if isinstance(value, str):
            self.charge(len(value))
            return value
        self.charge()
        if isinstance(value, Mapping | list | tuple):
            return self.mask.mask(str(self.plain(value)))
        return str(value)

    def join(self, separator: str, parts: Iterable[Any]) -> str:
        texts = [self.text(part) for part in parts]
        self.allow(sum(map(len, texts)) + len(separator) * len(texts))
        return self.content(str.join(separator, texts))

    def replace(self, text: str, old: str, new: str, count: int = -1) -> str:
        times = text.count(old) if count < 0 else min(count, text.count(old))
        self.allow(len(text) + times * max(0, len(new) - len(old)))
        return self.content(text).replace(old, new, count)
