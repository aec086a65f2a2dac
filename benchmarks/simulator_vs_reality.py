"""How near the simulator comes to the real chain on this machine: `python benchmarks/simulator_vs_reality.py TRACE`.

Starts a chain, fits a cost model to it, measures its capacity from a closed loop, then replays the Azure conversation
trace (lengths / 4) at 60 % of that capacity; and simulates both with the same settings. What is compared: requests a
second of the closed loop, and the medians of the time to the first token and of the time per token, each the median
of the rounds. The machine should have nothing else to do. Takes at most 15 minutes.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import tercet
from services.catalogue import DEFAULT_MODEL
from services.scheduler.core.calls import CoreConfig, LaneSpec
from services.simulate.calibrate import calibrate
from services.simulate.cost import CostModel
from services.simulate.fleet import Fleet
from services.simulate.load import Request, reshaped
from services.simulate.scenario import read_cost
from services.simulate.simulation import Simulation
from services.simulate.summary import Objectives, Summary, summarize
from services.simulate.traces import read_trace
from services.simulate.workload import rate_of
from services.stack import Stack, StackOptions

LANE: Final = LaneSpec(block_size=16, total_blocks=1400, max_batched_tokens=512, max_sequences=32, max_model_len=8192)
CORE: Final = CoreConfig(watermark=0.01, max_queued_requests=1024, max_queued_tokens=1_000_000)
EXECUTOR: Final = ("--total-blocks", "1400", "--max-batched-tokens", "512", "--max-sequences", "32")
SCHEDULER: Final = ("--queue-limit-s", "600", "--first-token-limit-s", "600")  # the simulated one has no limits
DIVISOR: Final = 4
LOAD: Final = 0.6
CLIENTS: Final = 16
WARM_UP: Final = 0.1  # of the closed loop's requests
READY_S: Final = 300.0
ROUND_S: Final = 180.0  # of a round of the replay: on a slow machine it has fewer requests


@dataclass(frozen=True, slots=True)
class Told:
    """Of one request, seconds: when it was sent, its first and its last token."""

    sent: float
    first: float
    last: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Compared:
    what: str
    measured: float
    predicted: float
    unit: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Compares the simulator with the real chain.")
    parser.add_argument("trace", type=Path, help="azure_conv_2023.csv")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name or GGUF file")
    parser.add_argument("--requests", type=int, default=200, help="of a round of the replay, at most; default 200")
    parser.add_argument("--closed", type=int, default=100, help="requests of the closed loop; default 100")
    parser.add_argument("--rounds", type=int, default=3, help="of the replay; default 3")
    parser.add_argument("--cost", help="a preset or a JSON file, instead of calibrating")
    chosen = parser.parse_args(argv)
    trace = reshaped(read_trace(chosen.trace), length_divisor=DIVISOR)
    compared, cost = asyncio.run(_compare(trace, chosen))
    print(f"{'':<28}{'measured':>12}{'predicted':>12}{'error':>9}")
    for row in compared:
        print(f"{row.what:<28}{row.measured:>12.4g}{row.predicted:>12.4g}{row.error:>+9.1%}  {row.unit}")
    print(json.dumps({"cost": dataclasses.asdict(cost), "rows": [dataclasses.asdict(row) for row in compared]}))
    return 0


async def _compare(trace: list[Request], chosen: argparse.Namespace) -> tuple[list[Compared], CostModel]:
    options = StackOptions(chosen.model, log_level="error", scheduler=SCHEDULER, executor=EXECUTOR)
    async with Stack(options, os.environ) as stack:
        await stack.ready(READY_S)
        cost = read_cost(chosen.cost) if chosen.cost else await calibrate(stack.target, _tell)
        _tell(f"cost: {cost.to_json()}")
        async with tercet.AsyncClient(stack.target) as client:
            vocabulary = (await client.describe()).vocab_size
            closed = trace[: chosen.closed]
            capacity = await _closed_loop(client, closed, vocabulary)
            _tell(f"capacity: {capacity:.3f} requests/s")
            rounds = []
            count = min(chosen.requests, max(2, int(LOAD * capacity * ROUND_S)))
            for number in range(chosen.rounds):
                load = _slice(trace, number, count, LOAD * capacity)
                rounds.append((load, await _replay(client, load, vocabulary)))
                _tell(
                    f"round {number + 1}: TTFT {_ttft(rounds[-1][1]):.1f} ms, per token {_tpot(rounds[-1][1]):.1f} ms"
                )
    simulated_capacity = _simulate(cost, closed, clients=CLIENTS).requests_per_s
    predicted = [_simulate(cost, load) for load, _ in rounds]
    median = statistics.median
    return [
        Compared("closed loop", capacity, simulated_capacity, "requests/s"),
        Compared(
            "P50 time to first token",
            median(_ttft(r) for _, r in rounds),
            median(_p50(s.ttft.p50) for s in predicted),
            "ms",
        ),
        Compared(
            "P50 time per token", median(_tpot(r) for _, r in rounds), median(_p50(s.tpot.p50) for s in predicted), "ms"
        ),
    ], cost


def _slice(trace: list[Request], number: int, count: int, rate: float) -> list[Request]:
    """The round's own part of the trace, at the rate; time begins with it."""
    part = trace[number * count : (number + 1) * count]
    scale = rate / rate_of(part)
    return [dataclasses.replace(r, at_ns=int((r.at_ns - part[0].at_ns) / scale)) for r in part]


def _simulate(cost: CostModel, load: list[Request], clients: int | None = None) -> Summary:
    run = Simulation(Fleet(CORE, LANE, cost=cost), clients=clients).run(load)
    return summarize("", run, Objectives(), cost.request_ns, closed=clients is not None)


async def _closed_loop(client: tercet.AsyncClient, load: list[Request], vocabulary: int) -> float:
    """Requests a second between the end of the warm-up and the last one sent, as the simulator counts."""
    waiting, ends, sent = iter(load), [], []

    async def work() -> None:
        for request in waiting:
            sent.append(time.monotonic())
            await _send(client, request, vocabulary)
            ends.append(time.monotonic())

    await asyncio.gather(*(work() for _ in range(CLIENTS)))
    begin = sent[0] + WARM_UP * (sent[-1] - sent[0])
    return sum(begin <= end <= sent[-1] for end in ends) / (sent[-1] - begin)


async def _replay(client: tercet.AsyncClient, load: list[Request], vocabulary: int) -> list[Told]:
    began = time.monotonic()

    async def later(request: Request) -> Told:
        await asyncio.sleep(max(0.0, began + request.at_ns / 1e9 - time.monotonic()))
        return await _send(client, request, vocabulary)

    return list(await asyncio.gather(*(later(request) for request in load)))


async def _send(client: tercet.AsyncClient, request: Request, vocabulary: int) -> Told:
    """Random ids, drawn by the request's own numbers, so that no two share a prefix."""
    source = random.Random(f"{request.at_ns}/{request.prompt_len}/{request.output_len}")
    prompt = [source.randrange(1000, vocabulary) for _ in range(request.prompt_len)]
    sampling = tercet.SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True)
    sent = time.monotonic()
    first = last = sent
    tokens = 0
    async with client.generate(prompt, sampling=sampling, timeout=900) as stream:
        async for delta in stream:
            if delta.token_ids:
                last = time.monotonic()
                first = first if tokens else last
                tokens += len(delta.token_ids)
    return Told(sent, first, last, tokens)


def _ttft(told: list[Told]) -> float:
    return 1e3 * statistics.median(one.first - one.sent for one in told)


def _tpot(told: list[Told]) -> float:
    return 1e3 * statistics.median((one.last - one.first) / (one.tokens - 1) for one in told if one.tokens > 1)


def _p50(value: float | None) -> float:
    if value is None:
        raise ValueError("nothing was served in the simulation")
    return value


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
