"""Two documents to ratios with their spread. Pure but for the seeded bootstrap."""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from services.bench.document import Columns, Document, StageResult, differences
from services.bench.summary import Band, band
from services.plots.table import Column, Table, number, table

RESAMPLES: Final = 1000
BOOTSTRAP_SEED: Final = 20_240_229
INTERVAL: Final = (0.025, 0.975)


@dataclass(frozen=True, slots=True)
class Metric:
    """of: None where it was not measured. column: its value of each request, where it has one."""

    name: str
    of: Callable[[StageResult], float | None]
    column: Callable[[Columns], Sequence[float | None]] | None = None


METRICS: Final = (
    Metric("output tok/s", lambda s: s.figures.output_tokens_per_s),
    Metric("requests/s", lambda s: s.figures.requests_per_s),
    Metric("goodput/s", lambda s: s.figures.goodput_per_s),
    Metric("TTFT P50", lambda s: s.figures.ttft.p50, lambda c: c.ttft),
    Metric("TTFT P99", lambda s: s.figures.ttft.p99),
    Metric("TPOT P50", lambda s: s.figures.tpot.p50, lambda c: c.tpot),
    Metric("ITL P99", lambda s: s.figures.itl.p99),
    Metric("E2E P50", lambda s: s.figures.e2e.p50, lambda c: c.e2e),
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """of the second to the first. how: what its range is of; empty: there is none."""

    stage: str
    metric: str
    first: float
    second: float
    ratio: Band
    how: str


class NotComparable(ValueError):
    """The runs differ in more than what is compared; differences: each by name."""

    def __init__(self, found: Sequence[str]) -> None:
        super().__init__("the runs can't be compared, they differ in " + "; ".join(found))
        self.differences = tuple(found)


def unlike(one: Document, other: Document) -> list[str]:
    """What makes a comparison unfair: another load, another machine. The servers differ: they are what is compared."""
    return [
        *differences(one.settings, other.settings),
        *differences(one.environment, other.environment, ("python", "load_average", "when")),
    ]


def compare(one: Document, other: Document, *, force: bool = False) -> list[Ratio]:
    """Of each stage that both have, in the first's order. Raises NotComparable unless `force`, or if there is none."""
    found = unlike(one, other)
    if found and not force:
        raise NotComparable(found)
    keys = [key for key in dict.fromkeys(stage.key for stage in one.stages) if key in {s.key for s in other.stages}]
    if not keys:
        raise NotComparable(["stages: none is in both"])
    ratios = []
    for key in keys:
        first = [stage for stage in one.stages if stage.key == key]
        second = [stage for stage in other.stages if stage.key == key]
        made = (_ratio(metric, ", ".join(key), first, second) for metric in METRICS)
        ratios += [ratio for ratio in made if ratio is not None]
    return ratios


def ratios_table(ratios: Sequence[Ratio], first: str, second: str, title: str = "") -> Table:
    columns: tuple[Column[Ratio], ...] = (
        Column("stage", lambda r: r.stage),
        Column("metric", lambda r: r.metric),
        Column(first, lambda r: number(r.first), "median over the repeats"),
        Column(second, lambda r: number(r.second), "likewise"),
        Column("ratio", lambda r: f"{r.ratio.median:.3f}", f"{second} / {first}; the median over pairs of repeats"),
        Column(
            "range",
            lambda r: f"{r.ratio.low:.3f} to {r.ratio.high:.3f} {r.how}" if r.how else "-",
            "over the pairs of repeats; with one repeat, a bootstrap's 95 % interval over the requests",
        ),
    )
    return table(columns, ratios, title)


def _ratio(metric: Metric, stage: str, first: Sequence[StageResult], second: Sequence[StageResult]) -> Ratio | None:
    """None where nothing was measured, or a zero is to be divided by."""
    other = {result.repeat: metric.of(result) for result in second}
    pairs = [
        (value, against)
        for result in first
        if (value := metric.of(result)) and (against := other.get(result.repeat)) is not None
    ]
    if not pairs:
        return None
    ratios = band([against / value for value, against in pairs])
    how = "over repeats"
    if len(pairs) == 1:
        how = ""
        if metric.column is not None:
            interval = _bootstrap(metric.column(first[0].requests), metric.column(second[0].requests))
            if interval is not None:
                ratios, how = Band(ratios.median, *interval), "by bootstrap"
    return Ratio(
        stage,
        metric.name,
        statistics.median(value for value, _ in pairs),
        statistics.median(against for _, against in pairs),
        ratios,
        how,
    )


def _bootstrap(first: Sequence[float | None], second: Sequence[float | None]) -> tuple[float, float] | None:
    """Efron's percentile interval of the ratio of medians, requests drawn with replacement from a fixed seed."""
    ours, theirs = ([value for value in column if value is not None] for column in (first, second))
    if len(ours) < 2 or len(theirs) < 2:
        return None
    source = random.Random(BOOTSTRAP_SEED)
    ratios = []
    for _ in range(RESAMPLES):
        below = statistics.median(source.choices(ours, k=len(ours)))
        above = statistics.median(source.choices(theirs, k=len(theirs)))
        if below:
            ratios.append(above / below)
    if not ratios:
        return None
    ratios.sort()
    low, high = (ratios[min(len(ratios) - 1, int(share * len(ratios)))] for share in INTERVAL)
    return low, high
