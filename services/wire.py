"""The contract's messages <-> the values that the programs compute with, both directions of each type side by side.

Owns the conversion and the check of every field on the way in, before anything is allocated for it. Must not know a
service, a stream or a queue. Invariant: `x_from_proto(x_to_proto(value)) == value` for every value whose floats are
representable in 32 bits; what the contract has and this build does not serve is refused by name, never dropped.
How tokens are drawn is `services.wire_sampling`.
"""

from dataclasses import dataclass
from typing import Final

from executor.step import (
    NewSequence,
    RowError,
    RowErrorCode,
    Slice,
    SliceResult,
    Step,
    StepResult,
    StepTimings,
    TokenLogprobs,
)
from services.errors import InvalidArgument, ServiceError, Unimplemented
from services.wire_sampling import (
    FLOATS,
    MAX_STOP_TOKEN_IDS,
    answers_from_proto,
    has,
    sampling_from_proto,
    sampling_to_proto,
)
from tercet.v1 import common_pb2, executor_pb2

# What a sequence's first slice must spell out, so that no two builds can disagree about a default.
_SPELLED_OUT: Final = (*(row.name for row in FLOATS), "min_tokens", "top_k", "seed")


@dataclass(frozen=True, slots=True)
class RequestLabel:
    """What the executor knows of a sequence's request, for its log and its spans only.

    traceparent: W3C context of the request; None: not sampled.
    """

    request_id: str = ""
    traceparent: str | None = None


@dataclass(frozen=True, slots=True)
class StepOrder:
    """A step as it travels: the step itself and what the stream says about it.

    predicted_ns: what the owner expects the step to take; None: unknown. traceparent: context of the step's own
    span; None: not sampled. labels: (slot, label) of the slices that bring a new sequence, in their order.
    """

    step: Step
    epoch: int
    predicted_ns: int | None = None
    traceparent: str | None = None
    labels: tuple[tuple[int, RequestLabel], ...] = ()


# Step


def step_to_proto(order: StepOrder) -> executor_pb2.Step:
    labels = dict(order.labels)
    return executor_pb2.Step(
        step_id=order.step.step_id,
        epoch=order.epoch,
        slices=[_slice_to_proto(piece, labels.get(piece.slot, RequestLabel())) for piece in order.step.slices],
        predicted_ns=order.predicted_ns,
        traceparent=order.traceparent,
    )


def step_from_proto(message: executor_pb2.Step) -> StepOrder:
    """Raises InvalidArgument where a field is missing or out of range; Unimplemented for drafts.

    Slots, blocks, starts and ids against the pool are the runner's to check: it holds their state.
    """
    labels = tuple(
        (
            piece.slot,
            RequestLabel(
                request_id=piece.new_sequence.request_id,
                traceparent=piece.new_sequence.traceparent if piece.new_sequence.HasField("traceparent") else None,
            ),
        )
        for piece in message.slices
        if piece.HasField("new_sequence")
    )
    return StepOrder(
        step=Step(
            step_id=message.step_id,
            slices=tuple(_slice_from_proto(piece, index) for index, piece in enumerate(message.slices)),
        ),
        epoch=message.epoch,
        predicted_ns=message.predicted_ns if message.HasField("predicted_ns") else None,
        traceparent=message.traceparent if message.HasField("traceparent") else None,
        labels=labels,
    )


def _slice_to_proto(piece: Slice, label: RequestLabel) -> executor_pb2.Slice:
    return executor_pb2.Slice(
        slot=piece.slot,
        start=piece.start,
        count=piece.count,
        token_ids=piece.token_ids,
        new_block_ids=piece.new_block_ids,
        samples=piece.samples,
        new_sequence=None if piece.new is None else _new_sequence_to_proto(piece.new, label),
    )


def _slice_from_proto(message: executor_pb2.Slice, index: int) -> Slice:
    if message.draft_token_ids:
        raise _unserved(f"step.slices[{index}].draft_token_ids")
    return Slice(
        slot=message.slot,
        start=message.start,
        count=message.count,
        token_ids=tuple(message.token_ids),
        new_block_ids=tuple(message.new_block_ids),
        samples=message.samples,
        new=(
            _new_sequence_from_proto(message.new_sequence, f"step.slices[{index}].new_sequence")
            if message.HasField("new_sequence")
            else None
        ),
    )


def _new_sequence_to_proto(new: NewSequence, label: RequestLabel) -> executor_pb2.NewSequence:
    return executor_pb2.NewSequence(
        sampling=sampling_to_proto(new.sampling),
        prompt_len=new.prompt_len,
        cached_token_ids=new.cached_token_ids,
        choice=new.sampling.choice,
        traceparent=label.traceparent,
        request_id=label.request_id,
    )


def _new_sequence_from_proto(message: executor_pb2.NewSequence, field: str) -> NewSequence:
    for name in _SPELLED_OUT:
        if not has(message.sampling, name):
            raise InvalidArgument(f"{field}.sampling.{name} is missing", field=f"{field}.sampling.{name}")
    if answers_from_proto(message.sampling, f"{field}.sampling") > 1:
        raise InvalidArgument(f"{field}.sampling.n: a slot holds one answer", field=f"{field}.sampling.n", limit=1)
    return NewSequence(
        sampling=sampling_from_proto(
            message.sampling,
            choice=message.choice,
            # The model's own end ids come on top of the caller's.
            max_stop_token_ids=2 * MAX_STOP_TOKEN_IDS,
            field=f"{field}.sampling",
        ),
        prompt_len=message.prompt_len,
        cached_token_ids=tuple(message.cached_token_ids),
    )


# StepResult


def result_to_proto(result: StepResult) -> executor_pb2.StepResult:
    return executor_pb2.StepResult(
        step_id=result.step_id,
        results=[_slice_result_to_proto(piece) for piece in result.results],
        timings=_timings_to_proto(result.timings),
    )


def result_from_proto(message: executor_pb2.StepResult) -> StepResult:
    """Raises InvalidArgument for an error code that this build does not know."""
    return StepResult(
        step_id=message.step_id,
        results=tuple(_slice_result_from_proto(piece) for piece in message.results),
        timings=_timings_from_proto(message.timings),
    )


def _slice_result_to_proto(piece: SliceResult) -> executor_pb2.SliceResult:
    if not piece.logprobs and piece.error is None and not piece.prompt_logprobs:  # nearly all are
        return executor_pb2.SliceResult(slot=piece.slot, token_ids=piece.token_ids)
    return executor_pb2.SliceResult(
        slot=piece.slot,
        token_ids=piece.token_ids,
        logprobs=[logprobs_to_proto(entry) for entry in piece.logprobs],
        error=None if piece.error is None else _row_error_to_proto(piece.error),
        prompt_logprobs=[logprobs_to_proto(entry) for entry in piece.prompt_logprobs],
    )


def _slice_result_from_proto(message: executor_pb2.SliceResult) -> SliceResult:
    return SliceResult(
        slot=message.slot,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(logprobs_from_proto(entry) for entry in message.logprobs),
        error=_row_error_from_proto(message.error) if message.HasField("error") else None,
        prompt_logprobs=tuple(logprobs_from_proto(entry) for entry in message.prompt_logprobs),
    )


def logprobs_to_proto(logprobs: TokenLogprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        drawn=logprobs.drawn,
        top=[common_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in logprobs.top],
    )


def logprobs_from_proto(message: common_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        drawn=message.drawn,
        top=tuple((entry.token_id, entry.logprob) for entry in message.top),
    )


_ERROR_CODES: Final = {
    RowErrorCode.NAN_LOGITS: executor_pb2.SLICE_ERROR_CODE_NAN_LOGITS,
    RowErrorCode.GRAMMAR_DEAD_END: executor_pb2.SLICE_ERROR_CODE_GRAMMAR_DEAD_END,
}
_ROW_ERROR_CODES: Final = {int(wire): code for code, wire in _ERROR_CODES.items()}


def _row_error_to_proto(error: RowError) -> executor_pb2.SliceError:
    return executor_pb2.SliceError(code=_ERROR_CODES[error.code], message=error.message)


def _row_error_from_proto(message: executor_pb2.SliceError) -> RowError:
    code = _ROW_ERROR_CODES.get(int(message.code))
    if code is None:
        raise InvalidArgument(
            f"result.results.error.code is {int(message.code)}, which this build does not know",
            field="result.results.error.code",
        )
    return RowError(code=code, message=message.message)


def _timings_to_proto(timings: StepTimings) -> executor_pb2.StepTimings:
    return executor_pb2.StepTimings(
        wait_ns=timings.wait_ns,
        prepare_ns=timings.prepare_ns,
        forward_ns=timings.forward_ns,
        sample_ns=timings.sample_ns,
    )


def _timings_from_proto(message: executor_pb2.StepTimings) -> StepTimings:
    return StepTimings(
        wait_ns=message.wait_ns,
        prepare_ns=message.prepare_ns,
        forward_ns=message.forward_ns,
        sample_ns=message.sample_ns,
    )


# Checks


def _unserved(field: str) -> ServiceError:
    return Unimplemented(f"{field} is not served by this build", field=field)
