"""How a request ended, said three ways: the core's reason, the caller's status or Finished message, the outcome that
trace, log and metrics share. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from executor.step import RowError, RowErrorCode
from services.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)
from services.scheduler.core.calls import Finished, QueueFull, Reason, SubmitError, Usage
from services.scheduler.core.degrade import Degraded
from services.scheduler.core.lateness import TooLate
from services.scheduler.core.quota import QuotaExceeded
from services.scheduler.request_trace import Times

Verdict = ServiceError
# The core's names -> the contract's.
FIELDS: Final = {"prompt_len": "prompt_ids", "max_tokens": "sampling.max_tokens", "answers": "sampling.n"}


@dataclass(frozen=True, slots=True)
class Completed:
    """The stream ends well."""

    finished: Finished
    times: Times


Ending = Completed | ServiceError


def of(finished: Finished, verdict: Verdict | None, times: Times, *, begun: bool = False) -> Ending:
    """What becomes of an answer: it is complete, or its request fails. The verdict is the engine's own reason to cancel
    or the executor's to fail, if any. begun: the caller has tokens of some answer of the request."""
    if finished.reason is Reason.DEADLINE and begun:  # of an answer that waited: what there is of the others stands
        finished = replace(finished, reason=Reason.TIME_LIMIT)
    if finished.reason in (Reason.STOP, Reason.LENGTH, Reason.TIME_LIMIT):
        return Completed(finished, times)
    if finished.reason is Reason.DEADLINE:
        kind = "total" if finished.limit is None else finished.limit.value
        return DeadlineExceeded(
            f"the {kind} time limit passed in phase {finished.phase.value}, before the first token",
            reason="TIME_LIMIT",
            metadata={"limit_kind": kind, "phase": finished.phase.value},
        )
    if finished.reason is Reason.DOES_NOT_FIT:
        return InvalidArgument(finished.detail, reason="DOES_NOT_FIT", field="prompt_ids")
    if verdict is not None:
        return verdict
    if finished.reason is Reason.CANCELLED:
        return Cancelled("the request was cancelled")
    return Internal("the request failed on the executor", reason="EXECUTOR_ERROR")


def of_submit_error(error: SubmitError, retry_after_s: float) -> ServiceError:
    """What the core refused, in the contract's names. retry_after_s: by the rate at which requests end."""
    if isinstance(error, QuotaExceeded):
        wait_s = retry_after_s if error.wait_ns is None else max(0.001, error.wait_ns / 1e9)
        return ResourceExhausted(error.message, reason="QUOTA_EXCEEDED", field=error.field, retry_after_s=wait_s)
    if isinstance(error, Degraded):
        return ResourceExhausted(error.message, reason="DEGRADED", field=error.field, retry_after_s=retry_after_s)
    if isinstance(error, TooLate):
        return DeadlineExceeded(
            error.message,
            reason="TIME_LIMIT",
            field=error.field,
            metadata={"limit_kind": error.limit.value, "phase": "queue"},
        )
    if isinstance(error, QueueFull):
        return ResourceExhausted(error.message, reason="QUEUE_FULL", field=error.field, retry_after_s=retry_after_s)
    return InvalidArgument(error.message, field=FIELDS.get(error.field, error.field))


def slow_reader() -> ServiceError:
    return ResourceExhausted("the reader of this stream was too slow for too long", reason="SLOW_READER")


def other_numerics(output_tokens: int, begun_with: str, served: str) -> ServiceError:
    """An answer goes on only where the numerics are equal; one that has not begun may be asked for anew."""
    message = f"the executors now compute with numerics {served}; this request was taken for {begun_with}"
    if output_tokens:
        return Aborted(message, reason="NUMERICS_CHANGED")
    return Unavailable(message, reason="MODEL_CHANGED")


def no_prompt_logprobs() -> ServiceError:
    return Unavailable("an executor came that gives no logprobs of prompts", reason="NO_PROMPT_LOGPROBS")


def lost_too_often(losses: int) -> ServiceError:
    return Unavailable(
        f"the request lost its executor {losses} times without a token in between", reason="LOST_TOO_OFTEN"
    )


def summed(usages: Sequence[Usage]) -> Usage:
    """Of a request's answers, of which there is one at least: the prompt once. It was cached as far as for the one that
    found least; the others found what that one computed."""
    return Usage(
        prompt_tokens=usages[0].prompt_tokens,
        delivered=sum(usage.delivered for usage in usages),
        discarded=sum(usage.discarded for usage in usages),
        cached_tokens=min(usage.cached_tokens for usage in usages),
        preemptions=sum(usage.preemptions for usage in usages),
        recomputed_tokens=sum(usage.recomputed_tokens for usage in usages),
        prefill_chunks=sum(usage.prefill_chunks for usage in usages),
    )


def with_usage(error: ServiceError, usage: Usage, resumed: int) -> ServiceError:
    """A failed request was paid for too: its usage, of all its answers, travels in the error's details. resumed: tokens
    that another scheduler drew."""
    counted = {
        "prompt_tokens": str(usage.prompt_tokens),
        "delivered_tokens": str(resumed + usage.delivered),
        "discarded_tokens": str(usage.discarded),
    }
    return type(error)(
        error.message,
        reason=error.reason,
        field=error.field,
        limit=error.limit,
        retry_after_s=error.retry_after_s,
        metadata={**error.metadata, **counted},
    )


def of_row_error(error: RowError) -> ServiceError:
    """One sequence's own failure on the executor."""
    if error.code is RowErrorCode.GRAMMAR_DEAD_END:
        return Aborted(error.message, reason=error.code.name)
    return Internal(error.message, reason=error.code.name)


def outcome(ending: Ending, phase: str) -> str:
    """One word for dashboards: "stop", "length", "time_limit", or the failure and where it happened."""
    if isinstance(ending, Completed):
        return ending.finished.reason.value
    return failure(ending, phase)


def failure(error: ServiceError, phase: str) -> str:
    """The same, of a request that failed or was refused."""
    if isinstance(error, DeadlineExceeded):
        return f"deadline.{phase}"
    if isinstance(error, Cancelled):
        return f"cancelled.{phase}"
    return f"error.{error.reason.lower()}"
