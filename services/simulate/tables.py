"""Summaries as tables. Pure."""

from collections.abc import Sequence
from typing import Final

from services.plots.table import Column, Table, number, table
from services.simulate.summary import Spread, Summary, TenantSummary


def _three(spread: Spread) -> str:
    return " / ".join(number(value) for value in (spread.p50, spread.p95, spread.p99))


COLUMNS: Final[tuple[Column[Summary], ...]] = (
    Column("run", lambda s: s.name, "policy, and what was varied"),
    Column("served", lambda s: f"{s.served:,}", "requests served to their end"),
    Column(
        "not served",
        lambda s: f"{s.requests - s.served:,}",
        "refused at a full queue, never fitting, out of time before or after the first token",
    ),
    Column("TTFT ms", lambda s: _three(s.ttft), "time to the first token, P50 / P95 / P99"),
    Column("per token ms", lambda s: _three(s.tpot), "time per output token after the first, P50 / P95 / P99"),
    Column("end to end s", lambda s: _three(_seconds(s.e2e)), "P50 / P95 / P99 of what was served to its end"),
    Column("goodput/s", lambda s: number(s.goodput_per_s), "requests a second that kept all objectives"),
    Column("req/s", lambda s: number(s.requests_per_s), "served within the window of arrivals"),
    Column("out tok/s", lambda s: number(s.output_tokens_per_s), "output tokens a second, likewise"),
    Column("tok/step", lambda s: number(s.tokens_per_step), "positions computed in a step"),
    Column("preempted", lambda s: f"{s.preemptions:,}", "times that a request had to make room"),
    Column("cached %", lambda s: f"{100 * s.hit_ratio:.1f}", "prompt tokens found in the prefix cache"),
    Column("Jain", lambda s: f"{s.fairness:.3f}", "fairness of service between tenants, 1 is equal"),
    Column("queue", lambda s: f"{number(s.mean_waiting)} / {s.peak_waiting:,}", "waiting requests: mean / most"),
    Column("busy %", lambda s: f"{100 * s.utilization:.0f}", "of the executors' time"),
)


_TENANT_COLUMNS: Final[tuple[Column[tuple[Summary, TenantSummary]], ...]] = (
    Column("run", lambda of: of[0].name),
    Column("tenant", lambda of: of[1].name),
    Column("requests", lambda of: f"{of[1].requests:,}"),
    Column("served", lambda of: f"{of[1].served:,}"),
    Column("TTFT ms", lambda of: _three(of[1].ttft)),
    Column("service", lambda of: f"{of[1].service:,}"),
)


def tables_of(summaries: Sequence[Summary]) -> list[Table]:
    """That of the runs; where there are several tenants, one with a row for each run and tenant too."""
    tables = [table(COLUMNS, summaries)]
    if any(len(summary.tenants) > 1 for summary in summaries):
        tables.append(table(_TENANT_COLUMNS, [(s, tenant) for s in summaries for tenant in s.tenants], "Tenants"))
    return tables


def _seconds(spread: Spread) -> Spread:
    values = (spread.p50, spread.p90, spread.p95, spread.p99)
    return Spread(*(None if value is None else value / 1000 for value in values))
