"""What every process tells about itself, and the text in which metrics are served.

Owns the process's registry: its identity, CPU, memory, threads and files, defects, event-loop lag, RPC
durations, what became of its spans. Must not know any service's numbers. Invariant: nothing here is global; a
process has one ProcessMetrics, its tests have as many as they like.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Self

import psutil
from opentelemetry.trace import Span
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from services.metrics import By, observe
from services.telemetry import SpanCounts

# OpenTelemetry RPC conventions, `rpc.server.call.duration`
RPC_EDGES: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
LAG_EDGES: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
LAG_EVERY_S: Final = 0.25
EXCEPTION_KINDS: Final = ("handler", "task", "grpc", "thread", "process")

_KIND_OF_LOGGER: Final = {
    "services.rpc_server": "handler",
    "asyncio": "task",
    "grpc": "grpc",
    "services.logs.thread": "thread",
    "services.logs.process": "process",
}


@dataclass(frozen=True, slots=True)
class ProcessMetrics:
    """The registry of a process and what is common to all processes."""

    registry: CollectorRegistry
    exceptions: By[Counter]
    restarts: Gauge
    loop_lag: Histogram
    rpc_duration: Histogram

    @classmethod
    def make(
        cls,
        service: str,
        version: str,
        config_hash: str,
        *,
        restarts: int = 0,
        spans: Callable[[], SpanCounts] = SpanCounts,
    ) -> Self:
        """restarts: how often the supervisor started this process again; spans: Telemetry.counts."""
        registry = CollectorRegistry()
        Info("tercet_build", "This program", registry=registry).info({"service": service, "version": version})
        Info("tercet_config", "Hash of the effective configuration", registry=registry).info({"hash": config_hash})
        ProcessCollector(registry=registry)
        registry.register(_ThreadsCollector())
        registry.register(_SpanCollector(spans))
        exceptions = Counter(
            "tercet_uncaught_exceptions",
            "Exceptions that nothing expected, by where they surfaced",
            ["kind"],
            registry=registry,
        )
        made = cls(
            registry=registry,
            exceptions=By(exceptions, EXCEPTION_KINDS, other=True),
            restarts=Gauge("tercet_process_restarts", "Times that this process was started again", registry=registry),
            loop_lag=Histogram(
                "tercet_event_loop_lag_seconds",
                "How late a timer of the event loop fires",
                registry=registry,
                buckets=LAG_EDGES,
            ),
            rpc_duration=Histogram(
                "rpc_server_call_duration_seconds",
                "Calls served, by method and status",
                ["rpc_method", "rpc_response_status_code"],
                registry=registry,
                buckets=RPC_EDGES,
            ),
        )
        made.restarts.set(restarts)
        return made

    def observe_call(self, method: str, code: str, seconds: float, span: Span) -> None:
        """The CallObserver of `services.rpc.make_server`; methods are those that have a handler, so few."""
        observe(self.rpc_duration.labels(method, code), seconds, span)

    def count_exceptions(self, logger: logging.Logger) -> logging.Handler:
        """Count every exception logged at or below `logger`; returns the handler, to be removed again."""
        handler = _ExceptionCounter(self.exceptions)
        logger.addHandler(handler)
        return handler

    async def watch_loop(self) -> None:
        """Measure the event loop's lag until cancelled. Runs as a task of its own."""
        while True:
            due = time.monotonic() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            observe(self.loop_lag, max(0.0, time.monotonic() - due))


def render(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """The metrics as text and its content type; OpenMetrics, which has exemplars, where `accept` allows it."""
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _ExceptionCounter(logging.Handler):
    """Whoever swallows an unexpected exception logs it: grpc, asyncio, our interceptor and hooks alike."""

    def __init__(self, exceptions: By[Counter]) -> None:
        super().__init__(logging.ERROR)
        self._exceptions = exceptions

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None and record.exc_info[0] is not None:
            name = record.name
            kind = _KIND_OF_LOGGER.get(name) or _KIND_OF_LOGGER.get(name.partition(".")[0], "other")
            self._exceptions[kind].inc()


class _ThreadsCollector(Collector):
    def collect(self) -> Iterable[Metric]:
        python = GaugeMetricFamily("tercet_python_threads", "Threads that run Python", value=threading.active_count())
        with contextlib.suppress(psutil.Error):
            count = psutil.Process().num_threads()
            yield GaugeMetricFamily("process_threads", "Threads of the process", value=count)
        yield python


class _SpanCollector(Collector):
    def __init__(self, counts: Callable[[], SpanCounts]) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        counts = self._counts()
        family = CounterMetricFamily("tercet_spans", "Spans ended, by what became of them", labels=["result"])
        for result in ("exported", "failed", "dropped"):
            family.add_metric([result], getattr(counts, result))
        yield family
        yield GaugeMetricFamily("tercet_spans_pending", "Spans queued for the collector", value=counts.pending)
