"""Text to token ids and back, for one model's vocabulary.

Owns the `tokenizers` object and the rule of who may write a control token: only text that the server itself
composed (a chat template's own words), never text that a user sent. The engine is therefore built without
the control tokens; they are found by a pattern of their own, and only where a segment allows it. Knows no
file, no request and no clock. Invariant: `token_bytes` joined over ids is what `decode` decodes, and no id
of a control token comes out of text that is not allowed to hold one.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, processors

from services.tokenizer.engines import ENGINES
from services.tokenizer.invalid import InvalidText, InvalidTokenizer, require_scalar_values
from services.tokenizer.vocabulary import SpacePrefix, TokenType, Vocabulary, read_vocabulary

_SPECIAL = frozenset({TokenType.CONTROL, TokenType.UNKNOWN})


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of prompt text; control tokens written in it are parsed only if `is_control_allowed`."""

    text: str
    is_control_allowed: bool


def load_tokenizer(metadata: Mapping[str, object]) -> "TextModel":
    """Build the tokenizer that a GGUF file's metadata describes.

    Raises:
        InvalidTokenizer: the metadata is malformed, or of a kind that is not supported; names the key.
    """
    return TextModel(read_vocabulary(metadata))


class TextModel:
    """Encodes and decodes with one vocabulary. Immutable; may be used from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._kind = ENGINES[vocabulary.model]
        self._bytes = tuple(map(self._kind.token_bytes, vocabulary.tokens, vocabulary.types))
        self._engine = self._kind.make(vocabulary)
        self._control_ids = {
            text: i for i, text in enumerate(vocabulary.tokens) if vocabulary.types[i] is TokenType.CONTROL
        }
        self._control = control_pattern(self._control_ids)
        self.hash = vocabulary.fingerprint()

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    @property
    def bos_id(self) -> int | None:
        return self._vocabulary.bos_id

    @property
    def eos_id(self) -> int | None:
        return self._vocabulary.eos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends generation, the metadata's EOS first.

        These are `eos_token_id`, `eot_token_id`, `eom_token_id` and the control tokens whose text is in
        `END_OF_GENERATION_TEXTS`: a chat model that writes the end of a document has ended, too.
        """
        return self._vocabulary.eos_ids

    @property
    def adds(self) -> tuple[bool, bool]:
        """Whether encoding puts BOS before a text, and EOS after it."""
        return self._vocabulary.add_bos, self._vocabulary.add_eos

    def other_types(self) -> dict[str, list[int]]:
        """Ids by the name of their type, of the types that `to_json` has no word for."""
        plain = (TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED)
        found: dict[str, list[int]] = {}
        for index, kind in enumerate(self._vocabulary.types):
            if kind not in plain:
                found.setdefault(kind.name, []).append(index)
        return found

    @property
    def control_tokens(self) -> tuple[str, ...]:
        return tuple(self._control_ids)

    @property
    def notes(self) -> tuple[str, ...]:
        """Defaults that were taken because the file is silent; the shell logs them once."""
        return self._vocabulary.notes

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary writes it (byte-level alphabet for normal tokens)."""
        return self._vocabulary.tokens[self._checked(token_id)]

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token; of a control or user-defined token, its text in UTF-8.

        Raises:
            InvalidText: the id is outside the vocabulary.
        """
        return self._bytes[self._checked(token_id)]

    def drawn_bytes(self, token_id: int) -> bytes:
        """As `token_bytes`, of an id that a model drew. Models pad their logits: an id beyond the vocabulary may be
        drawn, and has no text."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def is_special(self, token_id: int) -> bool:
        """Whether the token is no part of the text (control, unknown, or beyond the vocabulary)."""
        types = self._vocabulary.types
        return token_id >= len(types) or types[token_id] in _SPECIAL

    def encode(self, text: str, *, add_special: bool, parse_control: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: any Unicode text, the empty one too.
            add_special: put BOS before and EOS after, where the model wants them; never a second time.
            parse_control: control tokens written in the text become their ids.

        Raises:
            InvalidText: a lone surrogate, or a character whose bytes the vocabulary lacks.
        """
        ids = self.encode_segments((Segment(text, parse_control),), add_special=add_special)
        eos = self._vocabulary.eos_id
        if add_special and self._vocabulary.add_eos and eos is not None and ids[-1:] != [eos]:
            ids.append(eos)
        return ids

    def encode_segments(self, segments: Iterable[Segment], *, add_special: bool) -> list[int]:
        """Token ids of a composed prompt. Text between two control tokens is encoded in one piece, whatever
        segments it came from, so that ids equal those of the whole text wherever nobody smuggles.

        `add_special` puts BOS first unless the segments begin with it. EOS is never appended: the model is
        to go on from here.

        Raises:
            InvalidText: as `encode`.
        """
        ids: list[int] = []
        plain: list[str] = []
        for piece, control_id in self._pieces(segments):
            if control_id is None:
                plain.append(piece)
                continue
            ids += self._encode_plain("".join(plain), is_first=not ids)
            plain.clear()
            ids.append(control_id)
        ids += self._encode_plain("".join(plain), is_first=not ids)
        bos = self._vocabulary.bos_id
        if add_special and self._vocabulary.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True, *, is_continued: bool = False) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD as in `bytes.decode(errors="replace")`.

        Args:
            ids: of a whole text: the space that encoding put before it is left out again.
            skip_special: leave special tokens out.
            is_continued: text stands before these ids (they are an answer), so every space is the text's own.

        Raises:
            InvalidText: an id is outside the vocabulary.
        """
        kept = [i for i in map(self._checked, ids) if not (skip_special and self.is_special(i))]
        data = b"".join(map(self.token_bytes, kept))
        if self._vocabulary.prefix is not SpacePrefix.NEVER and not is_continued:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """The tokenizer in the JSON form of the `tokenizers` library, control tokens and BOS included."""
        vocabulary = self._vocabulary
        whole = self._kind.whole(vocabulary)
        whole.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in self._control_ids])
        before, after = [], []
        if vocabulary.add_bos and vocabulary.bos_id is not None:
            before.append((vocabulary.tokens[vocabulary.bos_id], vocabulary.bos_id))
        if vocabulary.add_eos and vocabulary.eos_id is not None:
            after.append((vocabulary.tokens[vocabulary.eos_id], vocabulary.eos_id))
        if before or after:
            names = [text for text, _ in before] + ["$A"] + [text for text, _ in after]
            whole.post_processor = processors.TemplateProcessing(
                single=names, pair=[*names, "$B:1"], special_tokens=before + after
            )
        return whole.to_str()

    def _checked(self, token_id: int) -> int:
        if not 0 <= token_id < len(self._bytes):
            raise InvalidText("token_ids", f"{token_id} is outside the vocabulary of {len(self._bytes)}")
        return token_id

    def _pieces(self, segments: Iterable[Segment]) -> Iterator[tuple[str, int | None]]:
        for segment in segments:
            if not segment.is_control_allowed:
                yield segment.text, None
                continue
            for piece, is_control in split_control(self._control, segment.text):
                yield piece, self._control_ids[piece] if is_control else None

    def _encode_plain(self, text: str, *, is_first: bool) -> list[int]:
        if not text:
            return []
        require_scalar_values("text", text)
        return self._engine.encode(text, is_first=is_first)


def control_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds the leftmost and longest of the tokens; matches nothing where there are none.

    Common beginnings are factored out, so that a text costs its length, not its length times the tokens.
    """
    texts = sorted(set(tokens))
    try:
        return re.compile(_factored(texts) if texts else r"(?!)")
    except RecursionError:
        raise InvalidTokenizer("tokenizer.ggml.tokens", "the control tokens nest too deeply") from None


def _factored(texts: list[str]) -> str:
    branches = []
    rest = [text for text in texts if text]
    while rest:
        group = [text for text in rest if text[0] == rest[0][0]]
        rest = rest[len(group) :]
        shared = 0
        shortest = min(map(len, group))
        while shared < shortest and len({text[shared] for text in group}) == 1:
            shared += 1
        tails = [text[shared:] for text in group]
        branches.append(re.escape(group[0][:shared]) + (_factored(tails) if tails != [""] else ""))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in texts else "")


def split_control(pattern: re.Pattern[str], text: str) -> Iterator[tuple[str, bool]]:
    """The text in order as (piece, is a control token); pieces joined are the text, none is empty."""
    end = 0
    for match in pattern.finditer(text):
        if match.start() > end:
            yield text[end : match.start()], False
        yield match.group(), True
        end = match.end()
    if end < len(text):
        yield text[end:], False
