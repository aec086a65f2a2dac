"""From outcomes to the figures that people compare. Pure: times are arguments, so tests need no clock.

Percentiles are nearest rank, over served requests. Rates count what was served with its end in the window: of a closed
loop from the first request's start to the last one's end, of an open loop the time of the arrivals.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.bench.record import Outcome
from services.simulate.summary import Objectives, Spread, percentile, spread

KNEE_GAIN: Final = 0.05


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one stage, once. Spreads in ms; client_share: CPU time of the client / time. late_ms: P99 of how long after
    its time a request was sent; None: a closed loop has no times."""

    requests: int
    served: int
    failures: dict[str, int]
    seconds: float
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2e: Spread
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float
    tokens_per_message: float | None
    client_share: float
    late_ms: float | None


def figures(
    outcomes: Sequence[Outcome], objectives: Objectives, *, open_loop: bool = False, client_cpu_ns: int = 0
) -> Figures:
    """outcomes: at least one."""
    begin, end = window(outcomes, open_loop=open_loop)
    seconds = max(end - begin, 1) / 1e9
    served = [one for one in outcomes if one.served]
    inside = [one for one in served if one.reply.ended_ns <= end]
    output = sum(one.reply.output for one in inside)
    messages = sum(len(one.reply.arrivals) for one in served)
    whole_ns = max(one.reply.ended_ns for one in outcomes) - begin
    late = sorted((one.started_ns - one.due_ns) / 1e6 for one in outcomes)
    return Figures(
        requests=len(outcomes),
        served=len(served),
        failures=dict(sorted(Counter(str(one.reply.failure) for one in outcomes if not one.served).items())),
        seconds=seconds,
        **spreads(served),
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=(output + sum(prompt_tokens(one) for one in inside)) / seconds,
        requests_per_s=len(inside) / seconds,
        goodput_per_s=sum(1 for one in inside if keeps(one, objectives)) / seconds,
        tokens_per_message=sum(one.reply.output for one in served) / messages if messages else None,
        client_share=client_cpu_ns / whole_ns if whole_ns > 0 else 0.0,
        late_ms=percentile(late, 0.99) if open_loop else None,
    )


def window(outcomes: Sequence[Outcome], *, open_loop: bool) -> tuple[int, int]:
    """ns. Where all of an open loop came at once, until the last one's end."""
    begin, last_due = min(one.due_ns for one in outcomes), max(one.due_ns for one in outcomes)
    if open_loop and last_due > begin:
        return begin, last_due
    return begin, max(one.reply.ended_ns for one in outcomes)


def spreads(served: Sequence[Outcome]) -> dict[str, Spread]:
    """ms, by name."""
    return {
        "ttft": spread(ns / 1e6 for one in served if (ns := one.ttft_ns) is not None),
        "tpot": spread(mean / 1e6 for one in served if (mean := one.tpot_ns) is not None),
        "itl": spread(ns / 1e6 for one in served for ns in one.gaps_ns),
        "e2e": spread(one.e2e_ns / 1e6 for one in served),
    }


def keeps(one: Outcome, objectives: Objectives) -> bool:
    """A served request within all limits. One without a second token has no time per token to exceed."""
    measured = (
        (one.ttft_ns, objectives.ttft_ms),
        (one.tpot_ns, objectives.tpot_ms),
        (one.e2e_ns, objectives.e2e_ms),
    )
    return one.served and all(ns is None or most is None or ns / 1e6 <= most for ns, most in measured)


def prompt_tokens(one: Outcome) -> int:
    return one.prompt_len if one.reply.prompt_tokens is None else one.reply.prompt_tokens


@dataclass(frozen=True, slots=True)
class Band:
    """Over repeats."""

    median: float
    low: float
    high: float


def band(values: Sequence[float]) -> Band:
    return Band(statistics.median(values), min(values), max(values))


def knee(points: Sequence[tuple[int, float]], gain: float = KNEE_GAIN) -> int | None:
    """The least concurrency that no greater one beats by more than `gain`; None while the greatest is it: still rising.

    points: (concurrency, throughput), by rising concurrency.
    """
    for index, (clients, rate) in enumerate(points[:-1]):
        if rate > 0 and all(later <= rate * (1 + gain) for _, later in points[index + 1 :]):
            return clients
    return None
