"""Many runs on several cores: each job is the words of the command line and a number, and a process of its own makes
the run from them. So nothing of a load is sent, and a run does not depend on where it ran.
"""

import argparse
import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from services.simulate.charts import Result
from services.simulate.options import parser, read_base, read_objectives, read_varied, read_workload
from services.simulate.scenario import Scenario, scenarios
from services.simulate.simulation import Simulation
from services.simulate.summary import summarize
from services.simulate.workload import Workload, saturation_rate

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """The scenario of that number. `rate_scale`: by what the load's times are divided."""

    argv: tuple[str, ...]
    number: int
    rate_scale: float = 1.0


def run(job: Job) -> tuple[Result, float]:
    """And the seconds that it took."""
    chosen, workload, scenario = _read(job)
    simulation = Simulation(
        scenario.fleet, skipping=not chosen.no_skip, clients=chosen.clients, by_tenant=chosen.tenants is not None
    )
    began = time.perf_counter()
    with _seldom_collecting():
        made = simulation.run(workload.at(job.rate_scale))
    took = time.perf_counter() - began
    fleet, closed = scenario.fleet, chosen.clients is not None
    weights = {name: quota.weight for name, quota in fleet.core.quotas.items()}
    waits = fleet.cost.request_ns
    return Result(
        summarize(scenario.name, made, read_objectives(chosen.slo), waits, closed=closed, weights=weights), made, waits
    ), took


def saturate(job: Job) -> float:
    """Requests a second at which the scenario's fleet saturates under fcfs."""
    _, workload, scenario = _read(job)
    with _seldom_collecting():
        return saturation_rate(scenario.fleet, workload)


def each(work: Callable[[Job], T], jobs: Sequence[Job], processes: int) -> Iterator[T]:
    """In the order of the jobs, as they are done."""
    if min(processes, len(jobs)) < 2:
        yield from map(work, jobs)
        return
    # A fork would copy whatever threads and locks the caller has.
    with ProcessPoolExecutor(min(processes, len(jobs)), multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(work, jobs)


def _read(job: Job) -> tuple[argparse.Namespace, Workload, Scenario]:
    chosen = parser().parse_args(job.argv)
    workload, shares_blocks = read_workload(chosen)
    base = read_base(chosen, shares_blocks=shares_blocks)
    return chosen, workload, scenarios(base, chosen.policies.split(","), read_varied(chosen))[job.number]


@contextmanager
def _seldom_collecting() -> Iterator[None]:
    """A run makes few cycles, and much that lives long: a sixth of its time would go into looking for them."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
