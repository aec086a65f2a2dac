"""What is drawn, as values: each chart is a title, axes and lines. How it is drawn is `svg`'s and `png`'s.

Pure. Invariant: a line has at most `POINTS` points, so that a page over a million requests stays small.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from services.simulate.records import Records, Run
from services.simulate.summary import Summary, e2e, tpot, ttft

POINTS: Final = 200


Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: Points


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
        _shares("ttft", "Time to the first token: share of requests within it", results, ttft, 1000),
        _shares("tpot", "Time per output token: share of requests within it", results, lambda r, _: tpot(r)),
        _shares("e2e", "End to end: share of requests within it", results, e2e, 1000),
        _over_time("queue", "Requests that wait", results, waiting=True),
        _over_time("running", "Requests that run", results, waiting=False),
    ]
    return [chart for chart in charts if any(line.points for line in chart.lines)]


def _shares(
    slug: str,
    title: str,
    results: Sequence[Result],
    measure: Callable[[Records, int], list[float]],
    divisor: float = 1,
) -> Chart:
    """Of a measure in ms, drawn in ms, or in s where the divisor is 1,000."""
    lines = []
    for result in results:
        values = sorted(max(value / divisor, 1e-6) for value in measure(result.run.records, result.request_ns))
        lines.append(
            Line(result.summary.name, tuple(_thin([(v, 100 * (i + 1) / len(values)) for i, v in enumerate(values)])))
        )
    return Chart(slug, title, "ms" if divisor == 1 else "s", "%", tuple(lines), log_x=True)


def _over_time(slug: str, title: str, results: Sequence[Result], *, waiting: bool) -> Chart:
    lines = [
        Line(
            result.summary.name,
            tuple(_averaged([(p.at_ns / 1e9, p.waiting if waiting else p.running) for p in result.run.timeline])),
        )
        for result in results
    ]
    return Chart(slug, title, "simulated time, s", "requests", tuple(lines))


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Every so many of them, the first and the last included."""
    if len(points) <= POINTS:
        return points
    step = (len(points) - 1) / (POINTS - 1)
    return [points[round(index * step)] for index in range(POINTS)]


def _averaged(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means of neighbours: a peak between two drawn points shows."""
    size = -(-len(points) // POINTS)
    groups = [points[at : at + size] for at in range(0, len(points), size or 1)]
    return [(group[0][0], sum(value for _, value in group) / len(group)) for group in groups]
