"""Goodput beyond capacity, on the real model through the whole chain: `python benchmarks/goodput_overload.py`.

Measures what the chain can do in a closed loop, and sends once, one and a half times and twice that, at random times.
A request is good when its first token comes within a limit and its last within another, both derived from the measured
pace. Once with limits (a queue no longer than what can be served in time, and the first-token limit on each request:
so what would come too late is refused or ends before its work), once without any. Prints a table and one JSON line.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

import tercet
from services.catalogue import DEFAULT_MODEL
from services.stack import Stack, StackOptions

READY_S: Final = 300.0
LOADS: Final = (1.0, 1.5, 2.0)
ORDINARY: Final = (1000, 40_000)  # ids of the default model that are neither control tokens nor rare
ROWS: Final = 8  # sequences in a step
WARM_UP: Final = 0.2  # of a run: those who come in it are not counted
TOTAL_SLACK: Final = 2.0  # of the whole time that a request took in the closed loop
NO_QUEUE_LIMIT: Final = ("--max-queued-requests", "1000000", "--max-queued-tokens", "1000000000")
NO_TIME_LIMIT: Final = tercet.TimeLimits(queue=600, first_token=600, total=3600)


@dataclass(frozen=True, slots=True)
class Shape:
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Objective:
    """Seconds: to the first token, and to the last."""

    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Told:
    """Seconds; None: it did not come."""

    first_s: float | None
    total_s: float | None
    refused: bool = False

    def good(self, objective: Objective) -> bool:
        return (
            self.first_s is not None
            and self.total_s is not None
            and self.first_s <= objective.first_token_s
            and self.total_s <= objective.total_s
        )


@dataclass(frozen=True, slots=True)
class Row:
    """Of the requests that were counted. goodput: good ones a second."""

    limits: bool
    load: float  # times the capacity
    sent: int
    refused: int
    late: int  # served, or given up, beyond the objective
    goodput: float
    first_token_p50_s: float | None


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    backend: str
    shape: Shape
    objective: Objective
    capacity: float  # requests a second
    queue: int  # most waiting, where there are limits
    rows: tuple[Row, ...]
    worst_of_peak: float  # with limits: the least goodput, as a part of the most
    without_of_with: float  # at the highest load


async def ask(client: tercet.AsyncClient, shape: Shape, seed: int, limits: tercet.TimeLimits) -> Told:
    source = random.Random(seed)
    prompt = [source.randrange(*ORDINARY) for _ in range(shape.prompt)]
    sampling = tercet.SamplingParams(temperature=0, max_tokens=shape.output, ignore_eos=True)
    began = time.monotonic()
    first: float | None = None
    try:
        async with client.generate(prompt, sampling=sampling, limits=limits, cache_bypass=True, timeout=900) as stream:
            async for _ in stream:
                first = first or time.monotonic() - began
    except (tercet.ResourceExhaustedError, tercet.DeadlineExceededError):
        return Told(first, None, refused=True)
    return Told(first, time.monotonic() - began)


async def closed_loop(client: tercet.AsyncClient, shape: Shape, seconds: float) -> tuple[float, list[Told]]:
    """Requests a second with twice as many clients as rows, and what each took once they were all under way."""
    told: list[tuple[float, Told]] = []
    began = time.monotonic()

    async def work(number: int) -> None:
        turn = 0
        while time.monotonic() < began + seconds:
            answer = await ask(client, shape, 1000 * number + turn, NO_TIME_LIMIT)
            told.append((time.monotonic(), answer))
            turn += 1

    await asyncio.gather(*(work(number) for number in range(2 * ROWS)))
    counted = [(at, one) for at, one in told if began + WARM_UP * seconds <= at <= began + seconds]
    if len(counted) < ROWS:
        raise SystemExit(f"only {len(counted)} requests ended within {seconds:g} s; use a smaller --output")
    return len(counted) / ((1 - WARM_UP) * seconds), [one for _, one in counted]


async def open_loop(
    client: tercet.AsyncClient,
    shape: Shape,
    rate: float,
    seconds: float,
    objective: Objective,
    limits: tercet.TimeLimits,
) -> tuple[list[Told], float]:
    """Those who came after the warm-up, and in how many seconds. What is left at the end is given the time in which it
    could still be good."""
    source = random.Random(f"{rate:.3f}")
    tasks: list[tuple[float, asyncio.Task[Told]]] = []
    began = time.monotonic()
    at = source.expovariate(rate)
    while at < seconds:
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        tasks.append((at, asyncio.create_task(ask(client, shape, 10**6 + len(tasks), limits))))
        at += source.expovariate(rate)
    await asyncio.wait([task for _, task in tasks], timeout=objective.total_s)
    told = []
    for came, task in tasks:
        answer = Told(None, None)
        if task.done():
            answer = task.result()
        task.cancel()
        if came >= WARM_UP * seconds:
            told.append(answer)
    await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
    return told, (1 - WARM_UP) * seconds


def row(told: Sequence[Told], seconds: float, load: float, objective: Objective, *, limits: bool) -> Row:
    good = sum(one.good(objective) for one in told)
    refused = sum(one.refused and one.first_s is None for one in told)
    first = [one.first_s for one in told if one.first_s is not None]
    return Row(
        limits=limits,
        load=load,
        sent=len(told),
        refused=refused,
        late=len(told) - good - refused,
        goodput=round(good / seconds, 2),
        first_token_p50_s=round(statistics.median(first), 2) if first else None,
    )


async def measure(chosen: argparse.Namespace) -> Report:
    shape = Shape(chosen.prompt, chosen.output)
    executor = ("--backend", chosen.backend, "--max-sequences", str(ROWS))
    if chosen.threads is not None:
        executor += ("--threads", str(chosen.threads))
    once = tercet.RetryPolicy(attempts=1)
    rows: list[Row] = []

    async def run(stack: Stack, *, limits: bool) -> None:
        bounds = tercet.TimeLimits(first_token=objective.first_token_s) if limits else NO_TIME_LIMIT
        async with tercet.AsyncClient(stack.target, retry=once) as client:
            await ask(client, shape, 1, NO_TIME_LIMIT)  # warm
            for load in LOADS:
                told, seconds = await open_loop(client, shape, load * capacity, chosen.seconds, objective, bounds)
                rows.append(row(told, seconds, load, objective, limits=limits))

    options = StackOptions(chosen.model, log_level="error", executor=executor, scheduler=NO_QUEUE_LIMIT)
    async with Stack(options, os.environ) as stack:
        await stack.ready(READY_S)
        async with tercet.AsyncClient(stack.target, retry=once) as client:
            await ask(client, shape, 0, NO_TIME_LIMIT)  # warm
            capacity, told = await closed_loop(client, shape, chosen.seconds)
        alone = statistics.median(one.total_s - one.first_s for one in told if one.total_s and one.first_s)
        objective = Objective(
            round(chosen.first_token * alone, 2), round(TOTAL_SLACK * (1 + chosen.first_token) * alone, 2)
        )
        await run(stack, limits=False)
    # As many as begin within the limit: the last in the queue has its first token just in time.
    queue = max(1, int(capacity * objective.first_token_s * chosen.margin))
    options = StackOptions(
        chosen.model, log_level="error", executor=executor, scheduler=("--max-queued-requests", str(queue))
    )
    async with Stack(options, os.environ) as stack:
        await stack.ready(READY_S)
        await run(stack, limits=True)
    with_limits = [one.goodput for one in rows if one.limits]
    without = [one.goodput for one in rows if not one.limits]
    return Report(
        model=chosen.model,
        backend=chosen.backend,
        shape=shape,
        objective=objective,
        capacity=round(capacity, 2),
        queue=queue,
        rows=tuple(rows),
        worst_of_peak=round(min(with_limits) / max(*with_limits, 1e-9), 3),
        without_of_with=round(without[-1] / max(with_limits[-1], 1e-9), 3),
    )


def show(report: Report) -> None:
    good = report.objective
    print(
        f"capacity {report.capacity:.2f} requests/s; good: first token within {good.first_token_s:g} s, "
        f"all within {good.total_s:g} s; with limits at most {report.queue} wait"
    )
    print(f"{'limits':<8}{'load':>6}{'sent':>7}{'refused':>9}{'late':>6}{'goodput':>9}{'first token P50 s':>19}")
    for one in report.rows:
        first = "-" if one.first_token_p50_s is None else f"{one.first_token_p50_s:.2f}"
        print(
            f"{'yes' if one.limits else 'no':<8}{one.load:>6.1f}{one.sent:>7}{one.refused:>9}{one.late:>6}"
            f"{one.goodput:>9.2f}{first:>19}"
        )
    print(f"with limits, the worst of the peak            {report.worst_of_peak:>6.1%}")
    print(f"without limits, of with them, at {LOADS[-1]:g} times      {report.without_of_with:>6.1%}")
    print(json.dumps(asdict(report)))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="goodput beyond capacity", allow_abbrev=False)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--threads", type=int, help="of the executor; default all cores")
    parser.add_argument("--prompt", type=int, default=64, help="tokens; default 64")
    parser.add_argument("--output", type=int, default=32, help="tokens; default 32")
    parser.add_argument("--seconds", type=float, default=25.0, help="of each of the 7 runs; default 25")
    parser.add_argument(
        "--first-token", type=float, default=2.0, help="its limit, in times of a request's decoding; default 2"
    )
    parser.add_argument("--margin", type=float, default=0.7, help="part of that limit that the queue may take")
    chosen = parser.parse_args(argv)
    if min(chosen.prompt, chosen.output) < 2 or min(chosen.seconds, chosen.first_token, chosen.margin) <= 0:
        parser.error("--prompt and --output must be at least 2, the others above 0")
    show(asyncio.run(measure(chosen)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
