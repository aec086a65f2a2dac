"""Text to token ids and back, for one model's vocabulary.

Owns the `tokenizers` object and the rule of who may write a control token: only text that the server itself
composed (a chat template's own words), never text that a user sent. The engine is therefore built without
the control tokens; they are found by a pattern of their own, and only where a segment allows it. Knows no
file, no request and no clock. Invariant: `token_bytes` joined over ids is what `decode` decodes, and no id
of a control token comes out of text that is not allowed to hold one.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from services.tokenizer.invalid import InvalidText, InvalidTokenizer, require_scalar_values
from services.tokenizer.pretokenizers import PRE_TOKENIZERS
from services.tokenizer.vocabulary import TokenType, Vocabulary, byte_value, read_vocabulary

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
        self._bytes = tuple(map(_bytes_of, vocabulary.tokens, vocabulary.types))
        self._engine = _engine(vocabulary)
        self._control_ids = {
            text: i for i, text in enumerate(vocabulary.tokens) if vocabulary.types[i] is TokenType.CONTROL
        }
        self._control = control_pattern(self._control_ids)
        self._nfc = PRE_TOKENIZERS[vocabulary.pre].nfc
        spoken = {text for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if _is_spoken(kind)}
        self._known_bytes = bytes(b for b, char in enumerate(_ALPHABET) if char in spoken)
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

    def is_special(self, token_id: int) -> bool:
        """Whether the token is no part of the text (control or unknown)."""
        return self._vocabulary.types[self._checked(token_id)] in _SPECIAL

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
            ids += self._encode_plain("".join(plain))
            plain.clear()
            ids.append(control_id)
        ids += self._encode_plain("".join(plain))
        bos = self._vocabulary.bos_id
        if add_special and self._vocabulary.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD as in `bytes.decode(errors="replace")`.

        Raises:
            InvalidText: an id is outside the vocabulary.
        """
        kept = (i for i in ids if not (skip_special and self.is_special(i)))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """The tokenizer in the JSON form of the `tokenizers` library, control tokens and BOS included."""
        vocabulary = self._vocabulary
        whole = _assemble(vocabulary, vocabulary.tokens, range(self.vocab_size))
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

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        require_scalar_values("text", text)
        if len(self._known_bytes) < 256:
            self._require_known_bytes(text)
        ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        return ids

    def _require_known_bytes(self, text: str) -> None:
        # Some vocabularies lack rare bytes, and the engine would drop them without a word.
        data = (unicodedata.normalize("NFC", text) if self._nfc else text).encode("utf-8")
        missing = data.translate(None, delete=self._known_bytes)
        if missing:
            position = len(data[: data.index(missing[0])].decode("utf-8", errors="ignore"))
            raise InvalidText(
                "text",
                f"character {position} needs byte 0x{missing[0]:02x}, which this model's vocabulary lacks",
            )


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


def _is_spoken(kind: TokenType) -> bool:
    return kind in (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)


def _engine(vocabulary: Vocabulary) -> Tokenizer:
    """The engine for ordinary text: it cannot produce a control token, since it does not hold one."""
    spoken = [i for i, kind in enumerate(vocabulary.types) if _is_spoken(kind)]
    return _assemble(vocabulary, (vocabulary.tokens[i] for i in spoken), spoken)


def _assemble(vocabulary: Vocabulary, texts: Iterable[str], ids: Iterable[int]) -> Tokenizer:
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
    added = [
        AddedToken(text, normalized=False, special=False)
        for text, token_type in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if token_type is TokenType.USER_DEFINED
    ]
    if added:
        engine.add_tokens(added)
    return engine


def _byte_alphabet() -> str:
    """The byte-level alphabet of GPT-2: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return "".join(chr(b) if b in printable else chr(next(moved)) for b in range(256))


_ALPHABET = _byte_alphabet()
# To Latin-1, one byte per character; characters outside the alphabet go where Latin-1 cannot follow.
_TO_LATIN_1 = dict.fromkeys(range(256), 0xFFFF) | {ord(char): b for b, char in enumerate(_ALPHABET)}


def _bytes_of(text: str, kind: TokenType) -> bytes:
    if kind is TokenType.NORMAL:
        try:
            return text.translate(_TO_LATIN_1).encode("latin-1")
        except UnicodeEncodeError:
            return text.encode("utf-8")
    if kind is TokenType.BYTE:
        value = byte_value(text)
        return text.encode("utf-8") if value is None else bytes([value])
    return text.encode("utf-8")
