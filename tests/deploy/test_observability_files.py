"""Dashboard and alerts ask for metrics, labels and label values that the services have."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

import pytest
import yaml
from compose_file import ROOT
from opentelemetry.trace import INVALID_SPAN
from prometheus_client import CollectorRegistry

from services.metrics import ROUTES, STATUS_CLASSES, ExecutorMetrics, GatewayMetrics, SchedulerMetrics, TokenizerMetrics
from services.process_metrics import ProcessMetrics

DASHBOARD: Final = ROOT / "deploy/grafana/dashboards/tercet.json"
ALERTS: Final = ROOT / "deploy/prometheus/alerts.yml"
JOBS: Final = ("tokenizer", "scheduler", "executor")
# What Prometheus adds by itself.
ADDED_LABELS: Final = {"job", "instance"}
ADDED_METRICS: Final = {"up"}
OPERATORS: Final = {"and", "or", "unless"}

_GROUPING: Final = re.compile(r"\b(?:by|without)\s*\(([^)]*)\)")
_RANGE: Final = re.compile(r"\[[^\]]*\]")
_SELECTOR: Final = re.compile(r"\b([a-zA-Z_:][\w:]*)\b\s*(\{[^}]*\}|\()?")
_MATCHER: Final = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric in a query, with the values that its matchers name, per label."""

    metric: str
    labels: tuple[tuple[str, tuple[str, ...]], ...]


def selectors(query: str) -> list[Selector]:
    plain = _RANGE.sub("", _GROUPING.sub("", query))
    found = []
    for name, rest in _SELECTOR.findall(plain):
        if rest == "(" or name in OPERATORS:
            continue
        matchers = tuple((label, tuple(values.split("|"))) for label, _, values in _MATCHER.findall(rest))
        found.append(Selector(name, matchers))
    return found


def groupings(query: str) -> set[str]:
    return {label.strip() for labels in _GROUPING.findall(query) for label in labels.split(",")}


@cache
def series() -> dict[str, dict[str, list[dict[str, str]]]]:
    """Job -> sample name -> the label sets that it has once every kind of call was made."""
    made: dict[str, CollectorRegistry] = {}
    for job in JOBS:
        process = ProcessMetrics.make(job, "0", "0")
        process.observe_call("tercet.v1.Service/Call", "OK", 0.1, INVALID_SPAN)
        made[job] = process.registry
    TokenizerMetrics.make(made["tokenizer"], "model", ["scheduler:50052"]).gen_ai.record("chat", "stop", 2.0, 1.0, 10)
    gateway = GatewayMetrics.make(made["tokenizer"])
    for route in ROUTES:
        for status in STATUS_CLASSES:
            gateway.record(route, status, 0.1)
    SchedulerMetrics.make(made["scheduler"])
    ExecutorMetrics.make(made["executor"])
    jobs: dict[str, dict[str, list[dict[str, str]]]] = {}
    for job, registry in made.items():
        names: dict[str, list[dict[str, str]]] = {}
        for family in registry.collect():
            for sample in family.samples:
                names.setdefault(sample.name, []).append(dict(sample.labels))
        jobs[job] = names
    return jobs


def queries() -> Iterator[tuple[str, str]]:
    """Where a query stands, and the query."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            yield f"panel {panel['title']}: {target['legendFormat']}", target["expr"]
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]


ALL: Final = list(queries())


def test_selectors_are_read_out_of_a_query() -> None:
    query = 'sum by (le, job) (rate(a_bucket{x="1",y=~"2|3"}[$__rate_interval])) / b > 0.5 and changes(c[1h]) > 2'
    assert selectors(query) == [
        Selector("a_bucket", (("x", ("1",)), ("y", ("2", "3")))),
        Selector("b", ()),
        Selector("c", ()),
    ]
    assert groupings(query) == {"le", "job"}


@pytest.mark.parametrize("query", [query for _, query in ALL], ids=[where for where, _ in ALL])
def test_a_query_asks_for_what_there_is(query: str) -> None:
    asked = selectors(query)
    assert asked
    grouped = groupings(query)
    for selector in asked:
        if selector.metric in ADDED_METRICS:
            continue
        named = dict(selector.labels)
        jobs = [job for job in named.get("job", JOBS) if selector.metric in series()[job]]
        assert jobs, f"no service has {selector.metric}"
        samples = [labels for job in jobs for labels in series()[job][selector.metric]]
        for label in (set(named) | grouped) - ADDED_LABELS:
            assert any(label in labels for labels in samples), f"{selector.metric} has no label {label}"
        for label in set(named) - ADDED_LABELS:
            values = {labels.get(label) for labels in samples}
            assert set(named[label]) <= values, f"{selector.metric}: {label} is one of {sorted(map(str, values))}"


def test_the_dashboard_shows_what_operators_look_for() -> None:
    shown = {selector.metric for where, query in ALL if where.startswith("panel") for selector in selectors(query)}
    assert {
        "tercet_requests_total",
        "tercet_time_to_first_token_seconds_bucket",
        "tercet_inter_token_latency_seconds_bucket",
        "tercet_request_queue_time_seconds_bucket",
        "tercet_kv_blocks",
        "tercet_executor_steps_total",
        "tercet_iteration_sequences_sum",
        "tercet_process_restarts",
        "tercet_event_loop_lag_seconds_bucket",
    } <= shown


def test_panels_fit_the_grid_and_use_the_provisioned_source() -> None:
    sources = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/datasources.yml").read_text())
    uids = {source["uid"] for source in sources["datasources"]}
    taken: set[tuple[int, int]] = set()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + column, place["y"] + line) for column in range(place["w"]) for line in range(place["h"])}
        assert all(column < 24 for column, _ in cells)
        assert not cells & taken, panel["title"]
        taken |= cells
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] in uids
    (links,) = [source["jsonData"] for source in sources["datasources"] if source["uid"] == "prometheus"]
    assert links["exemplarTraceIdDestinations"] == [{"name": "trace_id", "datasourceUid": "jaeger"}]
    assert "jaeger" in uids
