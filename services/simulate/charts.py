"""What is drawn, as values: each chart is a title, axes and lines. How it is drawn is `svg`'s and `png`'s.

Pure. Invariant: a line has at most `POINTS` points, so that a page over a million requests stays small.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from services.simulate.records import Records, Run
from services.simulate.summary import Summary, e2e, tpot, ttft

POINTS: Final = 200


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """slug: its file's name. log_x: x is drawn on a logarithmic scale, and all x are above 0."""

    slug: str
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    log_x: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """A run, what it came to, and what users wait besides (ns)."""

    summary: Summary
    run: Run
    request_ns: int


def charts_of(results: Sequence[Result]) -> list[Chart]:
    """Those with something to draw."""
    charts = [
        _shares("ttft", "Time to the first token", results, ttft),
        _shares("tpot", "Time per output token", results, lambda records, _: tpot(records)),
        _shares("e2e", "End to end", results, e2e),
        _over_time("queue", "Requests that wait", results, waiting=True),
        _over_time("running", "Requests that run", results, waiting=False),
    ]
    return [chart for chart in charts if any(line.points for line in chart.lines)]


def _shares(slug: str, title: str, results: Sequence[Result], measure: Callable[[Records, int], list[float]]) -> Chart:
    lines = []
    for result in results:
        values = sorted(max(value, 1e-3) for value in measure(result.run.records, result.request_ns))
        lines.append(
            Line(result.summary.name, tuple(_thin([(v, 100 * (i + 1) / len(values)) for i, v in enumerate(values)])))
        )
    return Chart(slug, title, "ms", "% of requests", tuple(lines), log_x=True)


def _over_time(slug: str, title: str, results: Sequence[Result], *, waiting: bool) -> Chart:
    lines = [
        Line(
            result.summary.name,
            tuple(_thin([(p.at_ns / 1e9, p.waiting if waiting else p.running) for p in result.run.timeline])),
        )
        for result in results
    ]
    return Chart(slug, title, "s", "requests", tuple(lines))


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Every so many of them, the first and the last included."""
    if len(points) <= POINTS:
        return points
    step = (len(points) - 1) / (POINTS - 1)
    return [points[round(index * step)] for index in range(POINTS)]
