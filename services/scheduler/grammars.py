"""Requests that wait for their grammar: the state before the queue.

Owns what executors were asked to compile and have not answered. The core never hears of it: a request comes to it when
every executor that serves now has the grammar, so none of its steps waits for that.
Invariant: whoever waits goes on when the last executor asked has answered or is lost, or a time limit has passed.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import Tracer

from executor.step import Grammar
from services import names
from services.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, ServiceError
from services.scheduler.core.calls import LaneId, Limits
from services.scheduler.intake import Admission

FIELD: Final = "sampling.grammar"
BUSY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A grammar on its way to an executor."""

    prepare_id: int
    grammar: Grammar


@dataclass(slots=True)
class _Lane:
    wake: asyncio.Event  # of whoever sends
    outgoing: deque[Asked] = field(default_factory=deque)
    pending: dict[int, "asyncio.Future[ServiceError | None]"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in the state GRAMMAR. since: monotonic, ns."""

    admission: Admission
    since: int


class Grammars:
    """One for all lanes of a scheduler."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._lanes: dict[LaneId, _Lane] = {}
        self._asked = 0
        self._waiting: dict[int, Waiting] = {}

    # -- lanes ---------------------------------------------------------------------------------------------------------

    def attached(self, lane: LaneId, wake: asyncio.Event, live: Iterable[Grammar]) -> None:
        """A lease was granted on an executor that compiles grammars. Those of requests that are live already are asked
        for before any step; nobody waits for them."""
        self._lanes[lane] = _Lane(wake)
        for grammar in dict.fromkeys(live):
            self._ask(self._lanes[lane], grammar)

    def lost(self, lane: LaneId) -> None:
        """Its executor answers no more, so nobody waits for it."""
        state = self._lanes.pop(lane, None)
        if state is not None:
            for answer in state.pending.values():
                _settle(answer, None)

    def next(self, lane: LaneId) -> Asked | None:
        """What is to be sent to a lane's executor next."""
        state = self._lanes.get(lane)
        return state.outgoing.popleft() if state is not None and state.outgoing else None

    def answered(self, lane: LaneId, prepare_id: int, problem: str, busy: bool) -> None:
        """problem: what is wrong with the grammar, empty if nothing is. An answer to nothing is ignored."""
        state = self._lanes.get(lane)
        answer = None if state is None else state.pending.pop(prepare_id, None)
        if answer is not None:
            _settle(answer, _error(problem, busy) if problem else None)

    # -- requests ------------------------------------------------------------------------------------------------------

    def waiting(self) -> tuple[Waiting, ...]:
        """Oldest first."""
        return tuple(self._waiting.values())

    async def ready(self, admission: Admission, parent: Context) -> Admission:
        """The admission with the limits that are left, once its grammar is ready wherever it may run.

        Raises InvalidArgument, ResourceExhausted, or DeadlineExceeded for a limit that passed meanwhile.
        """
        grammar = admission.sampling.grammar
        if grammar is None or not self._lanes:
            return admission
        started = time.monotonic_ns()
        answers = [self._ask(lane, grammar) for lane in self._lanes.values()]
        self._asked += 1
        number = self._asked
        self._waiting[number] = Waiting(admission, started)
        span = self._tracer.start_span(names.SPAN_GRAMMAR, context=parent)
        try:
            await self._answers(answers, admission.limits)
        finally:
            del self._waiting[number]
            span.end()
        return replace(admission, limits=_left(admission.limits, time.monotonic_ns() - started))

    async def _answers(self, answers: "list[asyncio.Future[ServiceError | None]]", limits: Limits) -> None:
        kind, limit_ns = _nearest(limits)
        try:
            async with asyncio.timeout(None if limit_ns is None else limit_ns / 1e9):
                for answer in answers:
                    error = await answer
                    if error is not None:
                        raise error
        except TimeoutError:
            raise DeadlineExceeded(
                f"the {kind} time limit passed in phase grammar, before the first token",
                reason="TIME_LIMIT",
                metadata={"limit_kind": kind, "phase": "grammar"},
            ) from None

    def _ask(self, lane: _Lane, grammar: Grammar) -> "asyncio.Future[ServiceError | None]":
        self._asked += 1
        answer: asyncio.Future[ServiceError | None] = asyncio.get_running_loop().create_future()
        lane.pending[self._asked] = answer
        lane.outgoing.append(Asked(self._asked, grammar))
        lane.wake.set()
        return answer


def _settle(answer: "asyncio.Future[ServiceError | None]", error: ServiceError | None) -> None:
    if not answer.done():  # whoever waited may be gone
        answer.set_result(error)


def _error(problem: str, busy: bool) -> ServiceError:
    if busy:
        return ResourceExhausted(f"{FIELD}: {problem}", reason="GRAMMARS_BUSY", field=FIELD, retry_after_s=BUSY_S)
    return InvalidArgument(f"{FIELD} cannot be compiled: {problem}", reason="INVALID_GRAMMAR", field=FIELD)


_LIMITS: Final = (("queue", "queue_ns"), ("first_token", "first_token_ns"), ("total", "total_ns"))


def _nearest(limits: Limits) -> tuple[str, int | None]:
    """Which limit passes first, and in how many ns."""
    given = [(value, kind) for kind, name in _LIMITS if (value := getattr(limits, name)) is not None]
    if not given:
        return "", None
    value, kind = min(given)
    return kind, value


def _left(limits: Limits, elapsed_ns: int) -> Limits:
    """At least 1 ns each: the core tells which passed."""
    left = {
        name: None if (value := getattr(limits, name)) is None else max(1, value - elapsed_ns) for _, name in _LIMITS
    }
    return replace(limits, **left)
