"""Summaries as a table of text. Pure: one table of columns, which the HTML page shares."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from services.simulate.service import BIN_NS, WINDOW_BINS, Balance
from services.simulate.summary import Spread, Summary


@dataclass(frozen=True, slots=True)
class Column:
    """unit: of the numbers, where the title does not say."""

    title: str
    unit: str
    cell: Callable[[Summary], str]
    meaning: str

    @property
    def heading(self) -> str:
        return f"{self.title} {self.unit}".strip()


def number(value: float | None) -> str:
    """Three digits that count."""
    if value is None:
        return "-"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 or not size else f"{value:.2g}"


def _three(spread: Spread) -> str:
    return " / ".join(number(value) for value in (spread.p50, spread.p90, spread.p99))


COLUMNS: Final = (
    Column("run", "", lambda s: s.name, "policy, and what was varied"),
    Column("served", "", lambda s: f"{s.served:,}", "requests served to their end"),
    Column(
        "not served",
        "",
        lambda s: f"{s.requests - s.served:,}",
        "refused at a full queue, never fitting, out of time before or after the first token",
    ),
    Column("TTFT", "s P50/90/99", lambda s: of_seconds(s.ttft), "time to the first token, P50 / P90 / P99"),
    Column(
        "per token", "ms P50/90/99", lambda s: _three(s.tpot), "time per output token after the first, P50 / P90 / P99"
    ),
    Column("end to end", "s P50/90/99", lambda s: of_seconds(s.e2e), "P50 / P90 / P99 of what was served to its end"),
    Column("goodput", "/s", lambda s: number(s.goodput_per_s), "requests a second that kept all objectives"),
    Column("requests", "/s", lambda s: number(s.requests_per_s), "served within the window of arrivals"),
    Column("output", "tok/s", lambda s: number(s.output_tokens_per_s), "output tokens a second, likewise"),
    Column("step", "tok", lambda s: number(s.tokens_per_step), "positions computed in a step"),
    Column("preempted", "", lambda s: f"{s.preemptions:,}", "times that a request had to make room"),
    Column("cached", "%", lambda s: f"{100 * s.hit_ratio:.1f}", "prompt tokens found in the prefix cache"),
    Column("Jain", "", lambda s: f"{s.fairness:.3f}", "fairness of service between tenants, 1 is equal"),
    Column("queue", "", lambda s: f"{number(s.mean_waiting)} / {s.peak_waiting:,}", "waiting requests: mean / most"),
    Column("busy", "%", lambda s: f"{100 * s.utilization:.0f}", "of the executors' time"),
)


def text_table(summaries: Sequence[Summary]) -> str:
    rows = [[column.heading for column in COLUMNS], *([column.cell(s) for column in COLUMNS] for s in summaries)]
    return aligned(rows)


def tenants_table(summaries: Sequence[Summary]) -> str:
    """One row a run and tenant, then how far apart backlogged tenants were."""
    rows = [["run", "tenant", "weight", "requests", "served", "TTFT s", "service"]]
    rows += [
        [s.name, t.name, f"{t.weight:g}", f"{t.requests:,}", f"{t.served:,}", of_seconds(t.ttft), f"{t.service:,}"]
        for s in summaries
        for t in s.tenants
    ]
    return "\n".join([aligned(rows), *(f"{s.name}: {balance_line(s.balance)}" for s in summaries)])


def balance_line(balance: Balance) -> str:
    span = f"{WINDOW_BINS * BIN_NS / 1e9:g} s"
    if balance.worst is None:
        return f"in no window of {span} two tenants were backlogged all the time"
    return (
        f"weighted service of backlogged tenants is within {100 * balance.worst:.1f} % of each other in each of "
        f"{balance.windows:,} windows of {span}, furthest apart at {balance.worst_at_ns / 1e9:,.0f} s"
    )


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if not index else cell.rjust(width) for index, (cell, width) in _numbered(row, widths)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _numbered(row: Sequence[str], widths: Sequence[int]) -> enumerate[tuple[str, int]]:
    return enumerate(zip(row, widths, strict=True))


def of_seconds(spread: Spread) -> str:
    """Of a spread in ms."""
    values = (spread.p50, spread.p90, spread.p99)
    return " / ".join(number(None if value is None else value / 1000) for value in values)
