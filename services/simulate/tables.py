"""Summaries as tables. Pure."""

from collections.abc import Sequence
from typing import Final

from services.plots.table import Column, Table, number, table
from services.simulate.service import BIN_NS, WINDOW_BINS, Balance
from services.simulate.summary import Spread, Summary, TenantSummary


def _three(spread: Spread) -> str:
    return " / ".join(number(value) for value in (spread.p50, spread.p90, spread.p99))


def _in_seconds(spread: Spread) -> str:
    """Of a spread in ms."""
    values = (spread.p50, spread.p90, spread.p99)
    return " / ".join(number(None if value is None else value / 1000) for value in values)


COLUMNS: Final[tuple[Column[Summary], ...]] = (
    Column("run", lambda s: s.name, "policy, and what was varied"),
    Column("served", lambda s: f"{s.served:,}", "requests served to their end"),
    Column(
        "not served",
        lambda s: f"{s.requests - s.served:,}",
        "full queue, never fitting, or out of time",
    ),
    Column("TTFT", lambda s: _in_seconds(s.ttft), "time to the first token", "s P50/90/99"),
    Column("per token", lambda s: _three(s.tpot), "time per output token after the first", "ms P50/90/99"),
    Column("end to end", lambda s: _in_seconds(s.e2e), "P50 / P90 / P99 of what was served to its end", "s P50/90/99"),
    Column("goodput", lambda s: number(s.goodput_per_s), "requests a second that kept all objectives", "/s"),
    Column("requests", lambda s: number(s.requests_per_s), "served within the window of arrivals", "/s"),
    Column("output", lambda s: number(s.output_tokens_per_s), "output tokens a second, likewise", "tok/s"),
    Column("step", lambda s: number(s.tokens_per_step), "positions computed in a step", "tok"),
    Column("preempted", lambda s: f"{s.preemptions:,}", "times that a request had to make room"),
    Column("cached", lambda s: f"{100 * s.hit_ratio:.1f}", "prompt tokens found in the prefix cache", "%"),
    Column("Jain", lambda s: f"{s.fairness:.3f}", "fairness of service between tenants, 1 is equal"),
    Column("queue", lambda s: f"{number(s.mean_waiting)} / {s.peak_waiting:,}", "waiting requests: mean / most"),
    Column("busy", lambda s: f"{100 * s.utilization:.0f}", "of the executors' time", "%"),
)

_TENANT_COLUMNS: Final[tuple[Column[tuple[Summary, TenantSummary]], ...]] = (
    Column("run", lambda of: of[0].name),
    Column("tenant", lambda of: of[1].name),
    Column("weight", lambda of: f"{of[1].weight:g}"),
    Column("requests", lambda of: f"{of[1].requests:,}"),
    Column("served", lambda of: f"{of[1].served:,}"),
    Column("TTFT", lambda of: _in_seconds(of[1].ttft), unit="s P50/90/99"),
    Column("service", lambda of: f"{of[1].service:,}", "uncached prompt tokens + 2 x output tokens", "tokens"),
)


def tables_of(summaries: Sequence[Summary]) -> list[Table]:
    """That of the runs; where there are several tenants, one with a row for each run and tenant, and below it how far
    apart backlogged tenants were."""
    tables = [table(COLUMNS, summaries)]
    if any(len(summary.tenants) > 1 for summary in summaries):
        rows = [(summary, tenant) for summary in summaries for tenant in summary.tenants]
        notes = [f"{summary.name}: {balance_line(summary.balance)}" for summary in summaries]
        tables.append(table(_TENANT_COLUMNS, rows, "Tenants", notes))
    return tables


def balance_line(balance: Balance) -> str:
    span = f"{WINDOW_BINS * BIN_NS / 1e9:g} s"
    if balance.worst is None:
        return f"in no window of {span} two tenants were backlogged all the time"
    return (
        f"weighted service of backlogged tenants is within {100 * balance.worst:.1f} % of each other in each of "
        f"{balance.windows:,} windows of {span}, furthest apart at {balance.worst_at_ns / 1e9:,.0f} s"
    )
