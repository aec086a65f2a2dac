"""SentencePiece's table of characters that are replaced before a text is cut into pieces, checked before use.

It is a 32-bit length, a double array (a trie in one array of 32-bit units), and the replacements with a zero byte
after each. The library that walks the trie believes it, so every step that it could take is checked here. Pure.
"""

import struct

from services.tokenizer.invalid import InvalidTokenizer

_LEAF = 1 << 8
_IS_VALUE = 1 << 31


def check_charsmap(field: str, data: bytes) -> None:
    """Raises InvalidTokenizer naming `field` where a walk could leave the table. Empty means none, and is right."""
    if not data:
        return
    size = struct.unpack_from("<I", data)[0] if len(data) >= 4 else 0
    if size == 0 or size % 1024 or 4 + size > len(data):
        raise InvalidTokenizer(field, f"{len(data)} bytes that hold no trie of {size}")
    units = struct.unpack_from(f"<{size // 4}I", data, 4)
    replacements = data[4 + size :]
    try:
        replacements.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidTokenizer(field, "its replacements are no UTF-8") from None
    # The array has whole blocks of 256 units, and a step changes the last eight bits of a place in a block.
    for place, unit in enumerate(units):
        if unit & _IS_VALUE:
            continue
        block = place ^ _offset(unit)
        if block | 0xFF >= len(units):
            raise InvalidTokenizer(field, f"unit {place} leads outside the trie")
        if unit & _LEAF:
            at = units[block] & ~_IS_VALUE
            if at >= len(replacements) or replacements[at] & 0xC0 == 0x80:
                raise InvalidTokenizer(field, f"unit {place} has no replacement")


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & (1 << 9)) >> 6)
