"""Bytes of a body to a JSON object, trusting nothing.

Pure. Owns what counts as JSON here: UTF-8, one object, no NaN or Infinity, no key twice, bounded depth and digits.
Every refusal is an InvalidArgument; no input makes another exception.
"""

import json
import re
from collections import Counter
from typing import Final, NoReturn

from services.errors import InvalidArgument

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]
JsonObject = dict[str, JsonValue]

MAX_DEPTH: Final = 64
MAX_INTEGER_DIGITS: Final = 40

# Possessive: a string without an end is one attempt from its quote, never a search from every place in it.
_STRING_OR_BRACKET: Final = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)


def parse_object(raw: bytes) -> JsonObject:
    """The object in `raw`. Raises InvalidArgument (reason INVALID_JSON) naming what is wrong and where."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refusal(f"the body is not UTF-8: byte {error.start} cannot be decoded") from None
    _check_depth(text)
    try:
        value = json.loads(text, parse_constant=_constant, parse_int=_integer, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise _refusal(f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    if not isinstance(value, dict):
        raise _refusal("the body must be a JSON object")
    return value


def _refusal(message: str) -> InvalidArgument:
    return InvalidArgument(message, reason="INVALID_JSON")


def _check_depth(text: str) -> None:
    """Bound the parser's recursion before it starts. Brackets inside strings don't nest."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    for token in _STRING_OR_BRACKET.finditer(text):
        if token[0] in ("[", "{"):
            depth += 1
        elif token[0] in ("]", "}"):
            depth -= 1
        if depth > MAX_DEPTH:
            message = f"the body nests deeper than {MAX_DEPTH} levels, at character {token.start()}"
            raise InvalidArgument(message, reason="INVALID_JSON", limit=MAX_DEPTH)


def _constant(name: str) -> NoReturn:
    raise _refusal(f"{name} is not JSON")


def _integer(digits: str) -> int:
    if len(digits) > MAX_INTEGER_DIGITS:
        raise InvalidArgument(
            f"an integer has {len(digits)} digits, more than {MAX_INTEGER_DIGITS}",
            reason="INVALID_JSON",
            limit=MAX_INTEGER_DIGITS,
        )
    return int(digits)


def _object(pairs: list[tuple[str, JsonValue]]) -> JsonObject:
    built = dict(pairs)
    if len(built) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _refusal(f"the key {shown(twice)} stands twice in one object")
    return built


def shown(text: str) -> str:
    """`text` quoted for a message: printable, at most 64 characters."""
    cut = text if len(text) <= 64 else text[:61] + "..."
    return json.dumps(cut)
