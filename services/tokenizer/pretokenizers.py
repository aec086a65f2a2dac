"""How each supported family cuts text into words before byte-pair merges: one row per `tokenizer.ggml.pre`.

Owns the regular expressions and the flags that the name stands for. Knows nothing of vocabularies. A name
that is not in the table is refused by the loader: a near miss would change token ids without any error.
The expressions are the ones published in the families' own tokenizer files.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits_then_gpt2() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])


def _split_by(expression: str) -> Callable[[], PreTokenizer]:
    def build() -> PreTokenizer:
        words = Split(Regex(expression), behavior="isolated")
        return Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


@dataclass(frozen=True, slots=True)
class PreTokenizerKind:
    """What a pre-tokenizer name implies.

    Attributes:
        build: makes the `tokenizers` object.
        ignore_merges: a word that is itself a token is that token, whatever the merges say.
        nfc: text is brought to Unicode form NFC first, so decode(encode(x)) is NFC(x).
        default_add_bos: whether a file that is silent about `add_bos_token` starts with BOS.
    """

    build: Callable[[], PreTokenizer]
    ignore_merges: bool = False
    nfc: bool = False
    default_add_bos: bool = False


_LLAMA_BPE = PreTokenizerKind(_split_by(_LLAMA_3), ignore_merges=True, default_add_bos=True)

PRE_TOKENIZERS: dict[str, PreTokenizerKind] = {
    "gpt-2": PreTokenizerKind(_gpt2),
    "llama-bpe": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "qwen2": PreTokenizerKind(_split_by(_QWEN_2), nfc=True),
    "refact": PreTokenizerKind(_single_digits_then_gpt2),
    "smollm": PreTokenizerKind(_single_digits_then_gpt2),
    "starcoder": PreTokenizerKind(_single_digits_then_gpt2),
}
