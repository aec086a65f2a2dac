"""Results as tables, charts and sentences. Pure."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from services.bench.document import Document, StageResult
from services.bench.summary import KNEE_GAIN, Band, band, knee
from services.plots.chart import Chart, Line, shares, worth_drawing
from services.plots.table import Column, Table, number, table
from services.simulate.summary import Spread

BUSY_CLIENT: Final = 0.5  # share of a core
LATE_CLIENT_MS: Final = 20.0


@dataclass(frozen=True, slots=True)
class Row:
    """A stage over its repeats."""

    results: tuple[StageResult, ...]

    @property
    def first(self) -> StageResult:
        return self.results[0]

    def over(self, value: Callable[[StageResult], float | None]) -> Band | None:
        found = [one for result in self.results if (one := value(result)) is not None]
        return band(found) if found else None


def rows_of(results: Sequence[StageResult]) -> list[Row]:
    keys = dict.fromkeys(result.key for result in results)
    return [Row(tuple(result for result in results if result.key == key)) for key in keys]


def _median(value: Callable[[StageResult], float | None], *, with_range: bool = False) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        found = row.over(value)
        if found is None:
            return "-"
        if len(row.results) == 1 or not with_range:
            return number(found.median)
        return f"{number(found.median)} ({number(found.low)} to {number(found.high)})"

    return cell


def _three(of: Callable[[StageResult], Spread]) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        bands = (row.over(lambda r: of(r).p50), row.over(lambda r: of(r).p95), row.over(lambda r: of(r).p99))
        return " / ".join(number(None if one is None else one.median) for one in bands)

    return cell


def _failed(row: Row) -> str:
    total: dict[str, int] = {}
    for result in row.results:
        for name, count in result.figures.failures.items():
            total[name] = total.get(name, 0) + count
    return ", ".join(f"{count} {name}" for name, count in total.items()) or "0"


COLUMNS: Final[tuple[Column[Row], ...]] = (
    Column("prompts", lambda r: r.first.name, "tokens of a prompt and of an answer, or the trace that they are from"),
    Column("load", lambda r: r.first.load, "clients that each wait for their answer, or arrivals a second"),
    Column("served", lambda r: f"{sum(one.figures.served for one in r.results):,}", "requests, over all repeats"),
    Column(
        "failed",
        _failed,
        "timeout: the client's or a server's limit passed. refused: nobody there, busy, draining. invalid: not taken. "
        "failed: an error before the first token. cut: the stream ended without its end. wrong count: other than the "
        "asked number of tokens, in or out. None of them is in any other column",
    ),
    Column(
        "output tok/s",
        _median(lambda s: s.figures.output_tokens_per_s, with_range=True),
        "output tokens of served requests / time from the first request's start to the last one's end (of arrivals at "
        "given times: what ended during the arrivals / their time). Median over the repeats (least to most)",
    ),
    Column("total tok/s", _median(lambda s: s.figures.total_tokens_per_s), "the same with the prompts' tokens"),
    Column("req/s", _median(lambda s: s.figures.requests_per_s), "served requests over the same time"),
    Column("goodput/s", _median(lambda s: s.figures.goodput_per_s), "those of them that kept every --slo"),
    Column(
        "TTFT ms",
        _three(lambda s: s.figures.ttft),
        "time to first token: from when the request was due (connecting included) to the first message that carries a "
        "token. P50 / P95 / P99, nearest rank; the median over the repeats of each",
    ),
    Column(
        "TPOT ms",
        _three(lambda s: s.figures.tpot),
        "time per output token of a request: (last message with tokens - first) / (output tokens - 1)",
    ),
    Column(
        "ITL ms",
        _three(lambda s: s.figures.itl),
        "inter-token latency: every gap between one message with tokens and the next, over all requests",
    ),
    Column(
        "tok/msg",
        _median(lambda s: s.figures.tokens_per_message),
        "output tokens / messages that carried any: above 1, ITL is not a time per token",
    ),
    Column("E2E ms", _three(lambda s: s.figures.e2e), "from when the request was due to the end of its stream"),
    Column(
        "client CPU",
        _median(lambda s: 100 * s.figures.client_share),
        "CPU time of this client, % of one core: near 100 it is the client that is measured",
    ),
)


def table_of(results: Sequence[StageResult], title: str = "") -> Table:
    return table(COLUMNS, rows_of(results), title)


def told(document: Document) -> list[str]:
    """Sentences about what was found, and warnings."""
    rows = rows_of(document.stages)
    return [*_knees(rows), *_warnings(rows)]


def facts(document: Document) -> list[str]:
    server, environment = document.server, document.environment
    return [
        f"{server.kind}, model {server.model}"
        + ("" if server.exact else "; it may end answers early, so lengths are as served"),
        f"{environment.cpu}, {environment.cores} cores, load {environment.load_average} before, {environment.when}",
        *told(document),
    ]


def charts_of(results: Sequence[StageResult]) -> list[Chart]:
    """By level where there are several of them, and how requests are spread."""
    rows = rows_of(results)
    open_loop = any(row.first.open_loop for row in rows)
    x = "requests a second" if open_loop else "clients at once"
    charts = [
        Chart(
            "throughput",
            "Output tokens a second",
            x,
            "tokens/s",
            _by_level(rows, lambda s: s.figures.output_tokens_per_s),
        ),
        Chart(
            "goodput", "Requests within the limits", x, "requests/s", _by_level(rows, lambda s: s.figures.goodput_per_s)
        ),
        Chart("ttft-level", "Time to the first token, P50 and P99", x, "ms", _p50_p99(rows, lambda s: s.figures.ttft)),
        Chart("tpot-level", "Time per output token, P50 and P99", x, "ms", _p50_p99(rows, lambda s: s.figures.tpot)),
    ]
    charts = [
        Chart(c.slug, c.title, c.x_label, c.y_label, tuple(one for one in c.lines if len(one.points) > 1))
        for c in charts
    ]
    spread = (
        ("ttft", "Time to the first token", lambda s: s.requests.ttft),
        ("tpot", "Time per output token", lambda s: s.requests.tpot),
        ("e2e", "End to end", lambda s: s.requests.e2e),
    )
    charts += [Chart(slug, title, "ms", "% of requests", _shares(rows, of), log_x=True) for slug, title, of in spread]
    return worth_drawing(charts)


def _by_level(rows: Sequence[Row], value: Callable[[StageResult], float | None], suffix: str = "") -> tuple[Line, ...]:
    names = dict.fromkeys(row.first.name for row in rows)
    return tuple(
        Line(
            f"{name}{suffix}",
            tuple(
                (row.first.level, found.median)
                for row in rows
                if row.first.name == name and (found := row.over(value)) is not None
            ),
        )
        for name in names
    )


def _p50_p99(rows: Sequence[Row], of: Callable[[StageResult], Spread]) -> tuple[Line, ...]:
    return (
        *_by_level(rows, lambda s: of(s).p50, ", P50"),
        *_by_level(rows, lambda s: of(s).p99, ", P99"),
    )


def _shares(rows: Sequence[Row], of: Callable[[StageResult], Sequence[float | None]]) -> tuple[Line, ...]:
    def values(row: Row) -> list[float]:
        return [
            value
            for result in row.results
            for value, failure in zip(of(result), result.requests.failure, strict=True)
            if value is not None and not failure
        ]

    lines = (shares(f"{row.first.name}, {row.first.load}", values(row)) for row in rows)
    return tuple(line for line in lines if line.points)


def _knees(rows: Sequence[Row]) -> list[str]:
    """Of each closed loop with several levels."""
    sentences = []
    for name in dict.fromkeys(row.first.name for row in rows):
        points = [
            (int(row.first.level), found.median)
            for row in rows
            if row.first.name == name
            and not row.first.open_loop
            and (found := row.over(lambda s: s.figures.output_tokens_per_s)) is not None
        ]
        if len(points) < 2:
            continue
        points.sort()
        (least, slow), (most, fast) = points[0], points[-1]
        gain = f"{name}: {most} at once give {fast / slow:.2f} times the tokens of {least}" if slow else name
        bend = knee(points)
        if bend is None:
            sentences.append(f"{gain}; no knee up to {most}: throughput still rises by more than {KNEE_GAIN:.0%}")
        else:
            sentences.append(f"{gain}; the knee is at {bend}: nothing beyond it gives {KNEE_GAIN:.0%} more")
    return sentences


def _warnings(rows: Sequence[Row]) -> list[str]:
    sentences = []
    for row in rows:
        where = f"{row.first.name}, {row.first.load}"
        share = statistics.median(one.figures.client_share for one in row.results)
        if share > BUSY_CLIENT:
            sentences.append(f"warning: {where}: this client took {share:.0%} of a core; it may be what is measured")
        late = row.over(lambda s: s.figures.late_ms)
        if late is not None and late.median > LATE_CLIENT_MS:
            sentences.append(f"warning: {where}: requests were sent up to {late.median:.0f} ms late (P99)")
        samples = dict.fromkeys(sample for result in row.results for sample in result.samples)
        sentences += [f"warning: {where}: {sample}" for sample in list(samples)[:3]]
    return sentences
