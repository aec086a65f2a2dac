"""One answer on its way out: token ids in, text deltas out, and where it ends.

Owns the rules that join stop ids, stop strings, logprobs and the reason of the end. Pure.
Invariant: the ids of all deltas are the first `kept_tokens` ids taken in, each with its own logprobs.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.tokenizer.detokenizer import Detokenizer
from services.tokenizer.stops import StopMatcher
from services.tokenizer.stream import Piece, TextStream
from services.tokenizer.text import TextModel
from tercet.v1 import common_pb2, tokenizer_pb2


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """What of the request shapes the text."""

    stops: tuple[str, ...]
    include_stop: bool
    keep_special: bool
    min_tokens: int
    stop_ids: frozenset[int]


class Answer:
    """Raises InvalidText for stop strings that are not allowed.

    index: its place among the answers to one prompt. matcher: fresh, of these rules; None: made here.
    """

    def __init__(
        self, model: TextModel, rules: AnswerRules, index: int = 0, matcher: StopMatcher | None = None
    ) -> None:
        self._model = model
        self._rules = rules
        self._index = index
        self._matcher = StopMatcher(rules.stops, rules.include_stop) if matcher is None else matcher
        self._stream = TextStream(
            Detokenizer(model.drawn_bytes, model.is_special, skip_special=not rules.keep_special),
            self._matcher,
            min_tokens=rules.min_tokens,
        )
        self._logprobs: deque[tokenizer_pb2.TextLogprobs] = deque()
        self._stop_id: int | None = None
        self.characters = 0

    def sibling(self, index: int) -> "Answer":
        """A fresh one under the same rules."""
        return Answer(self._model, self._rules, index, self._matcher.fresh())

    @property
    def stop_string(self) -> str | None:
        return None if self._stream.hit is None else self._stream.hit.stop

    @property
    def stop_match(self) -> str | None:
        """What ended the answer, if something that was looked for did."""
        if self.stop_string is not None:
            return self.stop_string
        return None if self._stop_id is None else self._model.drawn_bytes(self._stop_id).decode("utf-8", "replace")

    @property
    def kept_tokens(self) -> int:
        return self._stream.kept_tokens + (self._stop_id is not None and not self._rules.include_stop)

    def push(
        self, token_ids: Sequence[int], logprobs: Iterable[common_pb2.TokenLogprobs]
    ) -> list[tokenizer_pb2.TextDelta]:
        self._logprobs.extend(
            with_text(self._model, token_id, row) for token_id, row in zip(token_ids, logprobs, strict=False)
        )
        text_ids = list(token_ids)
        if token_ids and token_ids[-1] in self._rules.stop_ids and self.stop_string is None:
            self._stop_id = token_ids[-1]
            if not self._rules.include_stop:
                text_ids.pop()
        pieces = self._stream.push(text_ids)
        if self.stop_string is not None:
            self._stop_id = None
        return self._deltas(pieces)

    def finish(self) -> list[tokenizer_pb2.TextDelta]:
        """What was held back; the stop id that has no text comes last."""
        pieces = self._stream.finish()
        if self.stop_string is not None:
            self._stop_id = None
        elif self._stop_id is not None and not self._rules.include_stop:
            pieces.append(Piece("", (self._stop_id,)))
        return self._deltas(pieces)

    def _deltas(self, pieces: Iterable[Piece]) -> list[tokenizer_pb2.TextDelta]:
        deltas = []
        for piece in pieces:
            rows = [self._logprobs.popleft() for _ in piece.token_ids if self._logprobs]
            self.characters += len(piece.text)
            deltas.append(
                tokenizer_pb2.TextDelta(index=self._index, text=piece.text, token_ids=piece.token_ids, logprobs=rows)
            )
        return deltas


def with_text(model: TextModel, token_id: int, row: common_pb2.TokenLogprobs) -> tokenizer_pb2.TextLogprobs:
    """A token's logprobs with the tokens' texts and bytes."""
    return tokenizer_pb2.TextLogprobs(
        drawn=_entry(model, token_id, row.drawn), top=[_entry(model, top.token_id, top.logprob) for top in row.top]
    )


def _entry(model: TextModel, token_id: int, logprob: float) -> tokenizer_pb2.TextLogprob:
    raw = model.drawn_bytes(token_id)
    return tokenizer_pb2.TextLogprob(token_id=token_id, logprob=logprob, text=raw.decode("utf-8", "replace"), bytes=raw)
