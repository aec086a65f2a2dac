"""Values of a GGUF file's tokenizer metadata, each checked before it is believed.

Owns the checks of types, lengths and ranges, and the errors' wording: key, index, limit. Knows no vocabulary.
"""

import math
from collections.abc import Mapping

from services.tokenizer.invalid import InvalidTokenizer

PREFIX = "tokenizer.ggml."
MAX_TOKEN_CHARS = 1 << 16


def text(metadata: Mapping[str, object], key: str) -> str:
    value = metadata.get(key)
    if value is None:
        raise InvalidTokenizer(key, "missing")
    if not isinstance(value, str):
        raise InvalidTokenizer(key, f"must be a string, not {type(value).__name__}")
    return value


def array(metadata: Mapping[str, object], key: str, limit: int) -> tuple[object, ...]:
    value = metadata.get(key)
    if value is None:
        raise InvalidTokenizer(key, "missing")
    if not isinstance(value, tuple):
        raise InvalidTokenizer(key, f"must be an array, not {type(value).__name__}")
    if len(value) > limit:
        raise InvalidTokenizer(key, f"has {len(value)} entries; at most {limit} are accepted")
    return value


def strings(metadata: Mapping[str, object], key: str, limit: int) -> tuple[str, ...]:
    out = []
    for index, value in enumerate(array(metadata, key, limit)):
        if not isinstance(value, str):
            raise InvalidTokenizer(f"{key}[{index}]", f"must be a string, not {type(value).__name__}")
        if len(value) > MAX_TOKEN_CHARS:
            raise InvalidTokenizer(f"{key}[{index}]", f"{len(value)} characters; at most {MAX_TOKEN_CHARS}")
        if not value.isascii() and not _is_unicode(value):
            raise InvalidTokenizer(f"{key}[{index}]", "is not valid Unicode text")
        out.append(value)
    if not out:
        raise InvalidTokenizer(key, "is empty")
    return tuple(out)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def token_id(metadata: Mapping[str, object], name: str, count: int) -> int | None:
    key = PREFIX + name
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        raise InvalidTokenizer(key, f"{value!r:.40} is not a token id below {count}")
    return value


def flag(metadata: Mapping[str, object], name: str, default: bool, notes: list[str]) -> bool:
    key = PREFIX + name
    value = metadata.get(key)
    if value is None:
        notes.append(f"{key} is missing; taken as {str(default).lower()}")
        return default
    if not isinstance(value, bool):
        raise InvalidTokenizer(key, f"must be a boolean, not {type(value).__name__}")
    return value


def floats(metadata: Mapping[str, object], key: str, count: int) -> tuple[float, ...]:
    values = array(metadata, key, count)
    if len(values) != count:
        raise InvalidTokenizer(key, f"has {len(values)} entries for {count} tokens")
    for index, value in enumerate(values):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidTokenizer(f"{key}[{index}]", f"{value!r:.40} is no finite number")
    return tuple(map(float, values))  # type: ignore[arg-type]


def octets(metadata: Mapping[str, object], key: str, limit: int) -> bytes:
    """An array of bytes, signed or not; empty where the key is missing."""
    if metadata.get(key) is None:
        return b""
    values = array(metadata, key, limit)
    for index, value in enumerate(values):
        if not isinstance(value, int) or not -128 <= value < 256:
            raise InvalidTokenizer(f"{key}[{index}]", f"{value!r:.40} is no byte")
    return bytes(value & 0xFF for value in values)  # type: ignore[operator]
