"""The vocabulary that a directory of Hugging Face files describes: `tokenizer.json` and what lies beside it.

Owns which of the files' rules are known, and their reading into a `Vocabulary`, so that the same tokens and rules have
the same hash whether they come from here or from GGUF. Rules are compared as a whole with those of the families: a
component with one other option is another rule, and is refused by name. Knows no file system.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Regex, normalizers, pre_tokenizers

from services.tokenizer.charsmap import check_charsmap
from services.tokenizer.invalid import InvalidTokenizer
from services.tokenizer.pretokenizers import PRE_TOKENIZERS
from services.tokenizer.vocabulary import (
    MAX_CONTROL_CHARS,
    MAX_MERGES,
    MAX_TOKENS,
    SpacePrefix,
    TokenType,
    Vocabulary,
    byte_value,
    ends_of_generation,
)

SPACE: Final = "\u2581"
TYPES_KEY: Final = "tercet_token_types"  # of tokenizer_config.json: types that the other files have no word for

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DirectoryTokenizer:
    """template: source of the chat template. context_length: tokens; None: the files do not say."""

    vocabulary: Vocabulary
    template: str | None
    context_length: int | None


@dataclass(frozen=True, slots=True)
class _Rules:
    """As far as normalizer and pre-tokenizer tell them."""

    model: str
    pre: str = ""
    prefix: SpacePrefix = SpacePrefix.NEVER
    is_space_merged: bool = False
    charsmap: bytes = b""


def read_directory(files: Mapping[str, bytes]) -> DirectoryTokenizer:
    """Files by name; `tokenizer.json` must be there.

    Raises:
        InvalidTokenizer: names file and field.
    """
    whole = _object(files, "tokenizer.json")
    config = _object(files, "tokenizer_config.json")
    shape = _object(files, "config.json")
    generation = _object(files, "generation_config.json")
    model = _part(whole, "model")
    rules = _rules(whole, model)
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise _wrong(f"model.{option}", "is not supported")

    added = _added(whole)
    listed, scores = _listed(model)
    size = max(1 + max([*listed.values(), *added], default=-1), _size(shape, config))
    if not 0 < size <= MAX_TOKENS:
        raise _wrong("model.vocab", f"has {size} tokens; 1 to {MAX_TOKENS} are accepted")
    tokens, types = _tokens(size, listed, added, rules, config)
    ids = {text: index for index, text in enumerate(tokens)}
    unknown_id = _unknown(model, ids, rules)
    if unknown_id is not None:
        types[unknown_id] = TokenType.UNKNOWN

    bos_id, eos_id = (_named(config, name, ids) for name in ("bos_token", "eos_token"))
    before, after = _around(whole.get("post_processor"), ids)
    add_bos = _flag(config, "add_bos_token", before is not None)
    add_eos = _flag(config, "add_eos_token", after is not None)
    bos_id, eos_id = bos_id if before is None else before, eos_id if after is None else after
    for wanted, token_id, name in ((add_bos, bos_id, "bos"), (add_eos, eos_id, "eos")):
        if wanted and token_id is None:
            raise InvalidTokenizer(f"tokenizer_config.json {name}_token", f"missing, though add_{name}_token is true")
    kinds = tuple(types)
    vocabulary = Vocabulary(
        model=rules.model,
        tokens=tokens,
        types=kinds,
        merges=_merges(model, ids, types) if rules.model != "t5" else (),
        scores=tuple(scores.get(index, 0.0) for index in range(size)) if rules.model == "t5" else (),
        pre=rules.pre,
        prefix=rules.prefix,
        is_space_merged=rules.is_space_merged,
        charsmap=rules.charsmap,
        bos_id=bos_id,
        eos_id=eos_id,
        unknown_id=unknown_id,
        eos_ids=ends_of_generation(tokens, kinds, eos_id, _ends(generation, size)),
        add_bos=add_bos,
        add_eos=add_eos,
        notes=(),
    )
    return DirectoryTokenizer(vocabulary, _template(files, config), _context_length(shape, config))


def _wrong(field: str, problem: str) -> InvalidTokenizer:
    return InvalidTokenizer(f"tokenizer.json {field}", problem)


def _object(files: Mapping[str, bytes], name: str) -> Json:
    """Empty where there is no such file."""
    if name not in files:
        if name == "tokenizer.json":
            raise InvalidTokenizer(name, "missing")
        return {}
    try:
        value = json.loads(files[name])
    except (ValueError, RecursionError):
        raise InvalidTokenizer(name, "is not JSON") from None
    if not isinstance(value, dict):
        raise InvalidTokenizer(name, f"must be an object, not {type(value).__name__}")
    return value


def _part(whole: Json, name: str) -> Json:
    value = whole.get(name)
    if not isinstance(value, dict):
        raise _wrong(name, "missing or no object")
    return value


def _rules(whole: Json, model: Json) -> _Rules:
    kind = model.get("type")
    normalizer, pre = (
        _steps(whole.get("normalizer"), "normalizers"),
        _steps(whole.get("pre_tokenizer"), "pretokenizers"),
    )
    if kind == "BPE" and any(step.get("type") == "ByteLevel" for step in pre):
        for name, row in PRE_TOKENIZERS.items():
            same_merges = bool(model.get("ignore_merges")) == row.ignore_merges
            nfc = [{"type": "NFC"}] if row.nfc else []
            if same_merges and normalizer == nfc and pre == _steps(_state(row.build()), "pretokenizers"):
                return _Rules("gpt2", pre=name)
        raise _wrong("pre_tokenizer", f"is that of none of the families {', '.join(PRE_TOKENIZERS)}")
    if kind == "BPE":
        for prefix, forms in _piece_forms().items():
            if (normalizer, pre) in forms:
                return _Rules("llama", prefix=prefix)
        raise _wrong("normalizer", "and pre_tokenizer are those of no SentencePiece BPE that is supported")
    if kind == "Unigram":
        return _unigram_rules(normalizer, pre)
    raise _wrong("model.type", f"{kind!r:.40} is not supported; supported: BPE, Unigram")


def _steps(component: Any, members: str) -> list[Json]:
    """A component as the list of what it does in order; options that change offsets alone are left out."""
    if component is None:
        return []
    if not isinstance(component, dict):
        raise _wrong(members, "must be an object")
    if component.get("type") == "Sequence":
        parts = component.get(members)
        if not isinstance(parts, list):
            raise _wrong(members, "must be a list")
        return [step for part in parts for step in _steps(part, members)]
    return [{key: value for key, value in component.items() if key != "trim_offsets"}]


def _state(component: Any) -> Json:
    """The JSON form that the library gives to its own object."""
    state: Json = json.loads(component.__getstate__())
    return state


def _piece_forms() -> dict[SpacePrefix, list[tuple[list[Json], list[Json]]]]:
    replaced = _steps(_state(normalizers.Replace(" ", SPACE)), "normalizers")
    prepended = _steps(_state(normalizers.Prepend(SPACE)), "normalizers")
    first = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    by_space = pre_tokenizers.Split(" ", behavior="merged_with_previous")  # finds none: they are replaced
    return {
        SpacePrefix.ALWAYS: [(prepended + replaced, [])],
        SpacePrefix.NEVER: [(replaced, []), (replaced, _steps(_state(by_space), "pretokenizers"))],
        SpacePrefix.FIRST: [(normalizer, _steps(_state(first), "pretokenizers")) for normalizer in ([], replaced)],
    }


def _unigram_rules(normalizer: list[Json], pre: list[Json]) -> _Rules:
    """The forms that `engines` writes."""
    charsmap = b""
    if normalizer and normalizer[0].get("type") == "Precompiled":
        try:
            charsmap = base64.b64decode(normalizer[0].get("precompiled_charsmap") or "", validate=True)
        except (ValueError, TypeError):
            raise _wrong("normalizer.precompiled_charsmap", "is not base 64") from None
        check_charsmap("tokenizer.json normalizer.precompiled_charsmap", charsmap)
        normalizer = normalizer[1:]
    ends, runs = (normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " "))
    merged = [_state(ends), _state(runs)]
    is_merged = normalizer[:2] == merged
    rest = normalizer[2:] if is_merged else normalizer
    replaced, prepended = _state(normalizers.Replace(" ", SPACE)), _state(normalizers.Prepend(SPACE))
    words, first, first_words = (
        _state(pre_tokenizers.Metaspace(SPACE, scheme, split))
        for scheme, split in (("never", True), ("first", False), ("first", True))
    )
    forms = {
        SpacePrefix.ALWAYS: ([prepended, replaced], ([], [words])),
        SpacePrefix.NEVER: ([replaced], ([], [words])),
        SpacePrefix.FIRST: ([replaced], ([first], [first_words])),
    }
    for prefix, (steps, cuts) in forms.items():
        if rest == steps and pre in cuts:
            return _Rules("t5", prefix=prefix, is_space_merged=is_merged, charsmap=charsmap)
    raise _wrong("normalizer", "and pre_tokenizer are those of no unigram model that is supported")


def _added(whole: Json) -> dict[int, Json]:
    found: dict[int, Json] = {}
    for index, entry in enumerate(whole.get("added_tokens") or []):
        field = f"added_tokens[{index}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise _wrong(field, "must be an object with content")
        text, token_id = entry["content"], entry.get("id")
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < MAX_TOKENS:
            raise _wrong(f"{field}.id", f"{token_id!r:.40} is not a token id below {MAX_TOKENS}")
        if not 0 < len(text) <= MAX_CONTROL_CHARS:
            raise _wrong(f"{field}.content", f"an added token has 1 to {MAX_CONTROL_CHARS} characters")
        for option in ("lstrip", "rstrip", "single_word"):
            if entry.get(option):
                raise _wrong(f"{field}.{option}", "is not supported")
        found[token_id] = entry
    return found


def _listed(model: Json) -> tuple[dict[str, int], dict[int, float]]:
    """Ids by text, and scores by id where the model has them."""
    vocab = model.get("vocab")
    if isinstance(vocab, list):
        pairs = [entry for entry in vocab if isinstance(entry, list) and len(entry) == 2]
        if len(pairs) != len(vocab) or not all(
            isinstance(text, str) and isinstance(score, int | float) for text, score in pairs
        ):
            raise _wrong("model.vocab", "must be a list of text and score")
        listed = {text: index for index, (text, _) in enumerate(pairs)}
        scores = {index: float(score) for index, (_, score) in enumerate(pairs)}
        if len(listed) != len(pairs):
            raise _wrong("model.vocab", "has a text twice")
        return listed, scores
    if not isinstance(vocab, dict) or not all(
        isinstance(index, int) and not isinstance(index, bool) and 0 <= index < MAX_TOKENS for index in vocab.values()
    ):
        raise _wrong("model.vocab", f"must be an object of ids below {MAX_TOKENS}")
    if len(set(vocab.values())) != len(vocab):
        raise _wrong("model.vocab", "has an id twice")
    return dict(vocab), {}


def _size(shape: Json, config: Json) -> int:
    """Of the model's matrices, which are often padded. 0: not told."""
    value = shape.get("vocab_size")
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _tokens(
    size: int, listed: Mapping[str, int], added: Mapping[int, Json], rules: _Rules, config: Json
) -> tuple[tuple[str, ...], list[TokenType]]:
    texts: list[str | None] = [None] * size
    types = [TokenType.UNUSED] * size
    for text, index in listed.items():
        is_byte = rules.model != "gpt2" and byte_value(text) is not None
        texts[index], types[index] = text, TokenType.BYTE if is_byte else TokenType.NORMAL
    for index, entry in added.items():
        known = texts[index]
        if known is not None and known != entry["content"]:
            raise _wrong("added_tokens", f"id {index} is also {known[:64]!r}")
        texts[index] = entry["content"]
        types[index] = TokenType.CONTROL if entry.get("special") else TokenType.USER_DEFINED
    tokens = tuple(f"[PAD{index}]" if text is None else text for index, text in enumerate(texts))
    if len(set(tokens)) != size:
        raise _wrong("model.vocab", "two ids have one text")
    for name, indices in _object_of_lists(config.get(TYPES_KEY, {})).items():
        for index in indices:
            if name not in TokenType.__members__ or not isinstance(index, int) or not 0 <= index < size:
                raise InvalidTokenizer(f"tokenizer_config.json {TYPES_KEY}.{name:.40}", "is not known, or not its ids")
            types[index] = TokenType[name]
    return tokens, types


def _object_of_lists(value: Any) -> dict[str, list[Any]]:
    if not isinstance(value, dict) or not all(isinstance(part, list) for part in value.values()):
        raise InvalidTokenizer(f"tokenizer_config.json {TYPES_KEY}", "must be an object of lists")
    return value


def _unknown(model: Json, ids: Mapping[str, int], rules: _Rules) -> int | None:
    if rules.model == "gpt2":
        return None
    named = model.get("unk_id") if rules.model == "t5" else ids.get(str(model.get("unk_token")))
    if not isinstance(named, int) or named not in ids.values():
        raise _wrong("model", "names no unknown token")
    return named


def _merges(model: Json, ids: Mapping[str, int], types: Sequence[TokenType]) -> tuple[tuple[str, str], ...]:
    merges = model.get("merges")
    if not isinstance(merges, list) or len(merges) > MAX_MERGES:
        raise _wrong("model.merges", f"must be a list of at most {MAX_MERGES}")
    out = []
    spoken = {TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED}
    for index, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise _wrong(f"model.merges[{index}]", f"{merge!r:.80} is not two texts")
        for part in (*pair, "".join(pair)):
            if part not in ids or types[ids[part]] not in spoken:
                raise _wrong(f"model.merges[{index}]", f"{part[:64]!r} is no token that text may become")
        out.append((pair[0], pair[1]))
    if len(set(out)) != len(out):
        raise _wrong("model.merges", "lists a pair twice")
    return tuple(out)


def _around(post: Any, ids: Mapping[str, int]) -> tuple[int | None, int | None]:
    """The tokens that the post-processor puts before and after a text."""
    steps = [step for step in _steps(post, "processors") if step.get("type") != "ByteLevel"]
    if not steps:
        return None, None
    if len(steps) != 1 or steps[0].get("type") != "TemplateProcessing":
        raise _wrong("post_processor", f"{steps[0].get('type')!r:.40} is not supported; supported: TemplateProcessing")
    sides: tuple[list[int], list[int]] = ([], [])
    is_after = False
    for part in steps[0].get("single") or []:
        if isinstance(part, dict) and "Sequence" in part:
            is_after = True
            continue
        name = part.get("SpecialToken", {}).get("id") if isinstance(part, dict) else None
        if not isinstance(name, str) or name not in ids:
            raise _wrong("post_processor.single", f"{name!r:.40} is no token")
        sides[is_after].append(ids[name])
    if max(map(len, sides)) > 1:
        raise _wrong("post_processor.single", "more than one token on a side is not supported")
    return next(iter(sides[0]), None), next(iter(sides[1]), None)


def _named(config: Json, name: str, ids: Mapping[str, int]) -> int | None:
    value = config.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return None
    if text not in ids:
        raise InvalidTokenizer(f"tokenizer_config.json {name}", f"{text!r:.40} is no token")
    return ids[text]


def _flag(config: Json, name: str, default: bool) -> bool:
    value = config.get(name)
    return value if isinstance(value, bool) else default


def _ends(generation: Json, size: int) -> set[int]:
    value = generation.get("eos_token_id", [])
    ends = value if isinstance(value, list) else [value]
    if not all(isinstance(end, int) and not isinstance(end, bool) and 0 <= end < size for end in ends):
        raise InvalidTokenizer("generation_config.json eos_token_id", f"must be ids below {size}")
    return set(ends)


def _template(files: Mapping[str, bytes], config: Json) -> str | None:
    if "chat_template.jinja" in files:
        try:
            return files["chat_template.jinja"].decode("utf-8")
        except UnicodeDecodeError:
            raise InvalidTokenizer("chat_template.jinja", "is not UTF-8") from None
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {part.get("name"): part.get("template") for part in value if isinstance(part, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise InvalidTokenizer("tokenizer_config.json chat_template", "must be a string, or a list with a default")
    return value


def _context_length(shape: Json, config: Json) -> int | None:
    for value in (shape.get("max_position_embeddings"), config.get("model_max_length")):
        if isinstance(value, int) and 0 < value < 1 << 31:  # files that do not know have an enormous number
            return value
    return None
