"""The scheduler's metrics, spans' attributes and log lines, told by the engine.

Owns what each number means; counts each request once. Must not decide anything.
"""

import logging
from typing import Final

import psutil

from services import names, trace_context
from services.errors import AlreadyExists, InvalidArgument, ResourceExhausted, Unimplemented
from services.logs import RequestLine, Surroundings, request_line, slow_request_line
from services.metrics import SchedulerMetrics, observe
from services.scheduler import endings
from services.scheduler.core.calls import Load, Totals, Usage
from services.scheduler.live import LiveAnswer, LiveRequest
from services.scheduler.observer import Refusal
from services.scheduler.request_trace import Times

log = logging.getLogger(__name__)

# The first word of an outcome, or the whole, -> the metrics' closed set.
METRIC_OUTCOMES = {
    "rejected": "rejected",
    "deadline": "deadline_exceeded",
    "cancelled": "cancelled",
    "error.slow_reader": "slow_reader",
    "error.executor_lost": "unavailable",
    "error.draining": "unavailable",
    "error.superseded": "cancelled",
    "error.model_changed": "unavailable",
    "error.no_executor": "unavailable",
}
# Kinds of refusal that count as rejected, and why.
REJECTED: Final = {
    InvalidArgument: "invalid",
    Unimplemented: "unsupported",
    AlreadyExists: "duplicate",
    ResourceExhausted: "queue_full",
}
DISCARDED_BY = {
    "stop": "stopped",
    "cancelled": "cancelled",
    "slow_reader": "cancelled",
    "unavailable": "executor_lost",
    "failed": "failed",
}


def metric_outcome(outcome: str) -> str:
    """The outcome as the metrics' label."""
    found = METRIC_OUTCOMES.get(outcome) or METRIC_OUTCOMES.get(outcome.partition(".")[0])
    if found is not None:
        return found
    return "failed" if outcome.startswith("error") else outcome


class SchedulerReport:
    """Satisfies `observer.Observer`."""

    def __init__(self, metrics: SchedulerMetrics, slow_request_s: float, model_name: str = "") -> None:
        self._metrics = metrics
        self._slow_request_s = slow_request_s
        self._load = Load(0, 0)
        self.model_name = model_name

    def accepted(self, live: LiveRequest) -> None:
        self._metrics.received.inc()
        caller = live.admission.caller
        live.span.set_attributes(
            {
                names.REQUEST_ID: caller.request_id,
                names.TENANT: caller.tenant,
                names.PRIORITY: caller.priority,
                names.ATTEMPT: caller.attempt,
                names.QUEUE_POSITION: live.position,
                names.PROMPT_TOKENS: len(live.admission.prompt_ids),
                names.GEN_AI_REQUEST_MAX_TOKENS: live.max_tokens,
                names.GEN_AI_REQUEST_TEMPERATURE: live.admission.sampling.temperature,
            }
        )

    def refused(self, refusal: Refusal) -> None:
        error = refusal.error
        why = REJECTED.get(type(error))
        if why is not None and error.field == "queued_tokens":
            why = "tokens_full"
        if why is not None and error.reason in ("QUOTA_EXCEEDED", "DEGRADED"):
            why = "quota" if error.reason == "QUOTA_EXCEEDED" else "degraded"
        outcome = endings.failure(error, names.SPAN_QUEUE) if why is None else f"rejected.{why}"
        self._metrics.received.inc()
        self._metrics.requests[metric_outcome(outcome)].inc()
        if why is not None:
            self._metrics.rejections[why].inc()
        refusal.span.set_attributes(
            {
                names.REQUEST_ID: refusal.request_id,
                names.TENANT: refusal.tenant,
                names.OUTCOME: outcome,
                names.PROMPT_TOKENS: refusal.prompt_tokens,
            }
        )
        request_line(
            RequestLine(
                request_id=refusal.request_id,
                trace_id=trace_context.trace_id(refusal.span),
                outcome=outcome,
                reason=error.reason,
                prompt_tokens=refusal.prompt_tokens,
                output_tokens=0,
                total_s=refusal.total_ns / 1e9,
                model=self.model_name,
                tenant=refusal.tenant,
            )
        )

    def tokens(self, answer: LiveAnswer) -> None:
        if answer.trace.inter_token_ns is not None:
            observe(self._metrics.inter_token, answer.trace.inter_token_ns / 1e9, answer.request.span)

    def preempted(self, answer: LiveAnswer, why: str) -> None:
        self._metrics.preemptions["executor_lost" if why == "executor_lost" else "blocks"].inc()

    def planned(self, tokens: int, sequences: int) -> None:
        observe(self._metrics.step_tokens, tokens)
        observe(self._metrics.step_sequences, sequences)

    def applied(self, elapsed_ns: int) -> None:
        observe(self._metrics.step_round_trip, elapsed_ns / 1e9)

    def lost(self) -> None:
        self._metrics.executors_lost.inc()

    def ended(self, live: LiveRequest, usage: Usage, times: Times, outcome: str) -> None:
        self._count(live, usage, times, outcome)
        self._attribute(live, usage, times, outcome)
        self._write(live, usage, times, outcome)

    def load(self, load: Load, totals: Totals) -> None:
        if load.rungs != self._load.rungs:
            names_of = ", ".join(rung.name.lower() for rung in load.rungs) or "none"
            log.warning("degrade ladder: %d rungs in force (%s)", len(load.rungs), names_of)
        self._load = load
        metrics = self._metrics
        metrics.degrade_rungs.set(len(load.rungs))
        metrics.waiting.set(load.waiting)
        metrics.waiting_tokens.set(load.waiting_tokens)
        lanes = load.lanes.values()
        metrics.running.set(sum(lane.running for lane in lanes))
        metrics.steps_in_flight.set(sum(lane.steps_in_flight for lane in lanes))
        metrics.executors_connected.set(len(lanes))
        total = sum(lane.blocks_total for lane in lanes)
        live = sum(lane.blocks_live + lane.blocks_fenced for lane in lanes)
        metrics.kv_blocks["live"].set(live)
        metrics.kv_blocks["cached"].set(sum(lane.blocks_cached for lane in lanes))
        metrics.kv_blocks["free"].set(sum(lane.blocks_free for lane in lanes))
        metrics.kv_usage.set(live / total if total else 0.0)

    def _count(self, live: LiveRequest, usage: Usage, times: Times, outcome: str) -> None:
        metrics, span = self._metrics, live.span
        label = metric_outcome(outcome)
        metrics.requests[label].inc()
        for rung in live.degraded:
            metrics.degraded[rung.name.lower()].inc()
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.cached_tokens.inc(usage.cached_tokens)
        metrics.sampled_tokens.inc(usage.delivered + usage.discarded)
        metrics.delivered_tokens.inc(usage.delivered)
        metrics.discarded_tokens[DISCARDED_BY.get(label, "cancelled")].inc(usage.discarded)
        observe(metrics.e2e, times.total_ns / 1e9, span)
        observe(metrics.queue_time, times.queue_ns / 1e9, span)
        observe(metrics.request_prompt_tokens, usage.prompt_tokens, span)
        observe(metrics.request_output_tokens, usage.delivered, span)
        if times.first_token_ns is not None:
            observe(metrics.time_to_first_token, times.first_token_ns / 1e9, span)
            observe(metrics.prefill_time, times.prefill_ns / 1e9, span)
            observe(metrics.decode_time, times.decode_ns / 1e9, span)

    def _attribute(self, live: LiveRequest, usage: Usage, times: Times, outcome: str) -> None:
        live.span.set_attributes(
            {
                names.OUTCOME: outcome,
                names.OUTPUT_TOKENS: usage.delivered,
                names.SAMPLED_TOKENS: usage.delivered + usage.discarded,
                names.DISCARDED_TOKENS: usage.discarded,
                names.CACHED_TOKENS: usage.cached_tokens,
                names.PREEMPTIONS: usage.preemptions,
                names.GEN_AI_USAGE_INPUT_TOKENS: usage.prompt_tokens,
                names.GEN_AI_USAGE_OUTPUT_TOKENS: usage.delivered,
                names.GEN_AI_LATENCY_QUEUE: times.queue_ns / 1e9,
                names.GEN_AI_LATENCY_E2E: times.total_ns / 1e9,
            }
        )
        if times.first_token_ns is not None:
            live.span.set_attributes(
                {
                    names.GEN_AI_LATENCY_TTFT: times.first_token_ns / 1e9,
                    names.GEN_AI_LATENCY_PREFILL: times.prefill_ns / 1e9,
                    names.GEN_AI_LATENCY_DECODE: times.decode_ns / 1e9,
                    names.GEN_AI_LATENCY_INFERENCE: (times.prefill_ns + times.decode_ns) / 1e9,
                }
            )

    def _write(self, live: LiveRequest, usage: Usage, times: Times, outcome: str) -> None:
        caller = live.admission.caller
        line = RequestLine(
            request_id=caller.request_id,
            trace_id=trace_context.trace_id(live.span),
            outcome=outcome,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.delivered,
            total_s=times.total_ns / 1e9,
            model=self.model_name,
            tenant=caller.tenant,
            cached_tokens=usage.cached_tokens,
            sampled_tokens=usage.delivered + usage.discarded,
            preemptions=usage.preemptions,
            queue_s=times.queue_ns / 1e9,
            prefill_s=times.prefill_ns / 1e9,
            first_token_s=None if times.first_token_ns is None else times.first_token_ns / 1e9,
            decode_s=times.decode_ns / 1e9,
            attempt=caller.attempt,
        )
        request_line(line)
        if line.total_s > self._slow_request_s:
            lanes = self._load.lanes.values()
            around = Surroundings(
                running=sum(lane.running for lane in lanes),
                waiting=self._load.waiting,
                kv_blocks_live=sum(lane.blocks_live for lane in lanes),
                kv_blocks_total=sum(lane.blocks_total for lane in lanes),
                rss_bytes=psutil.Process().memory_info().rss,
            )
            slow_request_line(line, around, self._slow_request_s)
