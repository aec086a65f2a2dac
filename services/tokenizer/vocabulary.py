"""The vocabulary that a GGUF file describes, checked entry by entry.

Owns reading and validating `tokenizer.ggml.*`; knows no tokenizing. The metadata comes from a file that
nobody vouches for: every type, length and reference is checked before it is used. Invariant: a `Vocabulary`
that exists has unique texts, merges whose two parts and result are tokens, and ids inside its range.
"""

import hashlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from services.tokenizer import metadata as read
from services.tokenizer.charsmap import check_charsmap
from services.tokenizer.invalid import InvalidTokenizer
from services.tokenizer.merges import merges_by_score
from services.tokenizer.metadata import PREFIX
from services.tokenizer.pretokenizers import PRE_TOKENIZERS, canonical_name

MAX_TOKENS = 1 << 20
MAX_MERGES = 1 << 21
MAX_CONTROL_TOKENS = 1 << 14
MAX_CONTROL_CHARS = 128
MAX_CHARSMAP_BYTES = 1 << 22
MAX_PIECE_CHARS = 1 << 24  # of all pieces together, where merges are found by trying every cut


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type` as the GGUF specification numbers it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class SpacePrefix(StrEnum):
    """Where a space is put before text: nowhere, before each stretch between special tokens, or before the first
    character of all alone."""

    NEVER = "never"
    ALWAYS = "always"
    FIRST = "first"


# Control tokens that end a turn or a document by the convention of the families served here, even where a
# file's metadata names only one of them as EOS. They count only if the file types them as control.
END_OF_GENERATION_TEXTS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|end|>",
        "</s>",
        "<end_of_turn>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model, and the rules that make ids of text.

    Attributes:
        model: row name in `engines.ENGINES`: gpt2 (byte-level BPE), llama (SentencePiece BPE), t5 (unigram).
        tokens: text of each id; where the type is NORMAL, in the byte-level alphabet (gpt2), or with U+2581
            for a space (llama, t5).
        types: type of each id.
        merges: pairs, by rank (gpt2, llama).
        scores: log probability of each id (t5).
        pre: row name in `PRE_TOKENIZERS` (gpt2).
        prefix: whether text begins with a space that nobody wrote (llama, t5).
        is_space_merged: runs of spaces count as one, none at the ends (t5).
        charsmap: SentencePiece's table of characters that are replaced first (t5); empty for none.
        bos_id, eos_id: as the metadata says, or None.
        unknown_id: of what the vocabulary cannot spell (llama, t5).
        eos_ids: every id that ends generation, `eos_id` first, the others ascending.
        add_bos, add_eos: whether encode puts them around a text.
        notes: what the file left open and which default was taken; for the log.
    """

    model: str
    tokens: tuple[str, ...]
    types: tuple[TokenType, ...]
    merges: tuple[tuple[str, str], ...]
    scores: tuple[float, ...]
    pre: str
    prefix: SpacePrefix
    is_space_merged: bool
    charsmap: bytes
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    add_eos: bool
    notes: tuple[str, ...]

    def fingerprint(self) -> str:
        """SHA-256 (hex) over all that decides ids and text; equal files give equal values in any process."""
        digest = hashlib.sha256(b"tercet tokenizer 1")

        def put(*values: object) -> None:
            # Lengths in front, so that no two lists of values run together to the same bytes.
            texts = list(map(str, values))
            lengths = ",".join(map(str, map(len, texts)))
            digest.update(f"{len(texts)}:{lengths};".encode() + "".join(texts).encode("utf-8"))

        if self.model != "gpt2":
            put("model", self.model, self.prefix, self.is_space_merged, self.unknown_id, self.charsmap.hex())
            digest.update(struct.pack(f"<{len(self.scores)}d", *self.scores))
        put("pre", self.pre, "flags", self.add_bos, self.add_eos, "ids", self.bos_id, self.eos_id)
        put(*self.eos_ids)
        put(*self.tokens)
        put(*map(int, self.types))
        put(*(part for pair in self.merges for part in pair))
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Rules:
    """What differs from model to model."""

    merges: tuple[tuple[str, str], ...] = ()
    scores: tuple[float, ...] = ()
    pre: str = ""
    prefix: SpacePrefix = SpacePrefix.NEVER
    is_space_merged: bool = False
    charsmap: bytes = b""
    unknown_id: int | None = None
    default_add_bos: bool = False
    default_add_eos: bool = False


@dataclass(frozen=True, slots=True)
class _Given:
    """What a model's rules are read from."""

    metadata: Mapping[str, object]
    tokens: tuple[str, ...]
    ids: Mapping[str, int]
    types: tuple[TokenType, ...]
    notes: list[str]


def read_vocabulary(metadata: Mapping[str, object]) -> Vocabulary:
    """Check the metadata of a GGUF file and return its vocabulary.

    Raises:
        InvalidTokenizer: names the key, and for an entry its index.
    """
    model = read.text(metadata, PREFIX + "model")
    if model not in _READERS:
        known = ", ".join(f"{name} ({row.description})" for name, row in _READERS.items())
        raise InvalidTokenizer(PREFIX + "model", f"{model!r} is not supported; supported: {known}")
    reader = _READERS[model]
    reader.check_pre(metadata)

    tokens = read.strings(metadata, PREFIX + "tokens", MAX_TOKENS)
    ids = _ids_by_text(tokens)
    types = _types(metadata, tokens)
    notes: list[str] = []
    rules = reader.rules(_Given(metadata, tokens, ids, types, notes))

    bos_id = read.token_id(metadata, "bos_token_id", len(tokens))
    eos_id = read.token_id(metadata, "eos_token_id", len(tokens))
    add_bos = read.flag(metadata, "add_bos_token", rules.default_add_bos, notes)
    add_eos = read.flag(metadata, "add_eos_token", rules.default_add_eos, notes)
    for wanted, token_id, name in ((add_bos, bos_id, "bos"), (add_eos, eos_id, "eos")):
        if wanted and token_id is None:
            raise InvalidTokenizer(f"{PREFIX}{name}_token_id", f"missing, though add_{name}_token is in force")
    if eos_id is None:
        notes.append(f"{PREFIX}eos_token_id is missing")

    named = (read.token_id(metadata, key, len(tokens)) for key in ("eot_token_id", "eom_token_id"))
    return Vocabulary(
        model=model,
        tokens=tokens,
        types=types,
        merges=rules.merges,
        scores=rules.scores,
        pre=rules.pre,
        prefix=rules.prefix,
        is_space_merged=rules.is_space_merged,
        charsmap=rules.charsmap,
        bos_id=bos_id,
        eos_id=eos_id,
        unknown_id=rules.unknown_id,
        eos_ids=ends_of_generation(tokens, types, eos_id, {i for i in named if i is not None}),
        add_bos=add_bos,
        add_eos=add_eos,
        notes=tuple(notes),
    )


def ends_of_generation(
    tokens: tuple[str, ...], types: tuple[TokenType, ...], eos_id: int | None, named: set[int]
) -> tuple[int, ...]:
    """EOS first, then the others that are named and those that end a turn by convention, ascending."""
    by_text = {
        index
        for index, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind is TokenType.CONTROL and text in END_OF_GENERATION_TEXTS
    }
    return (() if eos_id is None else (eos_id,)) + tuple(sorted((named | by_text) - {eos_id}))


def _pre_of_table(metadata: Mapping[str, object]) -> None:
    pre = read.text(metadata, PREFIX + "pre")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise InvalidTokenizer(PREFIX + "pre", f"{pre!r} is not supported; supported: {known}")
    if metadata.get(PREFIX + "add_space_prefix", False) is not False:
        raise InvalidTokenizer(PREFIX + "add_space_prefix", "a prefix space is not supported for model gpt2")


def _pre_default(metadata: Mapping[str, object]) -> None:
    pre = metadata.get(PREFIX + "pre", "default")
    if pre != "default":
        raise InvalidTokenizer(PREFIX + "pre", f"{pre!r:.40} is not supported for this model; supported: default")


def _gpt2_rules(given: _Given) -> _Rules:
    pre = read.text(given.metadata, PREFIX + "pre")
    return _Rules(
        merges=_merges(given.metadata, given.ids, given.types),
        pre=canonical_name(pre),
        default_add_bos=PRE_TOKENIZERS[pre].default_add_bos,
    )


def _llama_rules(given: _Given) -> _Rules:
    if given.metadata.get(PREFIX + "remove_extra_whitespaces", False) is not False:
        raise InvalidTokenizer(PREFIX + "remove_extra_whitespaces", "is not supported for model llama")
    scores = read.floats(given.metadata, PREFIX + "scores", len(given.tokens))
    size = sum(map(len, given.tokens))
    if size > MAX_PIECE_CHARS:
        raise InvalidTokenizer(PREFIX + "tokens", f"{size} characters together; at most {MAX_PIECE_CHARS}")
    spoken = {
        text: score
        for text, kind, score in zip(given.tokens, given.types, scores, strict=True)
        if kind is TokenType.NORMAL
    }
    merges = merges_by_score(spoken)
    if len(merges) > MAX_MERGES:
        raise InvalidTokenizer(PREFIX + "tokens", f"stand for {len(merges)} merges; at most {MAX_MERGES}")
    return _Rules(
        merges=merges,
        prefix=_prefix(given, default=True),
        unknown_id=_unknown_id(given),
        default_add_bos=True,
    )


def _t5_rules(given: _Given) -> _Rules:
    charsmap = read.octets(given.metadata, PREFIX + "precompiled_charsmap", MAX_CHARSMAP_BYTES)
    check_charsmap(PREFIX + "precompiled_charsmap", charsmap)
    return _Rules(
        scores=read.floats(given.metadata, PREFIX + "scores", len(given.tokens)),
        prefix=_prefix(given, default=False),
        is_space_merged=read.flag(given.metadata, "remove_extra_whitespaces", False, given.notes),
        charsmap=charsmap,
        unknown_id=_unknown_id(given),
        default_add_eos=True,
    )


def _prefix(given: _Given, *, default: bool) -> SpacePrefix:
    is_added = read.flag(given.metadata, "add_space_prefix", default, given.notes)
    return SpacePrefix.ALWAYS if is_added else SpacePrefix.NEVER


def _unknown_id(given: _Given) -> int:
    found = read.token_id(given.metadata, "unknown_token_id", len(given.tokens))
    if found is None:
        found = next((i for i, kind in enumerate(given.types) if kind is TokenType.UNKNOWN), None)
    if found is None:
        raise InvalidTokenizer(PREFIX + "unknown_token_id", "missing, and no token has the type UNKNOWN")
    return found


@dataclass(frozen=True, slots=True)
class _Reader:
    description: str
    check_pre: Callable[[Mapping[str, object]], None]
    rules: Callable[[_Given], _Rules]


_READERS: Mapping[str, _Reader] = {
    "gpt2": _Reader("byte-level BPE", _pre_of_table, _gpt2_rules),
    "llama": _Reader("SentencePiece BPE", _pre_default, _llama_rules),
    "t5": _Reader("SentencePiece unigram", _pre_default, _t5_rules),
}


def _ids_by_text(tokens: tuple[str, ...]) -> dict[str, int]:
    ids = {text: index for index, text in enumerate(tokens)}
    if len(ids) != len(tokens):
        for index, text in enumerate(tokens):
            if ids[text] != index:
                raise InvalidTokenizer(f"{PREFIX}tokens[{ids[text]}]", f"{text[:64]!r} is also token {index}")
    return ids


def _types(metadata: Mapping[str, object], tokens: tuple[str, ...]) -> tuple[TokenType, ...]:
    key = PREFIX + "token_type"
    values = read.array(metadata, key, MAX_TOKENS)
    if len(values) != len(tokens):
        raise InvalidTokenizer(key, f"has {len(values)} entries for {len(tokens)} tokens")
    known = {int(kind): kind for kind in TokenType}
    out = []
    controls = 0
    for index, value in enumerate(values):
        kind = known.get(value) if isinstance(value, int) else None
        if kind is None:
            raise InvalidTokenizer(f"{key}[{index}]", f"{value!r} is no token type (1 to 6)")
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED):
            controls += 1
            if not 0 < len(tokens[index]) <= MAX_CONTROL_CHARS:
                raise InvalidTokenizer(
                    f"{PREFIX}tokens[{index}]",
                    f"a control or user-defined token has 1 to {MAX_CONTROL_CHARS} characters",
                )
        if kind is TokenType.BYTE and byte_value(tokens[index]) is None:
            raise InvalidTokenizer(f"{PREFIX}tokens[{index}]", "a byte token is written <0xHH>")
        out.append(kind)
    if controls > MAX_CONTROL_TOKENS:
        raise InvalidTokenizer(key, f"{controls} control and user-defined tokens; at most {MAX_CONTROL_TOKENS}")
    return tuple(out)


def byte_value(text: str) -> int | None:
    """The byte that a token written `<0xHH>` stands for, else None."""
    if len(text) != 6 or not text.startswith("<0x") or text[5] != ">":
        return None
    digits = text[3:5]
    return int(digits, 16) if all(c in "0123456789abcdefABCDEF" for c in digits) else None


def _merges(
    metadata: Mapping[str, object], ids: Mapping[str, int], types: tuple[TokenType, ...]
) -> tuple[tuple[str, str], ...]:
    key = PREFIX + "merges"
    out: list[tuple[str, str]] = []
    spoken = {TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED}
    for index, value in enumerate(read.array(metadata, key, MAX_MERGES)):
        parts = value.split(" ") if isinstance(value, str) else []
        if len(parts) != 2 or not all(parts):
            raise InvalidTokenizer(f"{key}[{index}]", f"{value!r:.80} is not two parts with one space between")
        left, right = parts
        for part in (left, right, left + right):
            token_id = ids.get(part)
            if token_id is None:
                raise InvalidTokenizer(f"{key}[{index}]", f"{part[:64]!r} is not a token")
            if types[token_id] not in spoken:
                # Ordinary text could then become a control token.
                raise InvalidTokenizer(f"{key}[{index}]", f"{part[:64]!r} is a {types[token_id].name} token")
        out.append((left, right))
    if len(set(out)) != len(out):
        raise InvalidTokenizer(key, "lists a pair twice")
    return tuple(out)
