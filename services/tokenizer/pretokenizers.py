"""How each supported family cuts text into words before byte-pair merges: one row per `tokenizer.ggml.pre`.

Owns the regular expressions and the flags that the name stands for. Knows nothing of vocabularies. A name
that is not in the table is refused by the loader: a near miss would change token ids without any error.
The expressions are the ones published in the families' own tokenizer files.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Sequence, Split

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_QWEN_2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES

# A word changes where small letters are followed by capitals.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
)
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + _SPACES
)

# Letters of scripts with two cases, as the first DeepSeek models list them.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_SIGNS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK_LLM = ("[\r\n]", rf"\s?[{_CASED}]+", r"\s?" + _SIGNS, r"\s+$", _EAST_ASIAN)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    + _SPACES,
)

Step = Callable[[], PreTokenizer]


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _bytes_only() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=False)


def _digits() -> PreTokenizer:
    return Digits(individual_digits=True)


def _numbers() -> PreTokenizer:
    return Digits(individual_digits=False)


def _contiguous_punctuation() -> PreTokenizer:
    return Punctuation("contiguous")


def _threes() -> PreTokenizer:
    return Split(Regex("[0-9][0-9][0-9]"), behavior="isolated")


def _split(expression: str) -> Step:
    return lambda: Split(Regex(expression), behavior="isolated")


def _steps(*steps: Step) -> Step:
    return lambda: Sequence([step() for step in steps])


@dataclass(frozen=True, slots=True)
class PreTokenizerKind:
    """What a pre-tokenizer name implies.

    Attributes:
        build: makes the `tokenizers` object.
        ignore_merges: a word that is itself a token is that token, whatever the merges say.
        nfc: text is brought to Unicode form NFC first, so decode(encode(x)) is NFC(x).
        default_add_bos: whether a file that is silent about `add_bos_token` starts with BOS.
    """

    build: Step
    ignore_merges: bool = False
    nfc: bool = False
    default_add_bos: bool = False


_LLAMA_BPE = PreTokenizerKind(_steps(_split(_LLAMA_3), _bytes_only), ignore_merges=True, default_add_bos=True)
_DIGITS_THEN_GPT_2 = PreTokenizerKind(_steps(_digits, _gpt2))
_GPT_2 = PreTokenizerKind(_gpt2)
_QWEN = PreTokenizerKind(_steps(_split(_QWEN_2), _bytes_only), nfc=True)
_O200K = PreTokenizerKind(_steps(_split(_GPT_4O), _bytes_only))

# Of names that stand for one and the same row, the first is used where only the rules are known.
PRE_TOKENIZERS: dict[str, PreTokenizerKind] = {
    "gpt-2": _GPT_2,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "smollm": _DIGITS_THEN_GPT_2,
    "starcoder": _DIGITS_THEN_GPT_2,
    "refact": _DIGITS_THEN_GPT_2,
    "deepseek-llm": PreTokenizerKind(_steps(*map(_split, _DEEPSEEK_LLM), _digits, _bytes_only)),
    "deepseek-coder": PreTokenizerKind(_steps(*map(_split, _DEEPSEEK_CODER), _digits, _bytes_only)),
    "deepseek-v3": PreTokenizerKind(_steps(*map(_split, _DEEPSEEK_V3), _bytes_only)),
    "tekken": PreTokenizerKind(_steps(_split(_TEKKEN), _bytes_only), ignore_merges=True, default_add_bos=True),
    "gpt-4o": _O200K,
    "llama4": _O200K,
    "command-r": PreTokenizerKind(_steps(_digits, _gpt2), nfc=True),
    "falcon": PreTokenizerKind(_steps(_contiguous_punctuation, _gpt2, _numbers, _threes)),
    "mpt": PreTokenizerKind(_gpt2, nfc=True),
}


def canonical_name(pre: str) -> str:
    """The first name of the same row."""
    return next(name for name, row in PRE_TOKENIZERS.items() if row is PRE_TOKENIZERS[pre])
