"""What is drawn, as values: a chart is a title, axes and lines. How it is drawn is `svg`'s and `png`'s.

Pure. Invariant: a line has at most `POINTS` points, so that a page over a million requests stays small.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

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


def worth_drawing(charts: Iterable[Chart]) -> list[Chart]:
    """Those with something to draw."""
    return [chart for chart in charts if any(line.points for line in chart.lines)]


def shares(name: str, values: Iterable[float]) -> Line:
    """How many per cent of the values don't exceed x. Fits a logarithmic x."""
    ordered = sorted(max(value, 1e-6) for value in values)
    return Line(name, thinned([(v, 100 * (i + 1) / len(ordered)) for i, v in enumerate(ordered)]))


def thinned(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Every so many of them, the first and the last included."""
    if len(points) <= POINTS:
        return tuple(points)
    step = (len(points) - 1) / (POINTS - 1)
    return tuple(points[round(index * step)] for index in range(POINTS))


def averaged(points: Sequence[tuple[float, float]]) -> Points:
    """At most POINTS, each the mean of neighbours: a peak between two drawn points shows."""
    size = -(-len(points) // POINTS)
    groups = [points[at : at + size] for at in range(0, len(points), size or 1)]
    return tuple((group[0][0], sum(value for _, value in group) / len(group)) for group in groups)
