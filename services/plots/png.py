"""Writes charts as PNG files, with matplotlib. Imported only where PNGs are asked for: it is an extra."""

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from services.plots.chart import Chart
from services.plots.svg import COLORS


class NoPlotter(Exception):
    """matplotlib is not installed."""


def require() -> None:
    """Raises NoPlotter, so that nobody waits for a run whose charts can't be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise NoPlotter("--png needs matplotlib: pip install 'tercet-server[simulate]'; --html needs nothing")


def write(charts: Sequence[Chart], directory: Path) -> list[Path]:
    """One file a chart, named by its slug. Raises NoPlotter; OSError where the directory can't be written."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise NoPlotter(
            "PNG files need matplotlib: pip install 'tercet-server[simulate]'; --html needs nothing"
        ) from error
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for chart in charts:
        figure = figures.Figure(figsize=(8, 5), layout="constrained")  # draws without a display
        axes = figure.add_subplot()
        for index, line in enumerate(chart.lines):
            style = "-" if index < len(COLORS) else "--"
            axes.plot(*zip(*line.points, strict=True), style, color=COLORS[index % len(COLORS)], label=line.name)
        axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
        if chart.log_x:
            axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.grid(color="#e4e4e4")
        axes.legend()
        path = directory / f"{chart.slug}.png"
        figure.savefig(path, dpi=120)
        paths.append(path)
    return paths
