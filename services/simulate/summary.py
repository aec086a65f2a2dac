"""From a run to the figures that people compare.

Pure. Rates count what ended within the window of arrivals: what drains after the last arrival says nothing about a
load. Percentiles are nearest rank, over requests with a first token (for time per token: with two).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.simulate.records import NEVER, Outcome, Records, Run
from services.simulate.service import Balance, balance

WARM_UP = 0.1  # share of a closed loop's time in which it is not measured: it begins with everybody at once


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request must keep to be counted as goodput, ms. None: any."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """ms; None where there is nothing to take it of."""

    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class TenantSummary:
    name: str
    requests: int
    served: int
    ttft: Spread
    service: int  # uncached prompt tokens + 2 x output tokens, of what ended within the window
    weight: float


@dataclass(frozen=True, slots=True)
class Summary:
    name: str
    requests: int
    served: int
    cut: int
    expired: int
    refused: int
    unfit: int
    ttft: Spread
    tpot: Spread  # time per output token after the first, a request's mean
    e2e: Spread
    goodput_per_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    preemptions: int
    recomputed_tokens: int
    hit_ratio: float  # prompt tokens found in the cache
    fairness: float  # Jain's index over tenants' service in the window
    mean_waiting: float  # over the window
    peak_waiting: int
    mean_running: float
    utilization: float  # share of the executors' time that steps took, over the whole run
    tokens_per_step: float
    tenants: tuple[TenantSummary, ...]
    balance: Balance  # of weighted service between backlogged tenants


def summarize(
    name: str,
    run: Run,
    objectives: Objectives,
    request_ns: int = 0,
    *,
    closed: bool = False,
    weights: Mapping[str, float] | None = None,
) -> Summary:
    """request_ns: what users wait besides (CostModel.request_ns). weights: of tenants; who is not there has 1."""
    weights = {} if weights is None else weights
    records = run.records
    begin, end = window(run, closed=closed)
    seconds = max(end - begin, 1) / 1e9
    outcomes = records.outcome
    inside = [n for n in range(len(records)) if records.delivered[n] and begin <= records.ended[n] <= end]
    complete = [n for n in inside if outcomes[n] == Outcome.SERVED]
    good = sum(1 for n in complete if _keeps(records, n, objectives, request_ns))
    prompt = sum(records.prompt[n] for n in range(len(records)) if records.delivered[n])
    tenants = tuple(
        _tenant(records, tenant, index, inside, request_ns, weights.get(tenant, 1.0))
        for tenant, index in records.tenants.items()
    )
    points = [point for point in run.timeline if begin <= point.at_ns <= end]
    return Summary(
        name=name,
        requests=len(records),
        served=outcomes.count(Outcome.SERVED),
        cut=outcomes.count(Outcome.CUT),
        expired=outcomes.count(Outcome.EXPIRED),
        refused=outcomes.count(Outcome.REFUSED),
        unfit=outcomes.count(Outcome.UNFIT),
        ttft=spread(ttft(records, request_ns)),
        tpot=spread(tpot(records)),
        e2e=spread(e2e(records, request_ns)),
        goodput_per_s=good / seconds,
        requests_per_s=len(complete) / seconds,
        output_tokens_per_s=sum(records.delivered[n] for n in inside) / seconds,
        prompt_tokens_per_s=sum(records.prompt[n] for n in inside) / seconds,
        preemptions=run.preemptions,
        recomputed_tokens=sum(records.recomputed),
        hit_ratio=sum(records.cached) / prompt if prompt else 0.0,
        fairness=jain([tenant.service / tenant.weight for tenant in tenants]),
        mean_waiting=_mean(point.waiting for point in points),
        peak_waiting=run.peak_waiting,
        mean_running=_mean(point.running for point in points),
        utilization=sum(run.busy_ns) / (len(run.busy_ns) * run.end_ns) if run.end_ns else 0.0,
        tokens_per_step=run.step_tokens / run.steps if run.steps else 0.0,
        tenants=tenants,
        balance=balance(run.served, weights),
    )


def window(run: Run, *, closed: bool) -> tuple[int, int]:
    """ns. Where all came at once, until the last one ended."""
    begin = run.records.submitted[0] if len(run.records) else 0
    end = run.last_arrival_ns if run.last_arrival_ns > begin else run.end_ns
    return (int(begin + WARM_UP * (end - begin)) if closed else begin), end


def ttft(records: Records, request_ns: int = 0) -> list[float]:
    """ms, of each request with a first token."""
    return [
        (first - submitted + request_ns) / 1e6
        for first, submitted in zip(records.first, records.submitted, strict=True)
        if first != NEVER
    ]


def tpot(records: Records) -> list[float]:
    """ms, of each request with two tokens or more."""
    return [
        (last - first) / (delivered - 1) / 1e6
        for first, last, delivered in zip(records.first, records.last, records.delivered, strict=True)
        if delivered > 1
    ]


def e2e(records: Records, request_ns: int = 0) -> list[float]:
    """ms, of each request that was served to its end."""
    return [
        (ended - submitted + request_ns) / 1e6
        for ended, submitted, outcome in zip(records.ended, records.submitted, records.outcome, strict=True)
        if outcome == Outcome.SERVED
    ]


def spread(values: Iterable[float]) -> Spread:
    ordered = sorted(values)
    return Spread(*(percentile(ordered, share) for share in (0.5, 0.9, 0.95, 0.99)))


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Nearest rank: the smallest value that at least `share` of them don't exceed."""
    if not ordered:
        return None
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def jain(amounts: Sequence[float]) -> float:
    """(sum x)^2 / (n sum x^2): 1 when all get the same, 1/n when one gets all (Jain, Chiu, Hawe 1984)."""
    squares = sum(amount * amount for amount in amounts)
    return sum(amounts) ** 2 / (len(amounts) * squares) if squares else 1.0


def _keeps(records: Records, number: int, objectives: Objectives, request_ns: int) -> bool:
    first, delivered = records.first[number], records.delivered[number]
    submitted = records.submitted[number] - request_ns
    kept = True
    if objectives.ttft_ms is not None:
        kept = (first - submitted) / 1e6 <= objectives.ttft_ms
    if objectives.tpot_ms is not None and delivered > 1:
        kept = kept and (records.last[number] - first) / (delivered - 1) / 1e6 <= objectives.tpot_ms
    if objectives.e2e_ms is not None:
        kept = kept and (records.ended[number] - submitted) / 1e6 <= objectives.e2e_ms
    return kept


def _tenant(
    records: Records, name: str, index: int, inside: Sequence[int], request_ns: int, weight: float
) -> TenantSummary:
    mine = [number for number, tenant in enumerate(records.tenant) if tenant == index]
    return TenantSummary(
        name,
        len(mine),
        sum(1 for n in mine if records.outcome[n] == Outcome.SERVED),
        spread((records.first[n] - records.submitted[n] + request_ns) / 1e6 for n in mine if records.first[n] != NEVER),
        sum(
            records.prompt[n] - records.cached[n] + 2 * records.delivered[n]
            for n in inside
            if records.tenant[n] == index
        ),
        weight,
    )


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
