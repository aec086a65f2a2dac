"""Grammars compiled for one vocabulary, and places in them.

Owns llguidance's objects and the limits of what a grammar may cost. Must not know slots, threads, the wire.
Invariant: a `Matcher` depends on its grammar and on the ids that it was given, and on nothing else.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, get_version

from executor.grammar.source import GrammarError, definition
from executor.step import Grammar

MESSAGE_CHARS: Final = 400
_NOTHING: Final = ("", "NoExtension", "NoExtensionBias")  # what llguidance says where nothing may come


@dataclass(frozen=True, slots=True)
class GrammarVocabulary:
    """tokens: the bytes of each id; b"" for one that no text has. special_ids: those that are no text, whatever their
    bytes. end_ids: those that end an output, at least one.

    encode: how the model's tokenizer cuts a text, so that text which a grammar leaves no choice about is written in the
    tokens that the model knows it by. May raise ValueError. None: the longest tokens first, which is enough to check.
    """

    tokens: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    encode: Callable[[str], Sequence[int]] | None = None

    def __post_init__(self) -> None:
        if not self.end_ids:
            raise ValueError("the vocabulary has no id that ends an output: a grammar could never be complete")


class GrammarEngine:
    """Compiles. Raises ValueError where the vocabulary is of no use."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.vocab_size = len(vocabulary.tokens)
        self._tokenizer = LLTokenizer(
            _Wrapper(vocabulary),  # type: ignore[arg-type]
            n_vocab=self.vocab_size,
            eos_token=list(vocabulary.end_ids),
        )

    def compile(self, grammar: Grammar) -> "Compiled":
        """Takes up to about a second for the largest grammars. Raises GrammarError."""
        matcher = LLMatcher(self._tokenizer, definition(grammar), log_level=0, limits=_limits())
        compiled = Compiled(matcher, self.vocab_size)
        if matcher.is_error():
            raise GrammarError(_reason(matcher))
        mask = array("I", bytes(4 * mask_words(self.vocab_size)))
        compiled.matcher().fill(mask)
        if not any(mask):
            raise GrammarError("no text matches it")
        return compiled


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar at its beginning. Never advanced."""

    _start: LLMatcher
    _vocab_size: int

    def matcher(self) -> "Matcher":
        return Matcher(self._start.deep_copy(), mask_words(self._vocab_size))


class Matcher:
    """A place in a grammar. For one thread at a time."""

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self._matcher = matcher
        self._words = words

    @property
    def is_complete(self) -> bool:
        """Whether the output may end here."""
        return bool(self._matcher.is_accepting())

    def advance(self, token_ids: Sequence[int]) -> None:
        """Raises GrammarError where the grammar does not allow them, or they cost too much to match."""
        if not self._matcher.consume_tokens(list(token_ids)):
            raise GrammarError(_reason(self._matcher))

    def fill(self, mask: "array[int]") -> None:
        """Writes which tokens may come next, as `kernels.sampling.SampledSequence.mask` has it: the ends where the
        output may end. Words behind the vocabulary's last are left alone.

        Raises GrammarError where it costs too much to find out, ValueError for a mask of too few words.
        """
        address, words = mask.buffer_info()
        if words < self._words:
            raise ValueError(f"the mask has {words} words, the vocabulary needs {self._words}")
        self._matcher.unsafe_compute_mask_ptr(address, 4 * self._words)
        if self._matcher.is_error():
            raise GrammarError(_reason(self._matcher))


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def engine_version() -> str:
    """Equal versions, equal masks."""
    return str(get_version())


def _limits() -> LLParserLimits:
    """Of one grammar: about 20 ms for its expressions, 10 ms for a mask, 40 MB for states that outputs reach."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=150_000,
        step_max_items=50_000,
        max_lexer_states=25_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def _reason(matcher: LLMatcher) -> str:
    text = " ".join(str(matcher.get_error()).removesuffix("<non-verbose/>").split())
    return "no text matches it" if text in _NOTHING else text[:MESSAGE_CHARS]


class _Wrapper:
    """A vocabulary as llguidance asks for one."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.eos_token_id = vocabulary.end_ids[0]
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = list(vocabulary.special_ids)
        self._encode = vocabulary.encode
        special = set(vocabulary.special_ids)
        self._ids = {text: one for one, text in enumerate(vocabulary.tokens) if text and one not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: Any) -> list[int]:
        """Ids whose bytes are the text's; llguidance relies on that."""
        raw = text.encode() if isinstance(text, str) else bytes(text)
        if self._encode is not None:
            try:
                ids = list(self._encode(raw.decode()))
            except ValueError:
                ids = []
            if b"".join(map(self.tokens.__getitem__, ids)) == raw:
                return ids
        return self._encode_greedily(raw)

    def _encode_greedily(self, raw: bytes) -> list[int]:
        ids: list[int] = []
        start = 0
        while start < len(raw):
            for end in range(min(len(raw), start + self._longest), start, -1):
                found = self._ids.get(raw[start:end])
                if found is not None:
                    ids.append(found)
                    start = end
                    break
            else:
                break  # a byte that the vocabulary lacks: whatever comes after cannot be written
        return ids
