"""Tracing of one process: where its spans go, and what happens when nobody takes them.

Owns the tracer provider, the batching and the exporter; no global provider is set, tracers are passed on. Must
not know which spans exist. Invariants: a request never waits for a collector (spans queue up to a bound, then
the oldest are dropped and counted); closing takes at most the time it is given; without an endpoint nothing is
recorded and a caller's trace context passes through untouched.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, NoOpTracerProvider, SpanKind, TraceState
from opentelemetry.util.types import Attributes

from services.config import TelemetryConfig
from services.trace_context import link_to

QUEUE_LIMIT: Final = 4096
BATCH_LIMIT: Final = 512
EXPORT_EVERY_MS: Final = 500
CLOSE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class SpanCounts:
    """Spans that were sampled and ended, by what became of them. pending: still queued or on their way."""

    exported: int = 0
    failed: int = 0
    dropped: int = 0
    pending: int = 0


class LinkedSampler(Sampler):
    """For roots: a span with links is kept when a span it links to is, others by ratio of the trace id.

    So a step of the executor is there whenever a request that it served is there.
    """

    def __init__(self, ratio: float) -> None:
        self._by_ratio = TraceIdRatioBased(ratio)

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        chosen: Sampler = self._by_ratio
        if links:
            chosen = ALWAYS_ON if any(link.context.trace_flags.sampled for link in links) else ALWAYS_OFF
        return chosen.should_sample(parent_context, trace_id, name, kind, attributes, links)

    def get_description(self) -> str:
        return f"LinkedSampler{{{self._by_ratio.get_description()}}}"


class _Exporter(SpanExporter):
    """Passes batches on and counts what became of them."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._exported = self._failed = self._dropped = self._queued = self._sending = 0
        self._closed = False

    def ended(self) -> None:
        """A span enters the queue; a full queue loses its oldest."""
        with self._lock:
            if self._closed or self._queued == QUEUE_LIMIT:
                self._dropped += 1
            else:
                self._queued += 1

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._lock:
            self._queued = max(0, self._queued - len(spans))
            self._sending += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            with self._lock:
                self._sending -= len(spans)
                if result is SpanExportResult.SUCCESS:
                    self._exported += len(spans)
                else:
                    self._failed += len(spans)
        return result

    def shutdown(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._dropped += self._queued  # nothing takes them any more
            self._queued = 0
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)

    def counts(self) -> SpanCounts:
        with self._lock:
            return SpanCounts(self._exported, self._failed, self._dropped, self._queued + self._sending)


class _Processor(BatchSpanProcessor):
    def __init__(self, exporter: _Exporter) -> None:
        super().__init__(
            exporter,
            max_queue_size=QUEUE_LIMIT,
            schedule_delay_millis=EXPORT_EVERY_MS,
            max_export_batch_size=BATCH_LIMIT,
        )
        self._counting = exporter

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._counting.ended()
        super().on_end(span)


class Telemetry:
    """The tracing of a process. `tracer` starts its spans, `provider` is for libraries that make their own tracer;
    `exporting` says whether the spans go anywhere."""

    def __init__(
        self,
        provider: trace.TracerProvider,
        version: str,
        processor: BatchSpanProcessor | None,
        exporter: _Exporter | None,
    ) -> None:
        self.provider = provider
        self.tracer = provider.get_tracer("tercet", version)
        self._processor = processor
        self._exporter = exporter

    @property
    def exporting(self) -> bool:
        return self._exporter is not None

    def counts(self) -> SpanCounts:
        """What became of the spans so far."""
        return SpanCounts() if self._exporter is None else self._exporter.counts()

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Send what is queued, for at most `timeout_s` seconds; whether all of it was dealt with. Blocks."""
        if self._processor is None or self._exporter is None:
            return True
        # The processor's own shutdown has no time limit to set: it waits 30 s for an export in progress.
        closing = threading.Thread(target=self._processor.shutdown, name="telemetry-close", daemon=True)
        closing.start()
        closing.join(timeout_s)
        if closing.is_alive():
            self._exporter.shutdown()  # closes the channel, which ends the export in progress
        return not closing.is_alive()


def open_telemetry(
    config: TelemetryConfig, *, service: str, instance: str, version: str, max_links: int = 128
) -> Telemetry:
    """Set up the tracing of a process.

    service, instance, version: the resource that each span names. max_links: the largest batch, so that a step
    span keeps a link to each request (the SDK's default limit is 128 and it drops the rest silently).
    """
    if config.otlp_endpoint is None:
        return Telemetry(NoOpTracerProvider(), version, None, None)
    exporter = _Exporter(
        OTLPSpanExporter(
            endpoint=config.otlp_endpoint,
            insecure=config.otlp_endpoint.startswith("http://"),
            timeout=config.otlp_timeout_s,
        )
    )
    processor = _Processor(exporter)
    provider = TracerProvider(
        sampler=ParentBased(LinkedSampler(config.trace_sample_ratio)),
        resource=Resource.create({SERVICE_NAME: service, SERVICE_INSTANCE_ID: instance, SERVICE_VERSION: version}),
        shutdown_on_exit=False,
        span_limits=SpanLimits(max_links=max(max_links, 128)),
    )
    provider.add_span_processor(processor)
    return Telemetry(provider, version, processor, exporter)


def links_to(members: Iterable[tuple[str, Attributes]], limit: int) -> tuple[list[Link], int]:
    """Links to the spans that `traceparent` values name, at most `limit`, and how many were left out.

    Members without a valid header have no span to link to and count as neither.
    """
    found = [link for header, attributes in members if (link := link_to(header, attributes)) is not None]
    return found[:limit], max(0, len(found) - limit)
