"""The numbers that each service counts, under names that stay.

Owns metric names, buckets and label values; one frozen holder per service, made on a registry of its own (there
is no global one). Meanings follow vLLM's metrics of the same name. Must not know who serves them. Invariants:
every label value comes from a closed set, never from a request, so that the number of series is fixed when the
process starts; counters reconcile: requests received = sum of requests by outcome + those in the house, sampled
tokens = delivered + discarded.
"""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Generic, Self, TypeVar

from opentelemetry.trace import Span, format_span_id, format_trace_id
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

OTHER: Final = "other"

OUTCOMES: Final = (
    "stop",
    "length",
    "time_limit",
    "cancelled",
    "deadline_exceeded",
    "rejected",
    "unavailable",
    "slow_reader",
    "failed",
)
REJECTIONS: Final = (
    "invalid",
    "queue_full",
    "tokens_full",
    "quota",
    "degraded",
    "duplicate",
    "draining",
    "unsupported",
)
PREEMPTION_REASONS: Final = ("blocks", "executor_lost")
DISCARD_REASONS: Final = ("stopped", "cancelled", "preempted", "executor_lost", "failed")
BLOCK_STATES: Final = ("live", "cached", "free")
STEP_PHASES: Final = ("wait", "prepare", "forward", "sample", "finish")
CLAIM_RESULTS: Final = ("granted", "refused", "taken_over")
DEGRADE_RUNGS: Final = ("prefill_share", "single_answer", "max_tokens", "admission")
OPERATIONS: Final = ("chat", "text_completion", "generate_content")
ROUTES: Final = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics")
STATUS_CLASSES: Final = ("2xx", "3xx", "4xx", "5xx", "client_gone")

# OpenTelemetry GenAI conventions, `gen_ai.server.*`: these edges exactly.
GEN_AI_DURATION_EDGES: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
GEN_AI_TTFT_EDGES: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
GEN_AI_TPOT_EDGES: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

LATENCY_EDGES: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
SHORT_EDGES: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
TOKEN_EDGES: Final = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
ROW_EDGES: Final = tuple(float(1 << power) for power in range(15))

log = logging.getLogger(__name__)


M = TypeVar("M", Counter, Gauge, Histogram)


class By(Generic[M]):
    """A metric with one label whose values are known beforehand; every series exists from the start.

    `by["x"]` is the series of "x". With `other`, a value outside the set counts as "other"; without, it is a
    defect and raises KeyError.
    """

    def __init__(self, metric: M, values: Iterable[str], *, other: bool = False) -> None:
        self._series: dict[str, M] = {value: metric.labels(value) for value in values}
        self._other: M | None = metric.labels(OTHER) if other else None

    def __getitem__(self, value: str) -> M:
        if self._other is None:
            return self._series[value]
        return self._series.get(value, self._other)


def observe(histogram: Histogram, value: float, span: Span | None = None) -> None:
    """Record `value`, with the span's trace id as exemplar when the trace is kept.

    A value that no duration or count can have (negative, NaN, infinite) is a defect of the caller: it is logged
    and left out, since one of them would spoil the sum for good.
    """
    if not math.isfinite(value) or value < 0:
        log.error("a metric was given the value %r", value, stack_info=True)
        return
    context = span.get_span_context() if span is not None and span.is_recording() else None
    if context is None or not context.trace_flags.sampled:
        histogram.observe(value)
    else:
        ids = {"trace_id": format_trace_id(context.trace_id), "span_id": format_span_id(context.span_id)}
        histogram.observe(value, exemplar=ids)


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes metrics on one registry, all under the project's prefix."""

    registry: CollectorRegistry

    def counter(self, name: str, help: str) -> Counter:
        return Counter(f"tercet_{name}", help, registry=self.registry)

    def counter_by(self, name: str, help: str, label: str, values: Iterable[str]) -> By[Counter]:
        return By(Counter(f"tercet_{name}", help, [label], registry=self.registry), values, other=True)

    def gauge(self, name: str, help: str) -> Gauge:
        return Gauge(f"tercet_{name}", help, registry=self.registry)

    def gauge_by(self, name: str, help: str, label: str, values: Iterable[str]) -> By[Gauge]:
        return By(Gauge(f"tercet_{name}", help, [label], registry=self.registry), values)

    def histogram(self, name: str, help: str, edges: tuple[float, ...]) -> Histogram:
        return Histogram(f"tercet_{name}", help, registry=self.registry, buckets=edges)

    def histogram_by(
        self, name: str, help: str, edges: tuple[float, ...], label: str, values: Iterable[str]
    ) -> By[Histogram]:
        metric = Histogram(f"tercet_{name}", help, [label], registry=self.registry, buckets=edges)
        return By(metric, values, other=True)


@dataclass(frozen=True, slots=True)
class SchedulerMetrics:
    """The scheduler's numbers. Times in seconds, amounts in tokens, KV in blocks."""

    received: Counter
    requests: By[Counter]
    rejections: By[Counter]
    running: Gauge
    waiting: Gauge
    waiting_tokens: Gauge
    degraded: By[Counter]
    degrade_rungs: Gauge
    kv_blocks: By[Gauge]
    kv_usage: Gauge
    prompt_tokens: Counter
    cached_tokens: Counter
    sampled_tokens: Counter
    delivered_tokens: Counter
    discarded_tokens: By[Counter]
    preemptions: By[Counter]
    queue_time: Histogram
    time_to_first_token: Histogram
    inter_token: Histogram
    e2e: Histogram
    prefill_time: Histogram
    decode_time: Histogram
    request_prompt_tokens: Histogram
    request_output_tokens: Histogram
    step_round_trip: Histogram
    step_tokens: Histogram
    step_sequences: Histogram
    steps_in_flight: Gauge
    executors_connected: Gauge
    executors_lost: Counter

    @classmethod
    def make(cls, registry: CollectorRegistry) -> Self:
        make = _Maker(registry)
        return cls(
            received=make.counter("requests_received", "Requests that arrived, refused ones too"),
            requests=make.counter_by("requests", "Requests that ended, by how", "outcome", OUTCOMES),
            rejections=make.counter_by("admission_rejections", "Requests refused, by why", "reason", REJECTIONS),
            running=make.gauge("requests_running", "Requests that hold KV blocks"),
            waiting=make.gauge("requests_waiting", "Requests in the queue"),
            degraded=make.counter_by(
                "requests_degraded", "Requests that ended and went without something, by what", "rung", DEGRADE_RUNGS
            ),
            degrade_rungs=make.gauge("degrade_rungs", "Rungs of the degrade ladder in force"),
            waiting_tokens=make.gauge("waiting_tokens", "Prompt tokens in the queue"),
            kv_blocks=make.gauge_by("kv_blocks", "KV blocks by state, all executors", "state", BLOCK_STATES),
            kv_usage=make.gauge("kv_cache_usage_ratio", "Live KV blocks / all KV blocks"),
            prompt_tokens=make.counter("prompt_tokens", "Prompt tokens of admitted requests"),
            cached_tokens=make.counter("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache"),
            sampled_tokens=make.counter("sampled_tokens", "Tokens that executors sampled"),
            delivered_tokens=make.counter("delivered_tokens", "Sampled tokens that callers got: their usage"),
            discarded_tokens=make.counter_by(
                "discarded_tokens", "Sampled tokens that nobody got, by why", "reason", DISCARD_REASONS
            ),
            preemptions=make.counter_by(
                "preemptions", "Running requests put back, by why", "reason", PREEMPTION_REASONS
            ),
            queue_time=make.histogram("request_queue_time_seconds", "All waits in the queue", LATENCY_EDGES),
            time_to_first_token=make.histogram("time_to_first_token_seconds", "Arrival to first token", LATENCY_EDGES),
            inter_token=make.histogram("inter_token_latency_seconds", "Between two tokens of a stream", SHORT_EDGES),
            e2e=make.histogram("e2e_request_latency_seconds", "Arrival to end", LATENCY_EDGES),
            prefill_time=make.histogram("request_prefill_time_seconds", "Admission to first token", LATENCY_EDGES),
            decode_time=make.histogram("request_decode_time_seconds", "First token to last", LATENCY_EDGES),
            request_prompt_tokens=make.histogram("request_prompt_tokens", "Prompt length", TOKEN_EDGES),
            request_output_tokens=make.histogram("request_output_tokens", "Delivered length", TOKEN_EDGES),
            step_round_trip=make.histogram("step_round_trip_seconds", "Step sent to result applied", SHORT_EDGES),
            step_tokens=make.histogram("step_tokens", "Tokens planned in a step", TOKEN_EDGES),
            step_sequences=make.histogram("step_sequences", "Sequences in a step", ROW_EDGES),
            steps_in_flight=make.gauge("steps_in_flight", "Steps sent and not answered"),
            executors_connected=make.gauge("executors_connected", "Executors whose lease is held"),
            executors_lost=make.counter("executors_lost", "Leases lost"),
        )


@dataclass(frozen=True, slots=True)
class ExecutorMetrics:
    """The executor's numbers. A step's phases add up to its duration."""

    steps: By[Counter]
    step_duration: Histogram
    step_phase: By[Histogram]
    step_gap: Counter
    batch_tokens: Histogram
    batch_sequences: Histogram
    prompt_tokens: Counter
    sampled_tokens: Counter
    sequence_errors: Counter
    late_kernels: Counter
    claims: By[Counter]
    epoch: Gauge
    kv_pool_bytes: Gauge
    weights_bytes: Gauge

    @classmethod
    def make(cls, registry: CollectorRegistry) -> Self:
        make = _Maker(registry)
        return cls(
            steps=make.counter_by("executor_steps", "Steps, by end", "result", ("ok", "failed", "stale")),
            step_duration=make.histogram("executor_step_duration_seconds", "Step received to answered", SHORT_EDGES),
            step_phase=make.histogram_by(
                "executor_step_phase_seconds", "Parts of a step", SHORT_EDGES, "phase", STEP_PHASES
            ),
            step_gap=make.counter("executor_step_gap_seconds", "Idle between steps though a sequence went on"),
            batch_tokens=make.histogram("iteration_tokens", "Tokens computed in a step", TOKEN_EDGES),
            batch_sequences=make.histogram("iteration_sequences", "Sequences in a step", ROW_EDGES),
            prompt_tokens=make.counter("executor_prompt_tokens", "Prompt tokens computed, repeated work too"),
            sampled_tokens=make.counter("executor_sampled_tokens", "Tokens sampled"),
            sequence_errors=make.counter("corrupted_sequences", "Sequences that ended with NaN or alike"),
            late_kernels=make.counter("executor_late_kernels", "Kernels compiled after the start, in a step"),
            claims=make.counter_by("executor_claims", "Claims, by answer", "result", CLAIM_RESULTS),
            epoch=make.gauge("executor_epoch", "Epoch of the present owner; 0 before the first"),
            kv_pool_bytes=make.gauge("kv_pool_bytes", "Memory of the KV pool"),
            weights_bytes=make.gauge("weights_bytes", "Memory of the weights"),
        )


@dataclass(frozen=True, slots=True)
class GenAiMetrics:
    """The three `gen_ai.server.*` histograms of the OpenTelemetry GenAI conventions."""

    model: str
    duration: Histogram
    first_token: Histogram
    per_output_token: Histogram

    @classmethod
    def make(cls, registry: CollectorRegistry, model: str) -> Self:
        """model: the one that this process serves, since a label may not come from a request."""
        labels = ["gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model"]

        def histogram(name: str, help: str, edges: tuple[float, ...], *more: str) -> Histogram:
            return Histogram(f"gen_ai_server_{name}", help, [*labels, *more], registry=registry, buckets=edges)

        return cls(
            model=model,
            duration=histogram("request_duration_seconds", "Whole request", GEN_AI_DURATION_EDGES, "error_type"),
            first_token=histogram(
                "time_to_first_token_seconds", "Queue and prefill, successful requests", GEN_AI_TTFT_EDGES
            ),
            per_output_token=histogram(
                "time_per_output_token_seconds", "Time per token after the first", GEN_AI_TPOT_EDGES
            ),
        )

    def record(
        self,
        operation: str,
        outcome: str,
        duration_s: float,
        first_token_s: float | None,
        output_tokens: int,
        span: Span | None = None,
    ) -> None:
        """One finished request. outcome: of OUTCOMES; `stop` and `length` are successes. first_token_s: None when
        there was no token; output_tokens: delivered."""
        failed = outcome not in ("stop", "length")
        labels = (operation if operation in OPERATIONS else OTHER, "tercet", self.model)
        error = "" if not failed else outcome if outcome in OUTCOMES else "_OTHER"
        observe(self.duration.labels(*labels, error), duration_s, span)
        if failed or first_token_s is None:
            return
        observe(self.first_token.labels(*labels), first_token_s, span)
        if output_tokens > 1:
            per_token = (duration_s - first_token_s) / (output_tokens - 1)
            observe(self.per_output_token.labels(*labels), per_token, span)


@dataclass(frozen=True, slots=True)
class TokenizerMetrics:
    """The text edge's numbers."""

    received: Counter
    requests: By[Counter]
    rejections: By[Counter]
    running: Gauge
    tokenize: Histogram
    detokenize: Histogram
    prompt_bytes: Histogram
    stop_strings: Counter
    scheduler_ready: By[Gauge]
    scheduler_requests: By[Gauge]
    scheduler_losses: By[Counter]
    gen_ai: GenAiMetrics

    @classmethod
    def make(cls, registry: CollectorRegistry, model: str, schedulers: Iterable[str] = ()) -> Self:
        """schedulers: their targets as configured, since a label may not come from a request."""
        make = _Maker(registry)
        targets = tuple(schedulers)
        return cls(
            received=make.counter("requests_received", "Requests that arrived, refused ones too"),
            requests=make.counter_by("requests", "Requests that ended, by how", "outcome", OUTCOMES),
            rejections=make.counter_by("admission_rejections", "Requests refused, by why", "reason", REJECTIONS),
            running=make.gauge("requests_running", "Requests in the house"),
            tokenize=make.histogram("tokenize_seconds", "Template and encoding of a prompt", SHORT_EDGES),
            detokenize=make.histogram("detokenize_seconds", "Decoding over a whole answer", SHORT_EDGES),
            prompt_bytes=make.histogram("prompt_bytes", "Prompt text", tuple(float(1 << p) for p in range(4, 25, 2))),
            stop_strings=make.counter("stop_strings", "Requests that a stop string ended"),
            scheduler_ready=make.gauge_by("scheduler_ready", "1: the scheduler is ready", "scheduler", targets),
            scheduler_requests=make.gauge_by(
                "scheduler_requests", "Requests of this edge at a scheduler", "scheduler", targets
            ),
            scheduler_losses=make.counter_by(
                "scheduler_losses", "Calls of requests that ended at a scheduler and went on", "scheduler", targets
            ),
            gen_ai=GenAiMetrics.make(registry, model),
        )


@dataclass(frozen=True, slots=True)
class GatewayMetrics:
    """The HTTP edge's numbers."""

    requests: Counter
    duration: By[Histogram]
    open_streams: Gauge

    @classmethod
    def make(cls, registry: CollectorRegistry) -> Self:
        make = _Maker(registry)
        return cls(
            requests=Counter("tercet_http_requests", "HTTP requests", ["route", "status"], registry=registry),
            duration=make.histogram_by("http_request_duration_seconds", "HTTP request", LATENCY_EDGES, "route", ROUTES),
            open_streams=make.gauge("http_open_streams", "Event streams being sent"),
        )

    def record(self, route: str, status: str, duration_s: float, span: Span | None = None) -> None:
        """One finished HTTP request. route: of ROUTES; status: of STATUS_CLASSES; others count as "other"."""
        known = route if route in ROUTES else OTHER
        self.requests.labels(known, status if status in STATUS_CLASSES else OTHER).inc()
        observe(self.duration[route], duration_s, span)
