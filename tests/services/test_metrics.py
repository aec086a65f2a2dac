"""Names, buckets, exemplars, closed labels, and the little server that shows them."""

import asyncio
import logging
import math
import re
import time
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import INVALID_SPAN
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from services import metrics
from services.errors import FailedPrecondition
from services.health import Readiness
from services.metrics import (
    ExecutorMetrics,
    GatewayMetrics,
    GenAiMetrics,
    SchedulerMetrics,
    TokenizerMetrics,
    observe,
)
from services.metrics_http import HEAD_LIMIT, MetricsServer
from services.process_metrics import ProcessMetrics, render
from services.telemetry import SpanCounts

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"

NAMES = {
    "scheduler": """
        tercet_requests_received_total tercet_requests_total{outcome} tercet_admission_rejections_total{reason}
        tercet_requests_running tercet_requests_waiting tercet_waiting_tokens tercet_kv_blocks{state}
        tercet_kv_cache_usage_ratio tercet_prompt_tokens_total tercet_prefix_cache_hit_tokens_total
        tercet_sampled_tokens_total tercet_delivered_tokens_total tercet_discarded_tokens_total{reason}
        tercet_preemptions_total{reason} tercet_request_queue_time_seconds tercet_time_to_first_token_seconds
        tercet_inter_token_latency_seconds tercet_e2e_request_latency_seconds tercet_request_prefill_time_seconds
        tercet_request_decode_time_seconds tercet_request_prompt_tokens tercet_request_output_tokens
        tercet_step_round_trip_seconds tercet_step_tokens tercet_step_sequences tercet_steps_in_flight
        tercet_executors_connected tercet_executors_lost_total tercet_degrade_rungs
        tercet_requests_degraded_total{rung}
    """,
    "executor": """
        tercet_executor_steps_total{result} tercet_executor_step_duration_seconds
        tercet_executor_step_phase_seconds{phase} tercet_executor_step_gap_seconds_total
        tercet_iteration_tokens tercet_iteration_sequences
        tercet_executor_prompt_tokens_total tercet_executor_sampled_tokens_total tercet_corrupted_sequences_total
        tercet_executor_claims_total{result} tercet_executor_late_kernels_total
        tercet_executor_epoch tercet_kv_pool_bytes tercet_weights_bytes
    """,
    "tokenizer": """
        tercet_requests_received_total tercet_requests_total{outcome} tercet_admission_rejections_total{reason}
        tercet_requests_running tercet_tokenize_seconds tercet_detokenize_seconds tercet_prompt_bytes
        tercet_stop_strings_total tercet_scheduler_ready{scheduler} tercet_scheduler_requests{scheduler}
        tercet_scheduler_losses_total{scheduler}
        gen_ai_server_request_duration_seconds{error_type,gen_ai_operation_name,gen_ai_provider_name,gen_ai_request_model}
        gen_ai_server_time_to_first_token_seconds{gen_ai_operation_name,gen_ai_provider_name,gen_ai_request_model}
        gen_ai_server_time_per_output_token_seconds{gen_ai_operation_name,gen_ai_provider_name,gen_ai_request_model}
    """,
    "gateway": """
        tercet_http_requests_total{route,status} tercet_http_request_duration_seconds{route} tercet_http_open_streams
    """,
    "process": """
        tercet_build_info{service,version} tercet_config_info{hash} tercet_uncaught_exceptions_total{kind}
        tercet_process_restarts tercet_event_loop_lag_seconds tercet_python_threads process_threads
        rpc_server_call_duration_seconds{rpc_method,rpc_response_status_code} tercet_spans_total{result}
        tercet_spans_pending process_cpu_seconds_total process_resident_memory_bytes process_virtual_memory_bytes
        process_start_time_seconds process_open_fds process_max_fds
    """,
}


def families(registry: CollectorRegistry) -> dict[str, Any]:
    text, content_type = render(registry, OPEN_METRICS)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    return {family.name: family for family in text_string_to_metric_families(text.decode())}


def shown(registry: CollectorRegistry) -> set[str]:
    names = set()
    for family in families(registry).values():
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        names.add(name + ("{" + ",".join(labels) + "}" if labels else ""))
    return names


def span_of(provider: TracerProvider) -> Any:
    return provider.get_tracer("t").start_span("s")


def process_metrics(**more: Any) -> ProcessMetrics:
    return ProcessMetrics.make("scheduler", "0.1.0", "abc123", **more)


def test_names_and_labels_are_the_pinned_ones() -> None:
    made: dict[str, CollectorRegistry] = {name: CollectorRegistry() for name in NAMES}
    SchedulerMetrics.make(made["scheduler"])
    ExecutorMetrics.make(made["executor"])
    TokenizerMetrics.make(made["tokenizer"], "m", ["s:1"]).gen_ai.record("chat", "stop", 1.0, 0.5, 3)
    GatewayMetrics.make(made["gateway"]).record("/v1/models", "2xx", 0.1)
    process = process_metrics()
    process.observe_call("a.v1.S/M", "OK", 0.1, INVALID_SPAN)
    made["process"] = process.registry
    for name, registry in made.items():
        assert shown(registry) == set(NAMES[name].split()), name


def test_the_gateway_shares_the_registry_of_its_process() -> None:
    process = process_metrics()
    TokenizerMetrics.make(process.registry, "m").received.inc()
    GatewayMetrics.make(process.registry).record("/v1/models", "2xx", 0.1)
    assert value(process.registry, "tercet_requests_received_total") == 1
    assert value(process.registry, "tercet_http_requests_total", route="/v1/models", status="2xx") == 1
    assert value(process_metrics().registry, "tercet_requests_received_total") is None  # nothing is global


@pytest.mark.parametrize(
    ("name", "edges"),
    [
        ("request_duration", "0.01 0.02 0.04 0.08 0.16 0.32 0.64 1.28 2.56 5.12 10.24 20.48 40.96 81.92"),
        ("time_to_first_token", "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0"),
        ("time_per_output_token", "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5"),
    ],
)
def test_gen_ai_bucket_edges(name: str, edges: str) -> None:
    registry = CollectorRegistry()
    GenAiMetrics.make(registry, "m").record("chat", "length", 2.0, 1.0, 5)
    family = families(registry)[f"gen_ai_server_{name}_seconds"]
    found = [sample.labels["le"] for sample in family.samples if sample.name.endswith("_bucket")]
    assert found == [*edges.split(), "+Inf"]


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_gen_ai_values() -> None:
    registry = CollectorRegistry()
    made = GenAiMetrics.make(registry, "m")
    made.record("chat", "stop", 3.0, 1.0, 5)
    made.record("chat", "stop", 3.0, 1.0, 1)  # one token: no time between tokens
    made.record("chat", "cancelled", 9.0, 1.0, 5)
    made.record("made-up", "made-up", 9.0, None, 0)
    base = {"gen_ai_operation_name": "chat", "gen_ai_provider_name": "tercet", "gen_ai_request_model": "m"}
    prefix = "gen_ai_server_"
    assert value(registry, prefix + "request_duration_seconds_count", **base, error_type="") == 2
    assert value(registry, prefix + "request_duration_seconds_count", **base, error_type="cancelled") == 1
    other = {**base, "gen_ai_operation_name": "other", "error_type": "_OTHER"}
    assert value(registry, prefix + "request_duration_seconds_count", **other) == 1
    assert value(registry, prefix + "time_to_first_token_seconds_count", **base) == 2
    assert value(registry, prefix + "time_per_output_token_seconds_sum", **base) == 0.5
    assert value(registry, prefix + "time_per_output_token_seconds_count", **base) == 1


def test_strangers_labels_leave_the_number_of_series_flat() -> None:
    registry = CollectorRegistry()
    scheduler = SchedulerMetrics.make(registry)
    edge = CollectorRegistry()
    tokenizer = TokenizerMetrics.make(edge, "m")
    gateway = GatewayMetrics.make(edge)
    gateway.record("nonsense", "nonsense", 0.1)
    tokenizer.gen_ai.record("chat", "nonsense", 1.0, 0.5, 1)
    tokenizer.gen_ai.record("nonsense", "nonsense", 1.0, 0.5, 1)
    before = (registry_size(registry), registry_size(edge))
    for number in range(2000):
        scheduler.requests[f"o{number}"].inc()
        scheduler.rejections[f"r{number}"].inc()
        tokenizer.gen_ai.record(f"op{number}", f"o{number}", 1.0, 0.5, 2)
        gateway.record(f"/v1/{number}", f"{number}", 0.1)
    assert (registry_size(registry), registry_size(edge)) == before
    assert value(registry, "tercet_requests_total", outcome="other") == 2000
    with pytest.raises(KeyError):
        scheduler.kv_blocks["lost"]


def registry_size(registry: CollectorRegistry) -> int:
    return sum(len(family.samples) for family in registry.collect())


def test_all_outcomes_are_there_from_the_start() -> None:
    registry = CollectorRegistry()
    SchedulerMetrics.make(registry)
    for outcome in metrics.OUTCOMES:
        assert value(registry, "tercet_requests_total", outcome=outcome) == 0


def test_exemplars_name_kept_traces_only_and_need_openmetrics() -> None:
    registry = CollectorRegistry()
    made = SchedulerMetrics.make(registry)
    kept, dropped = TracerProvider(shutdown_on_exit=False), TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    span = span_of(kept)
    observe(made.e2e, 0.3, span)
    observe(made.queue_time, 0.3, span_of(dropped))
    observe(made.prefill_time, 0.3)
    trace_id = f"{span.get_span_context().trace_id:032x}"
    text = render(registry, OPEN_METRICS)[0].decode()
    assert re.findall(r'# \{span_id="[0-9a-f]{16}",trace_id="([0-9a-f]{32})"\} 0.3', text) == [trace_id]
    plain, content_type = render(registry, "")
    assert content_type.startswith("text/plain")
    assert b"trace_id" not in plain
    for provider in (kept, dropped):
        provider.shutdown()


@pytest.mark.parametrize("bad", [-0.001, math.nan, math.inf, -math.inf])
def test_impossible_values_are_logged_and_left_out(bad: float, caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    made = SchedulerMetrics.make(registry)
    with caplog.at_level(logging.ERROR):
        observe(made.e2e, bad)
    assert value(registry, "tercet_e2e_request_latency_seconds_count") == 0
    assert "a metric was given the value" in caplog.text


def test_process_facts() -> None:
    process = process_metrics(restarts=3, spans=lambda: SpanCounts(exported=5, failed=1, dropped=2, pending=4))
    registry = process.registry
    assert value(registry, "tercet_build_info", service="scheduler", version="0.1.0") == 1
    assert value(registry, "tercet_config_info", hash="abc123") == 1
    assert value(registry, "tercet_process_restarts") == 3
    assert [value(registry, "tercet_spans_total", result=result) for result in ("exported", "failed", "dropped")] == [
        5,
        1,
        2,
    ]
    for name in ("process_resident_memory_bytes", "process_threads", "process_open_fds", "tercet_python_threads"):
        assert (value(registry, name) or 0) > 0


async def test_uncaught_exceptions_are_counted_by_where_they_surface() -> None:
    process = process_metrics()
    root = logging.getLogger()
    handler = process.count_exceptions(root)
    try:
        for name in ("services.rpc_server", "asyncio", "grpc._cython.cygrpc", "services.logs.thread", "elsewhere"):
            try:
                raise ValueError(name)
            except ValueError:
                logging.getLogger(name).exception("caught")
        logging.getLogger("elsewhere").error("an error without an exception")
    finally:
        root.removeHandler(handler)
    counts = {
        kind: value(process.registry, "tercet_uncaught_exceptions_total", kind=kind)
        for kind in ("handler", "task", "grpc", "thread", "process", "other")
    }
    assert counts == {"handler": 1, "task": 1, "grpc": 1, "thread": 1, "process": 0, "other": 1}


async def test_loop_lag_sees_a_blocked_loop() -> None:
    process = process_metrics()
    task = asyncio.create_task(process.watch_loop())
    await asyncio.sleep(0)
    time.sleep(0.4)  # noqa: ASYNC251 - the blocked loop that is measured
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert value(process.registry, "tercet_event_loop_lag_seconds_count") == 1
    assert (value(process.registry, "tercet_event_loop_lag_seconds_sum") or 0) >= 0.1


# ---- The server


async def test_the_three_pages() -> None:
    process = process_metrics()
    readiness = Readiness(["s"])
    async with (
        MetricsServer("127.0.0.1:0", process.registry, readiness) as server,
        httpx.AsyncClient(base_url=f"http://{server.address}") as client,
    ):
        page = await client.get("/metrics", headers={"Accept": OPEN_METRICS})
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("application/openmetrics-text")
        assert page.text.endswith("# EOF\n")
        assert (await client.get("/metrics?x=1")).headers["content-type"].startswith("text/plain")
        assert (await client.get("/health")).status_code == 200
        ready = await client.get("/ready")
        assert (ready.status_code, ready.text) == (503, "starting\n")
        readiness.set_ready()
        assert (await client.get("/ready")).status_code == 200
        head = await client.head("/metrics")
        assert (head.status_code, head.content) == (200, b"")
        assert int(head.headers["content-length"]) > 100
        assert (await client.post("/metrics")).status_code == 405
        assert (await client.get("/etc/passwd")).status_code == 404


async def exchange(address: str, sent: bytes) -> bytes:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    if not sent:
        writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"\xff\xfe \x00 HTTP/1.1\r\n\r\n", b"404"),
        (b"GET / HTTP/2\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * HEAD_LIMIT, b"431"),
        (b"", b""),
    ],
)
async def test_nonsense_is_answered_or_dropped(sent: bytes, status: bytes) -> None:
    async with MetricsServer("127.0.0.1:0", process_metrics().registry, Readiness([])) as server:
        answer = await exchange(server.address, sent)
        assert answer[9:12] == status
        assert (await exchange(server.address, b"GET /health HTTP/1.1\r\n\r\n"))[9:12] == b"200"


async def test_a_failing_collector_is_a_500_and_the_server_lives(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def collect(self) -> Any:
            raise RuntimeError("secret")

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Broken())
    async with MetricsServer("127.0.0.1:0", registry, Readiness([])) as server:
        answer = await exchange(server.address, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert answer[9:12] == b"500"
        assert b"secret" not in answer
        assert "secret" in caplog.text
        assert (await exchange(server.address, b"GET /health HTTP/1.1\r\n\r\n"))[9:12] == b"200"
        with pytest.raises(FailedPrecondition, match=f"cannot listen on {server.address}"):
            await MetricsServer(server.address, registry, Readiness([])).start()
