"""Draws a chart as SVG to be put into an HTML page. Pure; needs no library, and refers to nothing outside."""

from collections.abc import Callable, Sequence
from html import escape
from math import ceil, floor, log10
from typing import Final

from services.simulate.charts import Chart, Line, Points

# Mid tones, to be told from white and from black paper.
COLORS: Final = ("#3b8fd9", "#e0566b", "#3aa655", "#c58a1a", "#9b6ee0", "#1aa5a5", "#d65aa8", "#8a8a8a", "#a8a11a")
_WIDTH: Final = 640
_HEIGHT: Final = 360
_LEFT: Final = 56
_RIGHT: Final = 24
_TOP: Final = 50
_BOTTOM: Final = 46
_LEGEND_ROW: Final = 20
_LETTER: Final = 6.6  # width of one, about

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

    drawn = _merged(chart.lines)
    legend, rows = _legend([name for name, _ in drawn])
    height = _HEIGHT + _LEGEND_ROW * rows
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(chart.title, quote=True)}">',
        f'<text class="title" x="8" y="18">{escape(chart.title)}</text>',
        f'<text class="soft" x="8" y="{_TOP - 10}">{escape(chart.y_label)}</text>',
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
    label = escape(chart.x_label)
    parts.append(f'<text class="soft" x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">{label}</text>')
    for index, ((name, line), (left, row)) in enumerate(zip(drawn, legend, strict=True)):
        color = COLORS[index % len(COLORS)]
        dash = f' stroke-dasharray="{4 * (index // len(COLORS))} 3"' if index >= len(COLORS) else ""
        path = " ".join(f"{place(px):.1f},{y(py):.1f}" for px, py in line)
        parts.append(f'<polyline points="{path}" stroke="{color}"{dash}/>')
        at_y = _HEIGHT + _LEGEND_ROW * row + 6
        parts.append(
            f'<line x1="{left:g}" y1="{at_y}" x2="{left + 20:g}" y2="{at_y}" stroke="{color}" stroke-width="3"{dash}/>'
        )
        parts.append(f'<text x="{left + 26:g}" y="{at_y + 4}">{escape(name)}</text>')
    return "".join([*parts, "</svg>"])


def _merged(lines: Sequence[Line]) -> list[tuple[str, Points]]:
    """Lines that would hide each other are one, with all names."""
    names: dict[Points, list[str]] = {}
    for line in lines:
        names.setdefault(line.points, []).append(line.name)
    return [(" = ".join(called), points) for points, called in names.items()]


def _legend(names: Sequence[str]) -> tuple[list[tuple[float, int]], int]:
    """Where each entry begins, and in which row; how many rows there are."""
    places, left, row = [], float(_LEFT), 0
    for name in names:
        width = 26 + _LETTER * len(name) + 18
        if left > _LEFT and left + width > _WIDTH:
            left, row = float(_LEFT), row + 1
        places.append((left, row))
        left += width
    return places, row + 1


def linear_ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Round numbers around [low, high], at least two."""
    span = high - low or abs(high) or 1.0
    rough = span / wanted
    size = 10.0 ** floor(log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    first, last = floor(low / step), max(ceil(high / step), floor(low / step) + 1)
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int = 9) -> list[float]:
    """1, 2 and 5 times powers of ten around [low, high], at least two; where they are more than `most`, fewer within.
    low is above 0."""
    powers = range(floor(log10(low)) - 1, max(ceil(log10(high)), floor(log10(low)) + 1) + 1)
    around = [round(factor * 10.0**power, max(0, -power)) for power in powers for factor in (1, 2, 5)]
    first = max(index for index, tick in enumerate(around) if tick <= low)
    last = next(index for index, tick in enumerate(around) if tick >= high and index > first)
    ticks = around[first : last + 1]
    if len(ticks) <= most:
        return ticks
    whole = [tick for tick in ticks if abs(log10(tick) - round(log10(tick))) < 1e-9]
    return [*([] if whole[0] == ticks[0] else ticks[:1]), *whole, *([] if whole[-1] == ticks[-1] else ticks[-1:])]


def tick_label(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _scale(low: float, high: float, start: float, end: float) -> _Scale:
    return lambda value: start + (value - low) / (high - low) * (end - start)
