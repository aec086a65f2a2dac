"""The values that users hand in and get back: frozen dataclasses, standard library only.

Owns their meaning; must not know the wire (`_request` writes them, `_fold` reads them) nor any I/O. Invariant: times
are seconds; None means absent, so the server's default holds, which differs from an explicit zero.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why an answer ended well. Failures are exceptions, never reasons."""

    STOP = "stop"
    LENGTH = "length"
    TIME_LIMIT = "time_limit"


class TimeLimitKind(StrEnum):
    """One of the four limits."""

    QUEUE = "queue"
    FIRST_TOKEN = "first_token"
    BETWEEN_TOKENS = "between_tokens"
    TOTAL = "total"


class GrammarKind(StrEnum):
    """The language of a grammar."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that the output must have: `source`, at most 65,536 bytes, is written in `kind`."""

    kind: GrammarKind
    source: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. None: the server's default, named in brackets.

    temperature: 0 (greedy) to 100 [1]. top_k: the k likeliest, 0 for all [0]. top_p: 0 < x <= 1 [1]. min_p: 0 to 1 [0].
    max_tokens: output tokens [what the context leaves]. min_tokens: before which no stop id is drawn [0]. seed: 64
    bits, unsigned [drawn, see `Stream.seed`]. n: answers, 1 to 128 [1]. stop: texts that end an answer, at most 16.
    include_stop: deliver the stop text too [False]. stop_token_ids: at most 64. ignore_eos: the model's end ids don't
    end [False]. logprobs: of the drawn token and of this many likeliest, 0 to 20 [none]. prompt_logprobs: the same for
    the prompt's tokens, see `Stream.prompt_logprobs`; the prompt is computed whole for it [none]. repetition_penalty:
    over prompt and output, 0 < x <= 10 [1]. presence_penalty, frequency_penalty: over the output, -2 to 2 [0].
    logit_bias: token id to bias, -100 to 100. grammar: the form of the output [free].
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | Sequence[str] | None = None
    include_stop: bool | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds that each phase may take. None: the server's default. Above the server's maximum: the maximum.

    queue: before the first prefill. first_token: until the first token. between_tokens: between two. total: everything;
    the call's `timeout` also counts, the smaller one holds.
    """

    queue: float | None = None
    first_token: float | None = None
    between_tokens: float | None = None
    total: float | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    role: "system", "user", "assistant" or "tool". content: control tokens written in it stay text. name: who, among
    several with the same role. tool_calls: calls that the assistant made, in OpenAI's form. tool_call_id: the call that
    a tool's message answers.
    """

    role: str
    content: str
    name: str | None = None
    tool_calls: Sequence[Mapping[str, object]] | None = None
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of a distribution. logprob: natural logarithm, of the raw distribution. bytes: exact; text: U+FFFD for
    what is not UTF-8."""

    token_id: int
    logprob: float
    text: str
    bytes: bytes


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of one drawn token. top: the likeliest, in falling order."""

    drawn: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of answer `index`; all deltas joined are the answer.

    text: may be empty while a character or a possible stop text is incomplete. token_ids: that came since the delta
    before. logprobs: one per token where asked for.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    index: int = 0
    logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. sampled = delivered + discarded; delivered is what is billed.

    cached_tokens: of the prompt, taken from the prefix cache. preemptions: times that the blocks went to another
    request. recomputed_tokens: computed again because of that.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    delivered_tokens: int = 0
    sampled_tokens: int = 0
    discarded_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went: seconds of the server's clock.

    prefill: from the first admission to the first token, without waits. decode: from the first token to the last.
    first_token and total: since arrival.
    """

    tokenize: float = 0.0
    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    first_token: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Accepted:
    """What the server said when it queued the request: the values in use. queue_position: sequences ahead of it.
    prompt_ids: where asked for, or needed to resume; else empty. numerics: under which the tokens are drawn. n: answers
    that come, which are fewer than asked for where the server is under pressure; 0: as many as asked for."""

    request_id: str
    queue_position: int
    seed: int
    limits: TimeLimits
    max_tokens: int
    prompt_tokens: int
    prompt_ids: tuple[int, ...]
    numerics: str
    model: str
    n: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: whole where finish_reason is there, else as far as it came. stop_match: the text that ended it.
    limit: which one, for FinishReason.TIME_LIMIT."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    finish_reason: FinishReason | None
    stop_match: str | None
    limit: TimeLimitKind | None
    usage: Usage | None
    timings: Timings | None


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as the model reads it. token_ids are what counts; text is for people."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServerDescription:
    """What is served.

    model: its name. model_hash, tokenizer_hash: SHA-256, hex. max_model_len: tokens of prompt and output together.
    numerics: equal here means equal tokens; empty while no executor is there. schema_revision: of the contract.
    """

    model: str
    model_hash: str
    tokenizer_hash: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    numerics: str
    has_chat_template: bool
    schema_revision: int
    config_hash: str
