"""The text of one sequence as it is generated: detokenizer and stop strings, with the ids that belong to it.

Owns which token ids a piece of text covers. Pure. A token rides with the piece that completes its text, a
token without text as soon as all before it have gone. Invariant: joined over all pieces, ids are the first
`kept_tokens` ids pushed and text is their decoding, cut at the stop string where one was found.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from services.tokenizer.detokenizer import Detokenizer
from services.tokenizer.stops import StopHit, StopMatcher


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A token not given out yet: `seen` characters were decoded when it came, `end` are its text's last."""

    token_id: int
    seen: int
    end: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A delta: text, and the ids whose text ends in it. Either may be empty, never both."""

    text: str
    token_ids: tuple[int, ...]


class TextStream:
    """Turns the ids of one sequence into pieces.

    Args:
        detokenizer: fresh, of this sequence alone.
        stops: fresh, of this sequence alone; a matcher of no strings lets all text through.
        min_tokens: stop strings that end within the first `min_tokens` tokens are ordinary text.
    """

    def __init__(self, detokenizer: Detokenizer, stops: StopMatcher, *, min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._waiting: deque[_Waiting] = deque()
        self._pushed = 0
        self._decoded = 0  # characters that came out of the detokenizer
        self._emitted = 0  # characters that came out of the matcher
        self._hit: StopHit | None = None
        self._kept: int | None = None

    @property
    def hit(self) -> StopHit | None:
        """The stop string that ended the text, once it is certain."""
        return self._hit

    @property
    def kept_tokens(self) -> int:
        """Output tokens that count: up to the one that completed the stop string, else all pushed."""
        return self._pushed if self._kept is None else self._kept

    def push(self, token_ids: Iterable[int]) -> list[Piece]:
        """Take the next ids. After a stop string was found, further ids are dropped: they were in flight."""
        texts: list[str] = []
        for token_id in token_ids:
            if self._hit is not None:
                break
            texts.append(self._push_one(token_id))
        return self._pieces("".join(texts))

    def finish(self) -> list[Piece]:
        """The sequence is at its end: give all that was held back. A second call gives nothing."""
        if self._hit is not None:
            return []
        tail = self._detokenizer.flush()
        self._decoded += len(tail)
        text, hit = self._stops.push(tail, is_armed=self._pushed > self._min_tokens)
        if hit is None:
            rest, hit = self._stops.flush()
            text += rest
        self._settle(text, hit)
        return self._pieces(text, is_last=hit is None)

    def _push_one(self, token_id: int) -> str:
        text = self._detokenizer.push((token_id,))
        self._pushed += 1
        self._decoded += len(text)
        # Bytes held back belong to a character that is still to come.
        end = self._decoded + self._detokenizer.is_mid_character
        self._waiting.append(_Waiting(token_id, self._decoded, end))
        out, hit = self._stops.push(text, is_armed=self._pushed > self._min_tokens)
        self._settle(out, hit)
        return out

    def _settle(self, text: str, hit: StopHit | None) -> None:
        self._emitted += len(text)
        if hit is None:
            return
        self._hit = hit
        gone = self._pushed - len(self._waiting)
        inside = sum(token.seen < hit.end for token in self._waiting)
        self._kept = min(gone + inside + 1, self._pushed)

    def _pieces(self, text: str, *, is_last: bool = False) -> list[Piece]:
        ids = []
        if self._hit is not None:
            count = self.kept_tokens - (self._pushed - len(self._waiting))
            ids = [self._waiting[i].token_id for i in range(count)]
            self._waiting.clear()
        while self._waiting and (is_last or self._waiting[0].end <= self._emitted):
            ids.append(self._waiting.popleft().token_id)
        return [Piece(text, tuple(ids))] if text or ids else []
