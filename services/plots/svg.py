"""Draws a chart as SVG to be put into an HTML page. Pure; needs no library, and refers to nothing outside."""

from collections.abc import Callable
from html import escape
from math import ceil, floor, log10
from typing import Final

from services.plots.chart import Chart

COLORS: Final = ("#0b62a4", "#d1495b", "#2e8540", "#8a5a00", "#6f42c1", "#00808a", "#b0307f", "#555555", "#9a8c00")
_WIDTH: Final = 640
_HEIGHT: Final = 360
_LEFT: Final = 64
_RIGHT: Final = 16
_TOP: Final = 34
_BOTTOM: Final = 46
_LEGEND_ROW: Final = 18

_Scale = Callable[[float], float]


def draw(chart: Chart) -> str:
    """An <svg> element. Lines beyond the colours repeat them, dashed."""
    points = [point for line in chart.lines for point in line.points]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_ticks = log_ticks(min(xs), max(xs)) if chart.log_x else linear_ticks(min(0.0, *xs), max(xs))
    y_ticks = linear_ticks(min(0.0, *ys), max(ys))
    low, high = (log10(x_ticks[0]), log10(x_ticks[-1])) if chart.log_x else (x_ticks[0], x_ticks[-1])
    x = _scale(low, high, _LEFT, _WIDTH - _RIGHT)
    y = _scale(y_ticks[0], y_ticks[-1], _HEIGHT - _BOTTOM, _TOP)

    def place(value: float) -> float:
        return x(log10(value)) if chart.log_x else x(value)

    height = _HEIGHT + _LEGEND_ROW * len(chart.lines)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(chart.title, quote=True)}">',
        f'<text class="title" x="{_LEFT}" y="20">{escape(chart.title)}</text>',
    ]
    for tick in x_ticks:
        at = f"{place(tick):.1f}"
        parts.append(f'<line class="grid" x1="{at}" y1="{_TOP}" x2="{at}" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{at}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{tick_label(tick)}</text>')
    for tick in y_ticks:
        at = f"{y(tick):.1f}"
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{at}" x2="{_WIDTH - _RIGHT}" y2="{at}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at}" text-anchor="end" dy="4">{tick_label(tick)}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(chart.x_label)}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="20" text-anchor="end">{escape(chart.y_label)}</text>')
    for index, line in enumerate(chart.lines):
        color = COLORS[index % len(COLORS)]
        dash = f' stroke-dasharray="{4 * (index // len(COLORS))} 3"' if index >= len(COLORS) else ""
        path = " ".join(f"{place(px):.1f},{y(py):.1f}" for px, py in line.points)
        parts.append(f'<polyline points="{path}" stroke="{color}"{dash}/>')
        row = _HEIGHT + _LEGEND_ROW * index + 4
        parts.append(
            f'<line x1="{_LEFT}" y1="{row}" x2="{_LEFT + 24}" y2="{row}" stroke="{color}" stroke-width="3"{dash}/>'
        )
        parts.append(f'<text x="{_LEFT + 32}" y="{row + 4}">{escape(line.name)}</text>')
    return "".join([*parts, "</svg>"])


def linear_ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Round numbers around [low, high], at least two."""
    span = high - low or abs(high) or 1.0
    rough = span / wanted
    size = 10.0 ** floor(log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    first, last = floor(low / step), max(ceil(high / step), floor(low / step) + 1)
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten around [low, high], at least two. low is above 0."""
    first = floor(log10(low))
    return [10.0**power for power in range(first, max(ceil(log10(high)), first + 1) + 1)]


def tick_label(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _scale(low: float, high: float, start: float, end: float) -> _Scale:
    return lambda value: start + (value - low) / (high - low) * (end - start)
