"""Text of a request inside a chat template, kept apart from the template's own words.

Owns the mask: before a template runs, every character of a request that could be part of a control token is
exchanged for a private-use character that occurs nowhere else. Whatever the template then does (trim, slice,
join, concatenate), a control token found in the output consists of the template's characters alone, and
`unmask` gives the text back. So safety rests on the characters, not on the type; the type `Content` only
makes comparisons and searches inside a template see the text as it was sent.

Invariant: masking keeps lengths and whitespace, and `unmask(mask(x)) == x`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

from services.tokenizer.invalid import InvalidText

_PRIVATE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))

JsonValue = str | int | float | bool | None | list["JsonValue"] | dict[str, "JsonValue"]


class Mask:
    """One rendering's exchange of characters.

    Args:
        risky: the characters to exchange: those that control tokens are made of.
        taken: all text that takes part; its private-use characters are avoided.
        charge: told of the characters that each operation on masked text looks at.

    Raises:
        InvalidText: the request uses up the private-use characters.
    """

    def __init__(self, risky: str, taken: Iterable[str], charge: Callable[[int], None]) -> None:
        used = {ord(char) for text in taken if not text.isascii() for char in set(text) if char >= "\U000f0000"}
        free = (code for block in _PRIVATE for code in block if code not in used)
        # Whitespace stays, so that a template may trim; a control token is never whitespace alone.
        chars = [char for char in dict.fromkeys(risky) if not char.isspace()]
        codes = [code for code, _ in zip(free, chars, strict=False)]
        if len(codes) < len(chars):
            raise InvalidText("messages", "the text uses nearly all private-use characters of Unicode")
        self._to = {ord(char): chr(code) for char, code in zip(chars, codes, strict=True)}
        self._back = {code: char for char, code in zip(chars, codes, strict=True)}
        self.charge = charge

    def mask(self, text: str) -> "Content":
        self.charge(len(text))
        return Content(text.translate(self._to), self)

    def unmask(self, text: str) -> str:
        self.charge(len(text))
        return text.translate(self._back)

    def rewrite(self, masked: str, change: Callable[[str], str]) -> "Content":
        """Change text whose characters then have no single origin: all of it counts as the request's, unless
        none of it was."""
        plain = self.unmask(masked)
        if plain == str.__str__(masked):
            return Content(change(plain), self)
        return self.mask(change(plain))

    def mask_value(self, value: JsonValue) -> Any:
        """The same JSON value with every string masked, keys too."""
        if isinstance(value, str):
            return self.mask(value)
        if isinstance(value, list):
            return [self.mask_value(item) for item in value]
        if isinstance(value, dict):
            return {self.mask(key): self.mask_value(item) for key, item in value.items()}
        return value

    def unmask_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.unmask(value)
        if isinstance(value, list | tuple):
            return [self.unmask_value(item) for item in value]
        if isinstance(value, Mapping):
            return {self.unmask_value(key): self.unmask_value(item) for key, item in value.items()}
        return value


class Content(str):
    """Masked text that compares, hashes and searches as the text that was sent.

    Positions are those of the text, since the mask keeps lengths. What an operation cuts out stays masked.
    """

    _mask: Mask
    __slots__ = ("_mask",)

    def __new__(cls, masked: str, mask: Mask) -> "Content":
        self = super().__new__(cls, masked)
        self._mask = mask
        return self

    def _plain(self) -> str:
        return self._mask.unmask(str.__str__(self))

    def _seen(self, other: Any) -> Any:
        """An argument as the request would have written it."""
        if isinstance(other, str):
            return self._mask.unmask(other)
        if isinstance(other, tuple):
            return tuple(map(self._seen, other))
        return other

    def _cut(self, start: int, end: int) -> "Content":
        return Content(str.__getitem__(self, slice(start, end)), self._mask)

    def __str__(self) -> str:
        return self

    def __hash__(self) -> int:
        return hash(self._plain())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self._plain() == self._seen(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: str) -> bool:
        return bool(self._plain() < self._seen(other))

    def __le__(self, other: str) -> bool:
        return bool(self._plain() <= self._seen(other))

    def __gt__(self, other: str) -> bool:
        return bool(self._plain() > self._seen(other))

    def __ge__(self, other: str) -> bool:
        return bool(self._plain() >= self._seen(other))

    def __contains__(self, part: object) -> bool:
        return self._seen(part) in self._plain()

    def __add__(self, other: str) -> "Content":
        return Content(str.__add__(self, other), self._mask)

    def __radd__(self, other: str) -> "Content":
        return Content(str.__add__(str.__str__(other), self), self._mask)

    def __getitem__(self, key: SupportsIndex | slice) -> "Content":
        return Content(str.__getitem__(self, key), self._mask)

    def __iter__(self) -> Iterator[str]:
        return (Content(char, self._mask) for char in str.__iter__(self))

    def startswith(self, prefix: Any, *bounds: Any) -> bool:
        return self._plain().startswith(self._seen(prefix), *bounds)

    def endswith(self, suffix: Any, *bounds: Any) -> bool:
        return self._plain().endswith(self._seen(suffix), *bounds)

    def find(self, part: str, *bounds: Any) -> int:
        return self._plain().find(self._seen(part), *bounds)

    def rfind(self, part: str, *bounds: Any) -> int:
        return self._plain().rfind(self._seen(part), *bounds)

    def index(self, part: str, *bounds: Any) -> int:
        return self._plain().index(self._seen(part), *bounds)

    def rindex(self, part: str, *bounds: Any) -> int:
        return self._plain().rindex(self._seen(part), *bounds)

    def count(self, part: str, *bounds: Any) -> int:
        return self._plain().count(self._seen(part), *bounds)

    def strip(self, chars: str | None = None) -> "Content":
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> "Content":
        return self._cut(len(self) - len(self._plain().lstrip(self._seen(chars))), len(self))

    def rstrip(self, chars: str | None = None) -> "Content":
        return self._cut(0, len(self._plain().rstrip(self._seen(chars))))

    def removeprefix(self, prefix: str) -> "Content":
        return self._cut(len(prefix) if self.startswith(prefix) else 0, len(self))

    def removesuffix(self, suffix: str) -> "Content":
        return self._cut(0, len(self) - len(suffix) if suffix and self.endswith(suffix) else len(self))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> Any:
        if sep is None:
            return [Content(part, self._mask) for part in str.split(self, None, maxsplit)]
        return self._parts(self._plain().split(self._seen(sep), maxsplit), len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> Any:
        if sep is None:
            return [Content(part, self._mask) for part in str.rsplit(self, None, maxsplit)]
        return self._parts(self._plain().rsplit(self._seen(sep), maxsplit), len(sep))

    def splitlines(self, keepends: bool = False) -> Any:
        return [Content(part, self._mask) for part in str.splitlines(self, keepends)]

    def partition(self, sep: str) -> Any:
        return tuple(self._parts(list(self._plain().partition(self._seen(sep))), 0))

    def rpartition(self, sep: str) -> Any:
        return tuple(self._parts(list(self._plain().rpartition(self._seen(sep))), 0))

    def _parts(self, plain_parts: list[str], gap: int) -> list["Content"]:
        parts = []
        start = 0
        for part in plain_parts:
            parts.append(self._cut(start, start + len(part)))
            start += len(part) + gap
        return parts

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> "Content":
        if not old:
            return Content(str.replace(self, old, new, count), self._mask)
        return Content(str.join(new, self.split(old, count)), self._mask)

    def join(self, parts: Iterable[str]) -> "Content":
        return Content(str.join(self, parts), self._mask)

    def upper(self) -> "Content":
        return self._mask.rewrite(self, str.upper)

    def lower(self) -> "Content":
        return self._mask.rewrite(self, str.lower)

    def title(self) -> "Content":
        return self._mask.rewrite(self, str.title)

    def capitalize(self) -> "Content":
        return self._mask.rewrite(self, str.capitalize)

    def isdigit(self) -> bool:
        return self._plain().isdigit()

    def isalpha(self) -> bool:
        return self._plain().isalpha()

    def isalnum(self) -> bool:
        return self._plain().isalnum()

    def isupper(self) -> bool:
        return self._plain().isupper()

    def islower(self) -> bool:
        return self._plain().islower()
