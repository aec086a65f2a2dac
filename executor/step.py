"""What one executor step takes and gives: frozen values of the standard library only.

Owned by the executor, which consumes steps. The scheduler's shell fills them in; the wire carries them. Nothing
here knows a device, a model or a network.

A sequence lives in a *slot* (an index below `max_sequences`). Its first slice carries `new`, which replaces whatever
the slot held; every later slice carries only what changed. So a step's size grows with the batch, not the context.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

MAX_GRAMMAR_BYTES: Final = 65_536  # of a grammar's source, in UTF-8


class GrammarKind(IntEnum):
    """What the source of a grammar is written in."""

    JSON_OBJECT = 1  # any; the source is empty
    JSON_SCHEMA = 2
    REGEX = 3  # over the whole output
    EBNF = 4  # llguidance's Lark
    CHOICE = 5  # one of the lines of the source


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that an output must have, from its first token to its end."""

    kind: GrammarKind
    source: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn from the logits of one sequence. Applied in the order of the fields.

    Greedy when `temperature` is 0: ties go to the lowest id. Otherwise Gumbel-max over the kept tokens with
    Philox4x32-10, key = `seed`, counter = (absolute position of the drawn token, token id, `choice`).
    """

    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    repetition_penalty: float = 1.0  # > 0; over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output, times the count
    min_tokens: int = 0  # `stop_token_ids` can't be drawn before this many output tokens
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    temperature: float = 1.0  # >= 0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # (0, 1]
    min_p: float = 0.0  # [0, 1]
    seed: int = 0  # unsigned 64 bits
    choice: int = 0  # which of the n answers to one prompt
    logprobs: int | None = None  # None: none. k >= 0: of the drawn token and of the k likeliest, raw distribution
    prompt_logprobs: int | None = None  # the same for the prompt's tokens from the second on; needs a start at 0


@dataclass(frozen=True, slots=True)
class NewSequence:
    """All that a slot must know before its first token: its past comes as ordinary token ids."""

    sampling: SamplingParams
    prompt_len: int  # tokens; ids from here on count as output for penalties and min_tokens
    # Ids of positions [0, start) of the first slice, whose keys and values its first blocks hold already.
    cached_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of one sequence that a step computes: positions [start, start + count).

    `token_ids` holds exactly these `count` ids, or is empty for count 1: then the input is the token that the slot
    drew last, which never left the device.
    """

    slot: int
    start: int
    count: int
    token_ids: tuple[int, ...]
    new_block_ids: tuple[int, ...]  # appended to the slot's block table before the step
    samples: bool  # draw the token at position start + count
    new: NewSequence | None = None

    def scores(self, sampling: SamplingParams, prompt_len: int) -> bool:
        """Whether the result holds prompt logprobs, of a sequence with these: it begins inside the prompt."""
        return sampling.prompt_logprobs is not None and self.start < prompt_len


@dataclass(frozen=True, slots=True)
class Step:
    step_id: int  # 1, 2, 3, ... within an epoch
    slices: tuple[Slice, ...]  # at most one per slot


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the raw distribution (before penalties and temperature)."""

    drawn: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), likeliest first; ties by id


class RowErrorCode(IntEnum):
    NAN_LOGITS = 1
    GRAMMAR_DEAD_END = 2


@dataclass(frozen=True, slots=True)
class RowError:
    """One sequence failed; the rest of the step stands."""

    code: RowErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class SliceResult:
    """For each slice that samples or gives prompt logprobs, in the order of the slices. One that samples has exactly
    one of tokens and error."""

    slot: int
    token_ids: tuple[int, ...]  # one, until drafts exist
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token where asked for
    error: RowError | None = None
    # Of the prompt's tokens in this slice, given all before them; the prompt's first has none.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Nanoseconds of the executor's clock."""

    wait_ns: int = 0  # between arrival and start
    prepare_ns: int = 0  # slices to device tensors
    forward_ns: int = 0
    sample_ns: int = 0  # the head, and the draws


@dataclass(frozen=True, slots=True)
class StepResult:
    step_id: int
    results: tuple[SliceResult, ...]
    timings: StepTimings = StepTimings()


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a scheduler may ask of one step and of the pool."""

    block_size: int  # tokens a block
    total_blocks: int
    max_batched_tokens: int  # sum of counts in one step
    max_sequences: int  # slots
    max_model_len: int  # tokens of one sequence
    vocab_size: int
