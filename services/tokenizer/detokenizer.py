"""Token ids to text, a few at a time.

Owns the bytes of a character that is not complete yet, and nothing else. Pure: bytes of tokens come through
a function. Invariant: the deltas so far, joined, are the decoding of all bytes so far (invalid bytes become
U+FFFD as in `bytes.decode("utf-8", errors="replace")`) without a last, still incomplete UTF-8 sequence.
"""

import codecs
from collections.abc import Callable, Iterable


class Detokenizer:
    """Incremental decoding of one sequence.

    Args:
        token_bytes: the exact bytes of a token id.
        is_special: whether an id is no part of the text.
        skip_special: leave special tokens out of the text.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        is_special: Callable[[int], bool],
        *,
        skip_special: bool = True,
    ) -> None:
        self._token_bytes = token_bytes
        self._is_special = is_special
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def is_mid_character(self) -> bool:
        """Whether bytes are held back: at least one more character will come of them."""
        return bool(self._decoder.getstate()[0])

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these ids complete; possibly empty."""
        kept = (i for i in token_ids if not (self._skip_special and self._is_special(i)))
        return self._decoder.decode(b"".join(map(self._token_bytes, kept)))

    def flush(self) -> str:
        """The end of the text: U+FFFD for an incomplete sequence, else empty. A second call gives nothing."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
