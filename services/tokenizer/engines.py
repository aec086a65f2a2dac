"""A vocabulary's rules as objects of the `tokenizers` library: one row per `tokenizer.ggml.model`.

Owns how each model cuts text, what the bytes of its tokens are, and the form that other tools read. An engine for
serving can't produce a control token: it does not hold one, or holds it under a name that no text has. Invariant:
an engine never changes; several threads may use it.
"""

import os
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

from services.tokenizer.invalid import InvalidText
from services.tokenizer.pretokenizers import PRE_TOKENIZERS
from services.tokenizer.vocabulary import SpacePrefix, TokenType, Vocabulary, byte_value

SPACE = "\u2581"  # stands for a space in SentencePiece's pieces

_SPOKEN = frozenset({TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED})


class Engine(Protocol):
    """Encodes text in which no control token is looked for."""

    def encode(self, text: str, *, is_first: bool) -> list[int]:
        """Ids of a stretch that is not empty. is_first: nothing stands before it.

        Raises:
            InvalidText: a character whose bytes the vocabulary lacks.
        """


@dataclass(frozen=True, slots=True)
class EngineKind:
    """
    Attributes:
        make: the engine that serves.
        whole: the same with control tokens, and without a post-processor, for other tools.
        token_bytes: what a token of such a text and type adds to the decoded bytes.
    """

    make: Callable[[Vocabulary], Engine]
    whole: Callable[[Vocabulary], Tokenizer]
    token_bytes: Callable[[str, TokenType], bytes]


class ByteLevelEngine:
    """GPT-2's kind: every byte has a character, and merges start from those."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        spoken = [i for i, kind in enumerate(vocabulary.types) if kind in _SPOKEN]
        self._engine = _byte_level(vocabulary, (vocabulary.tokens[i] for i in spoken), spoken)
        self._nfc = PRE_TOKENIZERS[vocabulary.pre].nfc
        texts = {vocabulary.tokens[i] for i in spoken}
        self._known_bytes = bytes(b for b, char in enumerate(_ALPHABET) if char in texts)

    def encode(self, text: str, *, is_first: bool) -> list[int]:
        if len(self._known_bytes) < 256:
            self._require_known_bytes(text)
        return _encode(self._engine, text).ids

    def _require_known_bytes(self, text: str) -> None:
        # Some vocabularies lack rare bytes, and the library would drop them without a word.
        data = (unicodedata.normalize("NFC", text) if self._nfc else text).encode("utf-8")
        missing = data.translate(None, delete=self._known_bytes)
        if missing:
            position = len(data[: data.index(missing[0])].decode("utf-8", errors="ignore"))
            raise InvalidText(
                "text",
                f"character {position} needs byte 0x{missing[0]:02x}, which this model's vocabulary lacks",
            )


class PieceEngine:
    """SentencePiece BPE: characters are merged by score; one that is no piece becomes its bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        names = {i: _piece_name(vocabulary, i) for i in range(len(vocabulary.tokens))}
        spoken = {i: name for i, name in names.items() if name is not None}
        assert vocabulary.unknown_id is not None
        self._engine = _piece_level(vocabulary, spoken, _UNKNOWN)
        self._first = _first(vocabulary)

    def encode(self, text: str, *, is_first: bool) -> list[int]:
        return _encode(self._engine, self._first(text, is_first)).ids


class UnigramEngine:
    """SentencePiece unigram: the most probable pieces; what is in none becomes its bytes, or the unknown token.

    The library would find `<0x41>` in a text as the byte, so bytes are put in here and not there.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        names = [_unigram_name(vocabulary, i) for i in range(len(vocabulary.tokens))]
        scores = [
            score if kind is TokenType.NORMAL else 0.0
            for score, kind in zip(vocabulary.scores, vocabulary.types, strict=True)
        ]
        self._engine = _unigram(vocabulary, names, scores, has_byte_fallback=False)
        self._first = _first(vocabulary)
        self._unknown_id = vocabulary.unknown_id
        self._bytes = _byte_ids(vocabulary)

    def encode(self, text: str, *, is_first: bool) -> list[int]:
        written = self._first(text, is_first)
        ids = _encode(self._engine, written).ids
        if self._unknown_id not in ids or len(self._bytes) < 256:
            return ids
        # The fast form does not keep what each piece was.
        encoding = self._engine.encode_batch([written], add_special_tokens=False)[0]
        out: list[int] = []
        for token_id, piece in zip(ids, encoding.tokens, strict=True):
            if token_id == self._unknown_id:
                out += map(self._bytes.__getitem__, piece.encode("utf-8"))
            else:
                out.append(token_id)
        return out


class _Encoding(Protocol):
    @property
    def ids(self) -> list[int]: ...

    @property
    def tokens(self) -> list[str]: ...


def _encode(engine: Tokenizer, text: str) -> _Encoding:
    # As a batch of one: `encode` keeps the interpreter's lock for as long as it takes, a second for a megabyte.
    found: _Encoding = engine.encode_batch_fast([text], add_special_tokens=False)[0]
    return found


def encode_in_the_callers_thread() -> None:
    """To be called where a process starts: without it a batch goes through the library's own pool of threads, where a
    short text waits for long ones."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _byte_level(vocabulary: Vocabulary, texts: Iterable[str], ids: Iterable[int]) -> Tokenizer:
    kind = PRE_TOKENIZERS[vocabulary.pre]
    model = BPE(
        vocab=dict(zip(texts, ids, strict=True)),
        merges=list(vocabulary.merges),
        ignore_merges=kind.ignore_merges,
    )
    engine = Tokenizer(model)
    if kind.nfc:
        engine.normalizer = normalizers.NFC()
    engine.pre_tokenizer = kind.build()
    engine.decoder = decoders.ByteLevel()
    return _with_user_defined(engine, vocabulary)


def _piece_level(vocabulary: Vocabulary, names: Mapping[int, str], unknown: str) -> Tokenizer:
    model = BPE(
        vocab={name: i for i, name in names.items()},
        merges=list(vocabulary.merges),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=len(_byte_ids(vocabulary)) == 256,
    )
    engine = Tokenizer(model)
    engine.normalizer = _space_rules(vocabulary, [])
    engine.decoder = _piece_decoder(vocabulary)
    return _with_user_defined(engine, vocabulary)


def _unigram(vocabulary: Vocabulary, names: list[str], scores: list[float], *, has_byte_fallback: bool) -> Tokenizer:
    model = Unigram(list(zip(names, scores, strict=True)), vocabulary.unknown_id, has_byte_fallback)
    engine = Tokenizer(model)
    steps: list[normalizers.Normalizer] = []
    if vocabulary.charsmap:
        steps.append(normalizers.Precompiled(vocabulary.charsmap))
    if vocabulary.is_space_merged:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    engine.normalizer = _space_rules(vocabulary, steps)
    spoken = {text for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind in _SPOKEN}
    if SPACE in spoken and not any(SPACE in text[1:] for text in spoken):
        # No piece goes over the beginning of a word, so each word can be cut by itself, and known ones are remembered.
        engine.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=True)
    engine.decoder = _piece_decoder(vocabulary)
    return _with_user_defined(engine, vocabulary)


def _space_rules(vocabulary: Vocabulary, steps: list[normalizers.Normalizer]) -> normalizers.Normalizer:
    if vocabulary.prefix is SpacePrefix.ALWAYS:
        steps = [*steps, normalizers.Prepend(SPACE)]
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _piece_decoder(vocabulary: Vocabulary) -> decoders.Decoder:
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.prefix is not SpacePrefix.NEVER:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _with_user_defined(engine: Tokenizer, vocabulary: Vocabulary) -> Tokenizer:
    added = [
        AddedToken(text, normalized=False, special=False)
        for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind is TokenType.USER_DEFINED
    ]
    if added:
        engine.add_tokens(added)
    return engine


def _first(vocabulary: Vocabulary) -> Callable[[str, bool], str]:
    """Puts the space before the first stretch, where the rules have it there alone."""
    if vocabulary.prefix is not SpacePrefix.FIRST:
        return lambda text, is_first: text
    users = tuple(
        text for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind is TokenType.USER_DEFINED
    )
    return lambda text, is_first: SPACE + text if is_first and not text.startswith((" ", SPACE, *users)) else text


# Names with a space: in a text each space has become SPACE before pieces are looked for.
_UNKNOWN = " unknown"


def _piece_name(vocabulary: Vocabulary, index: int) -> str | None:
    text, kind = vocabulary.tokens[index], vocabulary.types[index]
    if index == vocabulary.unknown_id:
        return _UNKNOWN
    if kind is TokenType.BYTE:
        return f"<0x{byte_value(text):02X}>"
    return text if kind in (TokenType.NORMAL, TokenType.USER_DEFINED) else None


def _unigram_name(vocabulary: Vocabulary, index: int) -> str:
    kind = vocabulary.types[index]
    is_spoken = kind in (TokenType.NORMAL, TokenType.USER_DEFINED) and index != vocabulary.unknown_id
    return vocabulary.tokens[index] if is_spoken else f" {index}"


def _byte_ids(vocabulary: Vocabulary) -> dict[int, int]:
    found = {}
    for index, kind in enumerate(vocabulary.types):
        value = byte_value(vocabulary.tokens[index]) if kind is TokenType.BYTE else None
        if value is not None:
            found[value] = index
    return found


def _whole_byte_level(vocabulary: Vocabulary) -> Tokenizer:
    return _byte_level(vocabulary, vocabulary.tokens, range(len(vocabulary.tokens)))


def _whole_pieces(vocabulary: Vocabulary) -> Tokenizer:
    assert vocabulary.unknown_id is not None
    whole = _piece_level(vocabulary, dict(enumerate(vocabulary.tokens)), vocabulary.tokens[vocabulary.unknown_id])
    return _with_first_prefix(whole, vocabulary)


def _whole_unigram(vocabulary: Vocabulary) -> Tokenizer:
    has_bytes = len(_byte_ids(vocabulary)) == 256
    whole = _unigram(vocabulary, list(vocabulary.tokens), list(vocabulary.scores), has_byte_fallback=has_bytes)
    return _with_first_prefix(whole, vocabulary)


def _with_first_prefix(whole: Tokenizer, vocabulary: Vocabulary) -> Tokenizer:
    if vocabulary.prefix is SpacePrefix.FIRST:
        is_split = whole.pre_tokenizer is not None
        whole.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=is_split)
    return whole


def _byte_alphabet() -> str:
    """The byte-level alphabet of GPT-2: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return "".join(chr(b) if b in printable else chr(next(moved)) for b in range(256))


_ALPHABET = _byte_alphabet()
# To Latin-1, one byte per character; characters outside the alphabet go where Latin-1 cannot follow.
_TO_LATIN_1 = dict.fromkeys(range(256), 0xFFFF) | {ord(char): b for b, char in enumerate(_ALPHABET)}


def _byte_level_bytes(text: str, kind: TokenType) -> bytes:
    if kind is TokenType.NORMAL:
        try:
            return text.translate(_TO_LATIN_1).encode("latin-1")
        except UnicodeEncodeError:
            return text.encode("utf-8")
    return _byte_or_text(text, kind)


def _piece_bytes(text: str, kind: TokenType) -> bytes:
    if kind is TokenType.NORMAL:
        return text.replace(SPACE, " ").encode("utf-8")
    return _byte_or_text(text, kind)


def _byte_or_text(text: str, kind: TokenType) -> bytes:
    value = byte_value(text) if kind is TokenType.BYTE else None
    return text.encode("utf-8") if value is None else bytes([value])


ENGINES: Mapping[str, EngineKind] = {
    "gpt2": EngineKind(ByteLevelEngine, _whole_byte_level, _byte_level_bytes),
    "llama": EngineKind(PieceEngine, _whole_pieces, _piece_bytes),
    "t5": EngineKind(UnigramEngine, _whole_unigram, _piece_bytes),
}
