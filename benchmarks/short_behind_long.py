"""A short request behind a long prompt, on the real model: `python benchmarks/short_behind_long.py`.

A prompt of 8,000 tokens is being computed when a short request comes. How many steps, those in flight included, and how
much time until its first token? Beside it: the same request alone, and what it would wait where prompts were not cut
into chunks (the time of the whole long prompt). Prints a table and one JSON line.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from real_lane import Lane, load, prompt

from services.catalogue import DEFAULT_MODEL
from services.scheduler.core.calls import CoreConfig

BEFORE: Final = 1  # steps of the long prompt before the short request comes
OUTPUT: Final = 8


@dataclass(frozen=True, slots=True)
class Report:
    """Of the short request, unless said otherwise. steps: from its coming to its first token. Seconds."""

    model: str
    backend: str
    long: int
    short: int
    steps: int
    tokens_of_steps: tuple[int, ...]
    first_token_s: float
    alone_s: float
    long_first_token_s: float
    long_alone_s: float


async def measure(chosen: argparse.Namespace) -> Report:
    sizes = {"context": chosen.context, "batched": chosen.batched, "sequences": 4}
    runner = load(chosen.model, chosen.backend, chosen.threads, **sizes)
    vocabulary, core = runner.capacity.vocab_size, CoreConfig(prefill_chunk=chosen.batched // 2)
    warm = Lane(runner, core)
    warm.submit(prompt(chosen.short, 1, vocabulary), OUTPUT)
    warm.run()

    alone = Lane(runner, core)
    only = alone.submit(prompt(chosen.short, 2, vocabulary), OUTPUT)
    alone.run()

    whole = Lane(runner, core)
    big = whole.submit(prompt(chosen.long, 3, vocabulary), OUTPUT)
    whole.run()

    lane = Lane(runner, core)
    long = lane.submit(prompt(chosen.long, 3, vocabulary), OUTPUT)
    for _ in range(BEFORE):
        lane.step()
    lane.plan()  # as when serving: two steps are in flight when it comes
    short = lane.submit(prompt(chosen.short, 2, vocabulary), OUTPUT)
    lane.run()
    steps = short.tokens[0][1] - short.steps
    return Report(
        model=chosen.model,
        backend=chosen.backend,
        long=chosen.long,
        short=chosen.short,
        steps=steps,
        tokens_of_steps=tuple(lane.tokens[short.steps : short.steps + steps]),
        first_token_s=round(short.latency(1), 3),
        alone_s=round(only.latency(1), 3),
        long_first_token_s=round(long.latency(1), 2),
        long_alone_s=round(big.latency(1), 2),
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="a short request behind a long prompt", allow_abbrev=False)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--long", type=int, default=8000, help="tokens of the long prompt; default 8000")
    parser.add_argument("--short", type=int, default=32, help="tokens of the short one; default 32")
    parser.add_argument("--batched", type=int, default=512, help="tokens of a step; half of it is a chunk; default 512")
    chosen = parser.parse_args(argv)
    if min(chosen.short, chosen.batched) < 2 or not 4 * chosen.batched <= chosen.long <= chosen.context - OUTPUT:
        parser.error(f"--long must be at least four times --batched, and at most --context less {OUTPUT}")
    report = asyncio.run(measure(chosen))
    rows = (
        ("steps until its first token", f"{report.steps}, of {'+'.join(map(str, report.tokens_of_steps))} tokens"),
        ("its first token after", f"{report.first_token_s:.3f} s"),
        ("alone", f"{report.alone_s:.3f} s"),
        ("behind the whole long prompt", f"{report.long_alone_s + report.alone_s:.2f} s"),
        ("the long one's first token after", f"{report.long_first_token_s:.2f} s"),
        ("alone", f"{report.long_alone_s:.2f} s"),
    )
    for name, value in rows:
        print(f"{name:<34}{value}")
    print(json.dumps(asdict(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
