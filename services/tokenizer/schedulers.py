"""The schedulers behind this edge: their channels, whether any is ready, and where each request goes.

Owns the edge's readiness. Must not know text. Invariant: ready means that at least one scheduler is.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from services.errors import FailedPrecondition, ServiceError, Unavailable
from services.health import Readiness
from services.peers import Peers, Route
from services.rpc import Door
from services.tokenizer.chain import Chain, ChainState
from tercet.v1 import scheduler_pb2_grpc

if TYPE_CHECKING:
    from tercet.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

log = logging.getLogger(__name__)


class Observer(Protocol):
    """Told of each scheduler, whose target is one of those configured."""

    def active(self, target: str, requests: int) -> None:
        """So many of this edge's requests are there."""

    def ready(self, target: str, is_ready: bool) -> None: ...


class Unobserved:
    def active(self, target: str, requests: int) -> None:
        pass

    def ready(self, target: str, is_ready: bool) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Scheduler:
    """A peer. calls: of requests; traced. asking: of what is polled. chain: what is seen of it."""

    target: str
    calls: "SchedulerServiceAsyncStub"
    asking: "SchedulerServiceAsyncStub"
    chain: Chain

    @property
    def state(self) -> ChainState:
        return self.chain.state


class Schedulers:
    def __init__(
        self,
        doors: Sequence[Door],
        tokenizer_hash: str,
        readiness: Readiness,
        observer: Observer = Unobserved(),
    ) -> None:
        self._readiness = readiness
        self._observer = observer
        self._told = {door.target: "" for door in doors}
        self._peers = Peers(
            [
                Scheduler(
                    door.target,
                    scheduler_pb2_grpc.SchedulerServiceStub(door.calls),
                    scheduler_pb2_grpc.SchedulerServiceStub(door.asking),
                    Chain(door.asking, tokenizer_hash, self.note),
                )
                for door in doors
            ],
            observer.active,
        )

    def __iter__(self) -> Iterator[Scheduler]:
        return iter(self._peers)

    def route(self, key: bytes, numerics: str | None = None) -> Route[Scheduler]:
        """The way of one request; see `Peers.route`."""
        return self._peers.route(key, numerics)

    async def watch(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for scheduler in self:
                group.create_task(scheduler.chain.watch())

    def require(self) -> ChainState:
        """Of one that takes requests. Raises the ServiceError that says what is missing."""
        able = self._peers.able()
        if able:
            return able[0].state
        problem = self.problem()
        raise problem or Unavailable("no scheduler takes requests", reason="NO_SCHEDULER")

    def foremost(self) -> ChainState:
        """Of one that takes requests, else of the first."""
        return (self._peers.able() or list(self))[0].state

    def problem(self) -> ServiceError | None:
        """Why none is ready; None: one is. Where waiting may help any of them, it is Unavailable."""
        problems = {one.target: one.state.problem for one in self}
        found = [problem for problem in problems.values() if problem is not None]
        if len(found) < len(problems):
            return None
        worst = next((one for one in found if not isinstance(one, FailedPrecondition)), found[0])
        message = worst.message
        if len(found) > 1:
            message = "no scheduler is ready; " + "; ".join(
                f"{target}: {problem.message}" for target, problem in problems.items() if problem is not None
            )
        return type(worst)(message, reason=worst.reason, metadata=worst.metadata)

    def note(self) -> None:
        """A state has changed, or may have."""
        for scheduler in self:
            self._tell(scheduler.target, scheduler.state.problem)
        problem = self.problem()
        if problem is None:
            self._readiness.set_ready()
        else:
            self._readiness.set_not_ready(problem.message)

    def _tell(self, target: str, problem: ServiceError | None) -> None:
        """The log gets each news once."""
        self._observer.ready(target, problem is None)
        news = "" if problem is None else problem.message
        if problem is not None and news != self._told[target]:
            level = logging.ERROR if isinstance(problem, FailedPrecondition) else logging.WARNING
            log.log(level, "not ready", extra={"scheduler": target, "reason": news})
        self._told[target] = news
