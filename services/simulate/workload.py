"""A load as often as it is wanted, and how fast a fleet takes it at most.

Owns the measuring of saturation. Invariant: every scenario of a comparison sees the same requests.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from services.scheduler.core.calls import Limits
from services.simulate.fleet import Fleet
from services.simulate.load import LoadError, Request
from services.simulate.scenario import UNBOUNDED
from services.simulate.simulation import Simulation
from services.simulate.summary import Objectives, summarize

SATURATION_REQUESTS: Final = 20_000  # of a load, at most, taken to measure it


@dataclass(frozen=True, slots=True)
class Workload:
    """`requests()` gives them from the start, `rate` of them a second."""

    requests: Callable[[], Iterable[Request]]
    rate: float
    told: str  # of what it is made

    def at(self, scale: float) -> Iterator[Request]:
        """With times divided by `scale`."""
        if not 0 < scale < 1e9:
            raise LoadError(f"the rate's scale is {scale}; it must be above 0")
        if scale == 1:
            return iter(self.requests())
        return (dataclasses.replace(r, at_ns=int(r.at_ns / scale)) for r in self.requests())


def rate_of(requests: list[Request]) -> float:
    """Requests a second; where all come at once, as if in a second."""
    span = requests[-1].at_ns - requests[0].at_ns
    return len(requests) / (span / 1e9) if span else float(len(requests))


def saturating(fleet: Fleet) -> Fleet:
    """The fleet whose saturation is meant by a share of it: under fcfs, without limits of queue or time."""
    core = dataclasses.replace(fleet.core, policy="fcfs", max_queued_requests=UNBOUNDED, max_queued_tokens=UNBOUNDED)
    return dataclasses.replace(fleet, core=core, limits=Limits())


def saturation_rate(fleet: Fleet, workload: Workload) -> float:
    """Requests a second at which a fleet saturates under fcfs: what it serves in a closed loop with twice as many
    clients as slots, over the start of the load. Raises LoadError."""
    clients = 2 * fleet.executors * fleet.lane.max_sequences
    requests = islice(workload.requests(), max(SATURATION_REQUESTS, 4 * clients))
    run = Simulation(saturating(fleet), clients=clients).run(requests)
    rate = summarize("saturation", run, Objectives(), closed=True).requests_per_s
    if not rate:
        raise LoadError("nothing of the load was served: its saturation can't be measured")
    return rate


def check_share(load: float) -> None:
    """Raises LoadError."""
    if not 0 < load < 1000:
        raise LoadError(f"load is {load}; a share of the saturation rate is needed, like 0.8")
