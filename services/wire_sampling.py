"""How tokens are drawn: the contract's SamplingParams <-> the executor's, and the check of every field.

The part of `services.wire` that scheduler, executor and gateway share. Invariants as there: what goes out comes back
the same, and what the contract has and this build does not serve is refused by name.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import Message

from executor.step import SamplingParams
from services.errors import InvalidArgument
from services.grammar_wire import grammar_to_proto, sampling_grammar
from tercet.v1 import common_pb2

MAX_LOGIT_BIAS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 64
MAX_LOGPROBS: Final = 20
MAX_N: Final = 128


@dataclass(frozen=True, slots=True)
class FloatField:
    """A number of SamplingParams: its default and the closed range it lies in, or half-open with `above_low`."""

    name: str
    default: float
    low: float
    high: float
    above_low: bool = False


FLOATS: Final = (
    FloatField("repetition_penalty", 1.0, 0.0, 10.0, above_low=True),
    FloatField("presence_penalty", 0.0, -2.0, 2.0),
    FloatField("frequency_penalty", 0.0, -2.0, 2.0),
    FloatField("temperature", 1.0, 0.0, 100.0),
    FloatField("top_p", 1.0, 0.0, 1.0, above_low=True),
    FloatField("min_p", 0.0, 0.0, 1.0),
)


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """Every field is set, zeros too. `choice` rides in NewSequence."""
    return common_pb2.SamplingParams(
        logit_bias=[common_pb2.LogitBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias],
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        grammar=None if params.grammar is None else grammar_to_proto(params.grammar),
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )


def sampling_from_proto(
    message: common_pb2.SamplingParams,
    *,
    choice: int = 0,
    vocab_size: int | None = None,
    max_stop_token_ids: int = MAX_STOP_TOKEN_IDS,
    field: str = "sampling",
) -> SamplingParams:
    """How to draw, absent fields at the contract's defaults.

    The scheduler's own fields (`n`, `max_tokens`, `ignore_eos`, whether `seed` is there) are read from the message by
    whoever owns them; an absent seed gives 0 here. vocab_size: bound of the token ids; None: not known yet.
    Raises InvalidArgument with `field`.name and the limit.
    """
    value = {row.name: _float(message, row, field) for row in FLOATS}
    _at_most(f"{field}.logit_bias", len(message.logit_bias), MAX_LOGIT_BIAS, ": the number of entries")
    _at_most(f"{field}.stop_token_ids", len(message.stop_token_ids), max_stop_token_ids, ": the number of entries")
    for entry in message.logit_bias:
        _in_range(f"{field}.logit_bias.bias", entry.bias, -100.0, 100.0)
    biased = [entry.token_id for entry in message.logit_bias]
    if len(set(biased)) != len(biased):
        raise InvalidArgument(f"{field}.logit_bias names a token id twice", field=f"{field}.logit_bias")
    _below_vocabulary(f"{field}.logit_bias.token_id", biased, vocab_size)
    _below_vocabulary(f"{field}.stop_token_ids", message.stop_token_ids, vocab_size)
    return SamplingParams(
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        repetition_penalty=value["repetition_penalty"],
        presence_penalty=value["presence_penalty"],
        frequency_penalty=value["frequency_penalty"],
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        grammar=sampling_grammar(message, field),
        temperature=value["temperature"],
        top_k=message.top_k,
        top_p=value["top_p"],
        min_p=value["min_p"],
        seed=message.seed,
        choice=choice,
        logprobs=_logprobs(message, "logprobs", field),
        prompt_logprobs=_logprobs(message, "prompt_logprobs", field),
    )


def answers_from_proto(message: common_pb2.SamplingParams, field: str = "sampling") -> int:
    """n. Raises InvalidArgument."""
    if not message.HasField("n"):
        return 1
    if not 1 <= message.n <= MAX_N:
        raise InvalidArgument(f"{field}.n is {message.n}; it must be 1 to {MAX_N}", field=f"{field}.n", limit=MAX_N)
    return message.n


def has(message: Message, name: str) -> bool:
    """`HasField` for a name that is known at run time only."""
    return message.HasField(name)


def _logprobs(message: common_pb2.SamplingParams, name: str, field: str) -> int | None:
    if not has(message, name):
        return None
    count: int = getattr(message, name)
    _at_most(f"{field}.{name}", count, MAX_LOGPROBS)
    return count


def _float(message: common_pb2.SamplingParams, row: FloatField, field: str) -> float:
    value: float = getattr(message, row.name) if has(message, row.name) else row.default
    _in_range(f"{field}.{row.name}", value, row.low, row.high, above_low=row.above_low)
    return value


def _in_range(field: str, value: float, low: float, high: float, *, above_low: bool = False) -> None:
    # NaN fails every comparison.
    if not low <= value <= high or (above_low and value == low):
        bound = f"{'above' if above_low else 'at least'} {low:g} and at most {high:g}"
        raise InvalidArgument(f"{field} is {value:g}; it must be {bound}", field=field, limit=bound)


def _at_most(field: str, value: int, limit: int, what: str = "") -> None:
    if value > limit:
        raise InvalidArgument(f"{field}{what} is {value}; the limit is {limit}", field=field, limit=limit)


def _below_vocabulary(field: str, token_ids: Iterable[int], vocab_size: int | None) -> None:
    if vocab_size is None:
        return
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise InvalidArgument(
                f"{field} holds {token_id}; the vocabulary has {vocab_size} ids", field=field, limit=vocab_size
            )
