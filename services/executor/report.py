"""The executor's metrics and its `executor.step` spans, told by the step stream.

Owns what each number means. Must not decide anything. Invariant: a step has a span only if one of the requests that
it served is traced, with a link to each of those; spans are started and ended with explicit times, and are never
current.
"""

import time
from collections.abc import Callable
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, Status, StatusCode, Tracer

from executor.step import Slice, StepResult
from services import names, trace_context
from services.executor.lease import Grant
from services.executor.observer import Sequence
from services.executor.worker import Stale, StepDone
from services.metrics import ExecutorMetrics, observe
from services.telemetry import links_to

NS: Final = 1e9


class ExecutorReport:
    """Satisfies `observer.Observer`. link_limit: spans that one step span links to at most."""

    def __init__(self, metrics: ExecutorMetrics, tracer: Tracer, link_limit: int, instance_id: str) -> None:
        self._metrics = metrics
        self._tracer = tracer
        self._link_limit = link_limit
        self._instance_id = instance_id
        self._last: StepDone | None = None  # that was run
        self._late_kernels: Callable[[], int] = int
        self._late_counted = 0

    def granted(self, grant: Grant) -> None:
        self._metrics.claims["granted" if grant.ousted is None else "taken_over"].inc()
        self._metrics.epoch.set(grant.holder.epoch)

    def refused(self) -> None:
        self._metrics.claims["refused"].inc()

    def loaded(self, weight_bytes: int, kv_bytes: int, late_kernels: Callable[[], int] = int) -> None:
        """late_kernels: asked after each step."""
        self._late_kernels = late_kernels
        self._metrics.weights_bytes.set(weight_bytes)
        self._metrics.kv_pool_bytes.set(kv_bytes)

    def step(self, done: StepDone, served: tuple[Sequence, ...]) -> None:
        if isinstance(done.outcome, Stale):
            self._metrics.steps["stale"].inc()
            return
        self._metrics.step_gap.inc(gap_ns(self._last, done) / NS)
        self._last = done
        late = self._late_kernels()
        self._metrics.late_kernels.inc(late - self._late_counted)
        self._late_counted = late
        span = self._span(done, served)
        if isinstance(done.outcome, StepResult):
            self._count_result(done, done.outcome, served, span)
        else:
            self._metrics.steps["failed"].inc()
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_time=done.ended_ns + _to_wall_ns())

    def _count_result(self, done: StepDone, result: StepResult, served: tuple[Sequence, ...], span: Span) -> None:
        metrics, slices = self._metrics, done.order.step.slices
        metrics.steps["ok"].inc()
        observe(metrics.step_duration, (done.ended_ns - done.arrived_ns) / NS, span)
        for phase, duration_ns in phases(done, result).items():
            observe(metrics.step_phase[phase], duration_ns / NS)
            span.set_attribute(f"{names.STEP_PHASE}.{phase}_ns", duration_ns)
        observe(metrics.batch_tokens, sum(piece.count for piece in slices))
        observe(metrics.batch_sequences, len(slices))
        metrics.prompt_tokens.inc(sum(map(prompt_part, slices, served)))
        metrics.sampled_tokens.inc(sum(len(row.token_ids) for row in result.results))
        metrics.sequence_errors.inc(sum(row.error is not None for row in result.results))

    def _span(self, done: StepDone, served: tuple[Sequence, ...]) -> Span:
        """The step's span, started; one that records nothing where no request of the step is traced."""
        members = [
            (sequence.label.traceparent, {names.REQUEST_ID: sequence.label.request_id})
            for sequence in served
            if sequence.label.traceparent is not None
        ]
        links, cut = links_to(members, self._link_limit)
        if not links:
            return INVALID_SPAN
        slices = done.order.step.slices
        span = self._tracer.start_span(
            names.SPAN_EXECUTOR_STEP,
            context=_parent(done.order.traceparent),
            links=links,
            start_time=done.arrived_ns + _to_wall_ns(),
            attributes={
                names.STEP_ID: done.order.step.step_id,
                names.STEP_EPOCH: done.order.epoch,
                names.STEP_SEQUENCES: len(slices),
                names.STEP_TOKENS: sum(piece.count for piece in slices),
                names.EXECUTOR_INSTANCE: self._instance_id,
            },
        )
        if cut:
            span.set_attribute(names.STEP_LINKS_CUT, cut)
        return span


def phases(done: StepDone, result: StepResult) -> dict[str, int]:
    """Nanoseconds from arrival to the result, by phase; they add up to the whole."""
    timings = result.timings
    known = {
        "wait": timings.wait_ns,
        "prepare": timings.prepare_ns,
        "forward": timings.forward_ns,
        "sample": timings.sample_ns,
    }
    return known | {"finish": max(0, done.ended_ns - done.arrived_ns - sum(known.values()))}


def gap_ns(last: StepDone | None, done: StepDone) -> int:
    """Nanoseconds in which nothing ran, though a sequence of this step could have gone on: there was work."""
    if last is None or last.order.epoch != done.order.epoch:
        return 0
    goes_on = any(piece.new is None for piece in done.order.step.slices)
    return max(0, done.started_ns - last.ended_ns) if goes_on else 0


def prompt_part(piece: Slice, sequence: Sequence) -> int:
    """Prompt positions that a slice computes."""
    return max(0, min(piece.start + piece.count, sequence.prompt_len) - piece.start)


def _parent(traceparent: str | None) -> Context:
    """The step's own context where its owner gave one, else none: the span is a root."""
    return Context() if traceparent is None else trace_context.extract([(names.MD_TRACEPARENT, traceparent)])


def _to_wall_ns() -> int:
    """What turns the monotonic clock into time since 1970."""
    return time.time_ns() - time.monotonic_ns()
