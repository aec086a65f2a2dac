"""`tercet simulate`: the scheduler's own core against a model of executors, with a virtual clock. Wiring only."""

import argparse
import asyncio
import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Sequence

from services.simulate import png
from services.simulate.charts import Result, charts_of
from services.simulate.cost import CostError
from services.simulate.fleet import Fleet, FleetError
from services.simulate.jobs import Job, each, run, saturate
from services.simulate.load import LoadError
from services.simulate.options import parser, read_base, read_objectives, read_varied, read_workload
from services.simulate.page import page
from services.simulate.scenario import Scenario, ScenarioError, scenarios
from services.simulate.tables import number, tenants_table, text_table
from services.simulate.traces import TraceError
from services.simulate.workload import check_share, saturating

_REFUSALS = (ScenarioError, LoadError, TraceError, CostError, FleetError, png.NoPlotter, OSError)


def main(argv: Sequence[str]) -> int:
    chosen = parser().parse_args(argv)
    try:
        if chosen.calibrate is not None:
            return _calibrate(chosen.calibrate)
        return _compare(chosen, argv)
    except _REFUSALS as error:
        print(f"tercet simulate: {error}", file=sys.stderr)
        return 1


def _calibrate(target: str) -> int:
    from services.simulate.calibrate import CalibrationError, calibrate  # the only part that needs grpc

    try:
        fitted = asyncio.run(calibrate(target, tell=_tell))
    except CalibrationError as error:
        _tell(f"tercet simulate: {error}")
        return 1
    print(fitted.to_json())
    return 0


def _compare(chosen: argparse.Namespace, argv: Sequence[str]) -> int:
    workload, shares_blocks = read_workload(chosen)
    read_objectives(chosen.slo)  # refused before anything runs
    if chosen.jobs is not None and chosen.jobs < 1:
        raise ScenarioError(f"--jobs is {chosen.jobs}; at least 1 is needed")
    base = read_base(chosen, shares_blocks=shares_blocks)
    compared = scenarios(base, chosen.policies.split(","), read_varied(chosen))
    if chosen.clients is not None and any(scenario.load is not None for scenario in compared):
        raise ScenarioError("--clients and load exclude each other: a closed loop has no rate")
    if chosen.png is not None:
        png.require()
    processes = chosen.jobs or len(os.sched_getaffinity(0))
    jobs = [Job(tuple(argv), number, scenario.rate_scale) for number, scenario in enumerate(compared)]
    jobs = _at_their_loads(jobs, compared, workload.rate, processes)
    results = []
    for result, took in each(run, jobs, processes):
        made, name = result.run, result.summary.name
        _tell(f"{name}: {len(made.records):,} requests, {made.steps:,} steps, simulated in {took:.1f} s")
        results.append(result)
    summaries = [result.summary for result in results]
    print(text_table(summaries))
    if any(len(summary.tenants) > 1 for summary in summaries):
        print("\n" + tenants_table(summaries))
    command = shlex.join(["tercet", "simulate", *argv])
    _write(chosen, command, [workload.told, *_told(base.fleet)], results)
    return 0


def _at_their_loads(jobs: list[Job], compared: Sequence[Scenario], recorded: float, processes: int) -> list[Job]:
    """Jobs of scenarios with a load, at that share of the rate at which their fleet saturates: each fleet is measured
    once."""
    fleets: list[Fleet] = []
    measured: list[Job] = []
    for job, scenario in zip(jobs, compared, strict=True):
        if scenario.load is not None:
            check_share(scenario.load)
            fleet = saturating(scenario.fleet)
            if fleet not in fleets:
                fleets.append(fleet)
                measured.append(job)
    rates = []
    for rate in each(saturate, measured, processes):
        _tell(f"fcfs saturates at {number(rate)} requests/s")
        rates.append(rate)
    return [
        job
        if scenario.load is None
        else dataclasses.replace(
            job, rate_scale=scenario.load * rates[fleets.index(saturating(scenario.fleet))] / recorded
        )
        for job, scenario in zip(jobs, compared, strict=True)
    ]


def _write(chosen: argparse.Namespace, command: str, facts: Sequence[str], results: Sequence[Result]) -> None:
    summaries = [result.summary for result in results]
    if chosen.json is not None:
        lines = [json.dumps(dataclasses.asdict(summary)) for summary in summaries]
        chosen.json.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if chosen.html is None and chosen.png is None:
        return
    charts = charts_of(results)
    if chosen.html is not None:
        chosen.html.write_text(page("Simulated", command, facts, summaries, charts), encoding="utf-8")
        _tell(f"wrote {chosen.html}")
    if chosen.png is not None:
        _tell("wrote " + ", ".join(str(path) for path in png.write(charts, chosen.png)))


def _told(fleet: Fleet) -> list[str]:
    lane = fleet.lane
    return [
        f"{fleet.executors} executors: {lane.total_blocks} blocks of {lane.block_size} tokens, "
        f"{lane.max_sequences} slots, {lane.max_batched_tokens} tokens a step, unless varied",
        f"cost of a step: {fleet.cost.to_json()}",
    ]


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
