"""Continuous batching against static batches, on the real model: `python benchmarks/continuous_batching.py`.

Groups of eight requests come without pause, all prompts of 32 tokens: seven want 20 tokens, one wants 1,000. What is
compared: useful tokens a second, useful tokens a step, and the median time until a request has what it wants, of

- `fcfs`: whoever is next joins as soon as a row is free;
- `static-padded`: nobody joins before the whole batch has ended, and a row that has what it wants goes on computing
  until then. The executor has no rows that are only padding, so they are made: each request of a batch asks for as many
  tokens as its longest, and those behind what it wanted count as nothing;
- `static-compact`: likewise, but a row that ended is not computed any more.

A request is counted as served when it has its tokens, not when its batch ends, which is in favour of the static ones.
With equal lengths all should be equal. Where the machine is too slow for all groups in the time allowed, fewer are run.
Prints a table and one JSON line.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from real_lane import Lane, load, prompt

from executor.runner import Runner
from services.catalogue import DEFAULT_MODEL
from services.scheduler.core.calls import CoreConfig

PROMPT: Final = 32
LONG_AT: Final = 3  # its place in the group
SAFETY: Final = 1.2  # of the estimated time: later tokens cost more than first ones
SERVED: Final = ("fcfs", "static-padded", "static-compact")


@dataclass(frozen=True, slots=True)
class Result:
    """tokens: useful ones. p50_s: until a request has what it wants."""

    policy: str
    requests: int
    tokens: int
    steps: int
    seconds: float
    tokens_per_s: float
    tokens_per_step: float
    p50_s: float


@dataclass(frozen=True, slots=True)
class Want:
    tokens: int
    longest: int  # of its group


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    backend: str
    batch: int
    groups: int
    long: int
    short: int
    mixed: tuple[Result, ...]
    equal: tuple[Result, ...]  # medians of the rounds
    ratios: dict[str, float]


def serve(runner: Runner, policy: str, wants: Sequence[Want]) -> Result:
    padded = policy == "static-padded"
    core = CoreConfig(policy="static-compact" if padded else policy, max_queued_requests=len(wants))
    lane = Lane(runner, core)
    asked = [
        lane.submit(prompt(PROMPT, number, runner.capacity.vocab_size), want.longest if padded else want.tokens)
        for number, want in enumerate(wants)
    ]
    lane.run()
    tokens = sum(want.tokens for want in wants)
    seconds = max(one.tokens[-1][0] for one in asked) - asked[0].submitted
    return Result(
        policy,
        len(wants),
        tokens,
        lane.steps,
        round(seconds, 2),
        round(tokens / seconds, 1),
        round(tokens / lane.steps, 2),
        round(statistics.median(one.latency(want.tokens) for one, want in zip(asked, wants, strict=True)), 2),
    )


def mixed(batch: int, groups: int, short: int, long: int) -> list[Want]:
    return [Want(long if at == LONG_AT % batch else short, long) for _ in range(groups) for at in range(batch)]


def affordable(runner: Runner, chosen: argparse.Namespace) -> int:
    """Groups that fit into the time, at the pace that the machine shows now."""
    probe = 24
    serve(runner, "fcfs", [Want(probe, probe)] * chosen.batch)  # warm
    one = serve(runner, "fcfs", [Want(probe, probe)]).seconds / probe
    full = serve(runner, "fcfs", [Want(probe, probe)] * chosen.batch).seconds / probe
    equal = 2 * chosen.rounds * 2 * chosen.equal * full

    def needs(groups: int) -> float:
        continuous = (-(-groups // chosen.batch) * chosen.long + groups * chosen.short) * full
        padded = groups * chosen.long * full
        compact = groups * (chosen.short * full + (chosen.long - chosen.short) * one)
        return SAFETY * (continuous + padded + compact + equal)

    fitting = [groups for groups in range(2, chosen.groups + 1) if needs(groups) <= chosen.seconds]
    if not fitting:
        raise SystemExit(f"2 groups take about {needs(2):.0f} s here; --seconds allows {chosen.seconds:g}")
    return max(fitting)


async def measure(chosen: argparse.Namespace) -> Report:
    context = PROMPT + max(chosen.long, chosen.equal) + 16
    runner = load(chosen.model, chosen.backend, chosen.threads, context=context, batched=512, sequences=chosen.batch)
    groups = affordable(runner, chosen)
    wants = mixed(chosen.batch, groups, chosen.short, chosen.long)
    unequal = tuple(serve(runner, policy, wants) for policy in SERVED)
    same = [Want(chosen.equal, chosen.equal)] * (2 * chosen.batch)
    rounds = [[serve(runner, policy, same) for policy in ("fcfs", "static-compact")] for _ in range(chosen.rounds)]
    equal = tuple(
        sorted((one[at] for one in rounds), key=lambda result: result.tokens_per_s)[len(rounds) // 2] for at in (0, 1)
    )
    fcfs, padded, compact = unequal
    return Report(
        model=chosen.model,
        backend=chosen.backend,
        batch=chosen.batch,
        groups=groups,
        long=chosen.long,
        short=chosen.short,
        mixed=unequal,
        equal=equal,
        ratios={
            "tokens_per_s_to_padded": _ratio(fcfs.tokens_per_s, padded.tokens_per_s),
            "tokens_per_step_to_padded": _ratio(fcfs.tokens_per_step, padded.tokens_per_step),
            "p50_of_padded": _ratio(padded.p50_s, fcfs.p50_s),
            "tokens_per_s_to_compact": _ratio(fcfs.tokens_per_s, compact.tokens_per_s),
            "tokens_per_step_to_compact": _ratio(fcfs.tokens_per_step, compact.tokens_per_step),
            "p50_of_compact": _ratio(compact.p50_s, fcfs.p50_s),
            "equal_lengths_tokens_per_s": _ratio(equal[0].tokens_per_s, equal[1].tokens_per_s),
            "equal_lengths_tokens_per_step": _ratio(equal[0].tokens_per_step, equal[1].tokens_per_step),
        },
    )


def _ratio(one: float, other: float) -> float:
    return round(one / other, 3)


def show(report: Report) -> None:
    print(f"{'':<31}{'requests':>9}{'steps':>8}{'seconds':>9}{'tokens/s':>10}{'per step':>10}{'P50 s':>8}")
    for title, results in (("mixed", report.mixed), ("equal lengths", report.equal)):
        for one in results:
            name = f"{title}, {one.policy}"
            print(
                f"{name:<31}{one.requests:>9}{one.steps:>8}{one.seconds:>9.1f}{one.tokens_per_s:>10.1f}"
                f"{one.tokens_per_step:>10.2f}{one.p50_s:>8.2f}"
            )
    for name, value in report.ratios.items():
        print(f"{name:<32}{value:>8.2f}")
    print(json.dumps(asdict(report)))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="continuous against static batching", allow_abbrev=False)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--groups", type=int, default=8, help="of --batch requests, at most; default 8")
    parser.add_argument("--short", type=int, default=20, help="tokens that most want; default 20")
    parser.add_argument("--long", type=int, default=1000, help="tokens that one of each group wants; default 1000")
    parser.add_argument("--equal", type=int, default=48, help="tokens where all want the same; default 48")
    parser.add_argument("--rounds", type=int, default=3, help="of equal lengths, in turn; default 3")
    parser.add_argument("--seconds", type=float, default=280.0, help="all of it, about; default 280")
    chosen = parser.parse_args(argv)
    if min(chosen.batch, chosen.groups, chosen.short, chosen.long, chosen.equal, chosen.rounds) < 1:
        parser.error("all counts must be at least 1")
    if chosen.groups < 2 or chosen.long < chosen.short:
        parser.error("--groups must be at least 2, and --long at least --short")
    show(asyncio.run(measure(chosen)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
