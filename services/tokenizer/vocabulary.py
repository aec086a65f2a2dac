"""The vocabulary that a GGUF file describes, checked entry by entry.

Owns reading and validating `tokenizer.ggml.*`; knows no tokenizing. The metadata comes from a file that
nobody vouches for: every type, length and reference is checked before it is used. Invariant: a `Vocabulary`
that exists has unique texts, merges whose two parts and result are tokens, and ids inside its range.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from services.tokenizer.invalid import InvalidTokenizer
from services.tokenizer.pretokenizers import PRE_TOKENIZERS

MAX_TOKENS = 1 << 20
MAX_MERGES = 1 << 21
MAX_TOKEN_CHARS = 1 << 16
MAX_CONTROL_TOKENS = 1 << 14
MAX_CONTROL_CHARS = 128

_P = "tokenizer.ggml."
SUPPORTED_MODELS = ("gpt2",)


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type` as the GGUF specification numbers it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Control tokens that end a turn or a document by the convention of the families served here, even where a
# file's metadata names only one of them as EOS. They count only if the file types them as control.
END_OF_GENERATION_TEXTS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "</s>"}
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A byte-level BPE vocabulary.

    Attributes:
        tokens: text of each id, in the byte-level alphabet where the type is NORMAL.
        types: type of each id.
        merges: pairs, by rank.
        pre: row name in `PRE_TOKENIZERS`.
        bos_id, eos_id: as the metadata says, or None.
        eos_ids: every id that ends generation, `eos_id` first, the others ascending.
        add_bos, add_eos: whether encode puts them around a text.
        notes: what the file left open and which default was taken; for the log.
    """

    tokens: tuple[str, ...]
    types: tuple[TokenType, ...]
    merges: tuple[tuple[str, str], ...]
    pre: str
    bos_id: int | None
    eos_id: int | None
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

        put("pre", self.pre, "flags", self.add_bos, self.add_eos, "ids", self.bos_id, self.eos_id)
        put(*self.eos_ids)
        put(*self.tokens)
        put(*map(int, self.types))
        put(*(part for pair in self.merges for part in pair))
        return digest.hexdigest()


def read_vocabulary(metadata: Mapping[str, object]) -> Vocabulary:
    """Check the metadata of a GGUF file and return its vocabulary.

    Raises:
        InvalidTokenizer: names the key, and for an entry its index.
    """
    model = _text(metadata, _P + "model")
    if model not in SUPPORTED_MODELS:
        raise InvalidTokenizer(_P + "model", f"{model!r} is not supported; supported: gpt2 (byte-level BPE)")
    pre = _text(metadata, _P + "pre")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise InvalidTokenizer(_P + "pre", f"{pre!r} is not supported; supported: {known}")
    if metadata.get(_P + "add_space_prefix", False) is not False:
        raise InvalidTokenizer(_P + "add_space_prefix", "a prefix space is not supported for model gpt2")

    tokens = _strings(metadata, _P + "tokens", MAX_TOKENS)
    ids = _ids_by_text(tokens)
    types = _types(metadata, tokens)
    merges = _merges(metadata, ids, types)

    notes: list[str] = []
    bos_id = _id(metadata, "bos_token_id", len(tokens))
    eos_id = _id(metadata, "eos_token_id", len(tokens))
    add_bos = _flag(metadata, "add_bos_token", PRE_TOKENIZERS[pre].default_add_bos, notes)
    add_eos = _flag(metadata, "add_eos_token", False, notes)
    for wanted, token_id, name in ((add_bos, bos_id, "bos"), (add_eos, eos_id, "eos")):
        if wanted and token_id is None:
            raise InvalidTokenizer(f"{_P}{name}_token_id", f"missing, though add_{name}_token is in force")
    if eos_id is None:
        notes.append(f"{_P}eos_token_id is missing")

    named = {_id(metadata, key, len(tokens)) for key in ("eot_token_id", "eom_token_id")}
    by_text = {ids[text] for text in END_OF_GENERATION_TEXTS if text in ids}
    ends = {i for i in named if i is not None} | {i for i in by_text if types[i] is TokenType.CONTROL}
    eos_ids = (() if eos_id is None else (eos_id,)) + tuple(sorted(ends - {eos_id}))
    return Vocabulary(tokens, types, merges, pre, bos_id, eos_id, eos_ids, add_bos, add_eos, tuple(notes))


def _text(metadata: Mapping[str, object], key: str) -> str:
    value = metadata.get(key)
    if value is None:
        raise InvalidTokenizer(key, "missing")
    if not isinstance(value, str):
        raise InvalidTokenizer(key, f"must be a string, not {type(value).__name__}")
    return value


def _array(metadata: Mapping[str, object], key: str, limit: int) -> tuple[object, ...]:
    value = metadata.get(key)
    if value is None:
        raise InvalidTokenizer(key, "missing")
    if not isinstance(value, tuple):
        raise InvalidTokenizer(key, f"must be an array, not {type(value).__name__}")
    if len(value) > limit:
        raise InvalidTokenizer(key, f"has {len(value)} entries; at most {limit} are accepted")
    return value


def _strings(metadata: Mapping[str, object], key: str, limit: int) -> tuple[str, ...]:
    out = []
    for index, value in enumerate(_array(metadata, key, limit)):
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


def _ids_by_text(tokens: tuple[str, ...]) -> dict[str, int]:
    ids = {text: index for index, text in enumerate(tokens)}
    if len(ids) != len(tokens):
        for index, text in enumerate(tokens):
            if ids[text] != index:
                raise InvalidTokenizer(f"{_P}tokens[{ids[text]}]", f"{text[:64]!r} is also token {index}")
    return ids


def _types(metadata: Mapping[str, object], tokens: tuple[str, ...]) -> tuple[TokenType, ...]:
    key = _P + "token_type"
    values = _array(metadata, key, MAX_TOKENS)
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
                    f"{_P}tokens[{index}]",
                    f"a control or user-defined token has 1 to {MAX_CONTROL_CHARS} characters",
                )
        if kind is TokenType.BYTE and byte_value(tokens[index]) is None:
            raise InvalidTokenizer(f"{_P}tokens[{index}]", "a byte token is written <0xHH>")
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
    key = _P + "merges"
    out: list[tuple[str, str]] = []
    spoken = {TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED}
    for index, value in enumerate(_array(metadata, key, MAX_MERGES)):
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


def _id(metadata: Mapping[str, object], name: str, count: int) -> int | None:
    key = _P + name
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        raise InvalidTokenizer(key, f"{value!r:.40} is not a token id below {count}")
    return value


def _flag(metadata: Mapping[str, object], name: str, default: bool, notes: list[str]) -> bool:
    key = _P + name
    value = metadata.get(key)
    if value is None:
        notes.append(f"{key} is missing; taken as {str(default).lower()}")
        return default
    if not isinstance(value, bool):
        raise InvalidTokenizer(key, f"must be a boolean, not {type(value).__name__}")
    return value
