"""The command line of `tercet simulate`: what there is to say, and what it means as a load and as scenarios.

Reads trace files; runs nothing. Everything that is refused is refused by its name.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from services.scheduler.core.calls import CoreConfig, LaneSpec
from services.scheduler.core.limits import TenantQuota
from services.scheduler.core.policies.policy import POLICIES
from services.simulate.cost import PRESETS
from services.simulate.fleet import Fleet
from services.simulate.load import (
    ONE_TENANT,
    Arrivals,
    Lengths,
    Request,
    Tenant,
    generate,
    lengths_of,
    parse_lengths,
    parse_tenants,
    reshaped,
)
from services.simulate.scenario import SETTINGS, UNBOUNDED, Scenario, ScenarioError, apply
from services.simulate.summary import Objectives
from services.simulate.traces import MOONCAKE_BLOCK, read_trace
from services.simulate.workload import Workload, rate_of

# What an executor of the default model has, and what a scheduler does; but the queue has no end.
LANE: Final = LaneSpec(
    block_size=16, total_blocks=1456, max_batched_tokens=512, max_sequences=64, max_model_len=262_144
)
CORE: Final = CoreConfig(max_queued_requests=UNBOUNDED, max_queued_tokens=UNBOUNDED, watermark=0.01)

# For traces that name blocks, whose prompts have 12,000 tokens: a large accelerator with room for 491,520 tokens. Such
# a trace was recorded at some cluster, whose rate says nothing about one executor.
LARGE_LANE: Final = dataclasses.replace(LANE, block_size=MOONCAKE_BLOCK, total_blocks=960, max_batched_tokens=4096)
LARGE_COST: Final = "gpu-like"
LARGE_CHUNK: Final = 2048
LARGE_LOAD: Final = 0.8


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="tercet simulate",
        allow_abbrev=False,
        description="Runs the scheduler's core against a cost model, and compares policies and settings.",
        epilog=f"--set and --vary know: {', '.join(SETTINGS)}.",
    )
    load = made.add_argument_group("load")
    load.add_argument("--trace", type=Path, help="replay a Mooncake .jsonl or an Azure .csv file")
    load.add_argument("--first", type=int, help="only so many requests of the trace")
    load.add_argument("--length-divisor", type=int, default=1, help="divide the trace's lengths; default 1")
    load.add_argument("--lengths-from", type=Path, help="generated arrivals, lengths drawn from this trace")
    load.add_argument("--requests", type=int, default=1000, help="generated ones; default 1000")
    load.add_argument("--rate", type=float, default=1.0, help="generated requests a second; default 1")
    load.add_argument("--burst", type=int, default=1, help="that many come at once; default 1: Poisson")
    load.add_argument("--prompts", default="lognormal:300:0.8:4000", help="lengths; default lognormal:300:0.8:4000")
    load.add_argument("--outputs", default="lognormal:120:0.8:2000", help="lengths; default lognormal:120:0.8:2000")
    load.add_argument(
        "--tenants", help="NAME=SHARE[@PRIORITY][*WEIGHT],...: who sends what part of the requests, and is due what"
    )
    load.add_argument("--seed", type=int, default=1, help="of what is generated or drawn; default 1")
    load.add_argument("--clients", type=int, help="a closed loop of so many, instead of the load's own times")
    what = made.add_argument_group("what is compared")
    what.add_argument("--policies", default="fcfs", help=f"by commas, of {', '.join(POLICIES)}; default fcfs")
    what.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of every run")
    what.add_argument("--vary", action="append", default=[], metavar="NAME=V1,V2", help="run with each of the values")
    what.add_argument("--slo", default="", help="ttft=MS,tpot=MS,e2e=MS: what counts as goodput")
    what.add_argument("--jobs", type=int, help="runs at once, each in a process of its own; default: one a core")
    what.add_argument("--no-skip", action="store_true", help="take every step one by one; the results are the same")
    out = made.add_argument_group("output")
    out.add_argument("--html", type=Path, help="one page with table and charts, self-contained")
    out.add_argument("--png", type=Path, help="a directory for the charts as PNG files (needs matplotlib)")
    out.add_argument("--json", type=Path, help="the summaries, one JSON object a line")
    out.add_argument("--calibrate", metavar="TARGET", help="fit a cost model to a running chain, print it, and end")
    return made


def read_workload(chosen: argparse.Namespace) -> tuple[Workload, bool]:
    """The load, and whether its prompts share blocks of MOONCAKE_BLOCK tokens."""
    tenants = tenants_of(chosen)
    if chosen.trace is not None:
        if chosen.lengths_from is not None:
            raise ScenarioError("--trace and --lengths-from exclude each other")
        if chosen.first is not None and chosen.first < 1:
            raise ScenarioError(f"--first is {chosen.first}; at least 1 is needed")
        replayed = reshaped(
            read_trace(chosen.trace),
            length_divisor=chosen.length_divisor,
            limit=chosen.first,
            tenants=tenants,
            seed=chosen.seed,
        )
        rate = rate_of(replayed)
        told = f"{len(replayed):,} requests of {chosen.trace.name}, {rate:.3g} a second as recorded"
        return Workload(lambda: replayed, rate, told), any(request.block_ids for request in replayed)
    if chosen.first is not None:
        raise ScenarioError("--first is of a --trace; generated requests are counted by --requests")
    arrivals = Arrivals(chosen.rate, chosen.burst)
    lengths = _lengths(chosen)
    told = f"{chosen.requests:,} generated requests, {chosen.rate:g} a second, {chosen.burst} at once"

    def requests() -> Iterator[Request]:
        prompts, outputs = lengths()
        return generate(chosen.requests, arrivals, prompts, outputs, chosen.seed, tenants)

    return Workload(requests, chosen.rate, told), False


def tenants_of(chosen: argparse.Namespace) -> tuple[Tenant, ...]:
    return ONE_TENANT if chosen.tenants is None else parse_tenants(chosen.tenants)


def _lengths(chosen: argparse.Namespace) -> Callable[[], tuple[Lengths, Lengths]]:
    """Made anew for each run: lengths drawn from a trace have a state."""
    if chosen.lengths_from is not None:
        drawn = reshaped(read_trace(chosen.lengths_from), length_divisor=chosen.length_divisor)
        return lambda: lengths_of(drawn, chosen.seed)
    if chosen.length_divisor != 1:
        raise ScenarioError("--length-divisor is of a --trace or of --lengths-from")
    fixed = parse_lengths(chosen.prompts, "--prompts"), parse_lengths(chosen.outputs, "--outputs")
    return lambda: fixed


def read_base(chosen: argparse.Namespace, *, shares_blocks: bool) -> Scenario:
    """What all runs have in common."""
    quotas = {tenant.name: TenantQuota(weight=tenant.weight) for tenant in tenants_of(chosen) if tenant.weight != 1}
    core = dataclasses.replace(CORE, quotas=quotas)
    base = Scenario("", Fleet(core, LANE))
    if shares_blocks:
        core = dataclasses.replace(core, prefill_chunk=LARGE_CHUNK)
        base = Scenario("", Fleet(core, LARGE_LANE, cost=PRESETS[LARGE_COST]))
        if chosen.clients is None:
            base = dataclasses.replace(base, load=LARGE_LOAD)
    for text in chosen.set:
        name, values = _named("--set", text)
        base = apply(base, name, values)
    if shares_blocks and base.fleet.lane.block_size != MOONCAKE_BLOCK:
        raise ScenarioError(
            f"block-size is {base.fleet.lane.block_size}; the trace's blocks have {MOONCAKE_BLOCK} tokens"
        )
    return base


def read_varied(chosen: argparse.Namespace) -> list[tuple[str, list[str]]]:
    named = [_named("--vary", text) for text in chosen.vary]
    return [(name, values.split(",")) for name, values in named]


def read_objectives(text: str) -> Objectives:
    names = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e": "e2e_ms"}
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in names:
            raise ScenarioError(f"--slo: {name!r} is none of {', '.join(names)}")
        try:
            found[names[name]] = float(value)
        except ValueError as error:
            raise ScenarioError(f"--slo: {part!r} names no number of ms") from error
    return Objectives(**found)


def _named(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise ScenarioError(f"{flag} {text!r} is not NAME=VALUE")
    return name, value
