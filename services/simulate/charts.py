"""What of a run is drawn. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.plots.chart import Chart, Line, averaged, shares, worth_drawing
from services.simulate.records import Records, Run
from services.simulate.summary import Summary, e2e, tpot, ttft


@dataclass(frozen=True, slots=True)
class Result:
    """A run, what it came to, and what users wait besides (ns)."""

    summary: Summary
    run: Run
    request_ns: int


def charts_of(results: Sequence[Result]) -> list[Chart]:
    return worth_drawing(
        [
            _shares("ttft", "Time to the first token: share of requests within it", results, ttft, 1000),
            _shares("tpot", "Time per output token: share of requests within it", results, lambda r, _: tpot(r)),
            _shares("e2e", "End to end: share of requests within it", results, e2e, 1000),
            _over_time("queue", "Requests that wait", results, waiting=True),
            _over_time("running", "Requests that run", results, waiting=False),
        ]
    )


def _shares(
    slug: str,
    title: str,
    results: Sequence[Result],
    measure: Callable[[Records, int], list[float]],
    divisor: float = 1,
) -> Chart:
    """Of a measure in ms, drawn in ms, or in s where the divisor is 1,000."""
    lines = tuple(
        shares(result.summary.name, (ms / divisor for ms in measure(result.run.records, result.request_ns)))
        for result in results
    )
    return Chart(slug, title, "ms" if divisor == 1 else "s", "%", lines, log_x=True)


def _over_time(slug: str, title: str, results: Sequence[Result], *, waiting: bool) -> Chart:
    lines = tuple(
        Line(
            result.summary.name,
            averaged([(p.at_ns / 1e9, p.waiting if waiting else p.running) for p in result.run.timeline]),
        )
        for result in results
    )
    return Chart(slug, title, "simulated time, s", "requests", lines)
