"""How a request ended, said three ways: the core's reason, the caller's status or Finished message, the outcome that
trace, log and metrics share. Pure.
"""

from dataclasses import dataclass

from executor.step import RowError, RowErrorCode
from services.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
)
from services.scheduler.calls import Finished, Reason, Usage
from services.scheduler.request_trace import Times

Verdict = ServiceError


@dataclass(frozen=True, slots=True)
class Completed:
    """The stream ends well."""

    finished: Finished
    times: Times


Ending = Completed | ServiceError


def of(finished: Finished, verdict: Verdict | None, times: Times) -> Ending:
    """What the caller gets. The verdict is the engine's own reason to cancel or the executor's to fail, if any."""
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
        return _with_usage(verdict, finished.usage)
    if finished.reason is Reason.CANCELLED:
        return Cancelled("the request was cancelled")
    return Internal("the request failed on the executor", reason="EXECUTOR_ERROR")


def slow_reader() -> ServiceError:
    return ResourceExhausted("the reader of this stream was too slow for too long", reason="SLOW_READER")


def _with_usage(error: ServiceError, usage: Usage) -> ServiceError:
    """A failed request was paid for too: its usage travels in the error's details."""
    counted = {
        "prompt_tokens": str(usage.prompt_tokens),
        "delivered_tokens": str(usage.delivered),
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
    if isinstance(ending, DeadlineExceeded):
        return f"deadline.{phase}"
    if isinstance(ending, Cancelled):
        return f"cancelled.{phase}"
    return f"error.{ending.reason.lower()}"
