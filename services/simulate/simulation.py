"""One run: the scheduler's core, executors that only take time, and a virtual clock.

The main loop takes the earliest event and does what the scheduler's shell does at it. Pure: equal fleets and loads
give equal runs. Invariants: an executor computes its steps one after the other, in the order planned; events of one
time are taken steps first, then by the executor's number.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import Final

from services.scheduler.core.calls import (
    Admitted,
    Displaced,
    DoesNotFit,
    DuplicateKey,
    Emission,
    Finished,
    InvalidSubmission,
    Phase,
    Plan,
    Preempted,
    SequenceKey,
    StepOutcome,
    Submission,
    SubmitError,
    Tokens,
)
from services.scheduler.core.cost import CostEstimate
from services.scheduler.core.lane import Lane
from services.simulate.fleet import Fleet, FleetError
from services.simulate.load import Request
from services.simulate.records import NEVER, Outcome, Records, Run, Timeline
from services.simulate.service import Service
from services.simulate.skipping import SkippingCore
from services.simulate.steps import Executor, Live, draw, step_of
from services.simulate.stretch import Stretch, stretch_of

_STEP_DONE: Final = 0  # kinds of events, in the order in which those of one time are taken
_ARRIVAL: Final = 1
_EXPIRY: Final = 2

_WORTH_SKIPPING: Final = 3  # steps; fewer are not worth the look


class Simulation:
    def __init__(
        self, fleet: Fleet, *, skipping: bool = True, clients: int | None = None, by_tenant: bool = False
    ) -> None:
        """clients: a closed loop, each sends its next request when one ended, whatever the requests' times say.
        by_tenant: whether it is wanted what each tenant was given when."""
        if clients is not None and clients < 1:
            raise FleetError(f"clients is {clients}; at least 1 is needed")
        self._fleet = fleet
        self._skipping = skipping
        self._clients = clients
        self._core = SkippingCore(fleet.core, self._glance)
        self._estimate = self._cost_estimate()
        self._depth = fleet.core.steps_in_flight
        self._executors = [Executor(f"{index:06d}", cost) for index, cost in enumerate(fleet.costs())]
        self._hungry = list(range(fleet.executors))  # numbers of those that are, ascending
        self._events: list[tuple[int, int, int]] = []
        self._at = (0, _STEP_DONE, 0)  # the event that is looked at
        # Executors in a stretch that the clock visits at its end only: those that others can join, and full ones.
        self._joinable: dict[int, None] = {}
        self._full: dict[int, None] = {}
        self._source: Iterator[Request] = iter(())
        self._next: Request | None = None
        self._live: dict[SequenceKey, Live] = {}
        self._records = Records()
        self._timeline = Timeline()
        self._service = Service() if by_tenant else None
        self._waiting = 0
        self._running = 0
        self._armed: int | None = None
        self._last_arrival = 0
        self._end = 0  # of the last step or arrival
        for executor in self._executors:
            self._core.attach(executor.lane, fleet.lane, 0)

    def run(self, requests: Iterable[Request]) -> Run:
        self._source = iter(requests)
        for _ in range(self._clients or 1):
            self._await_next(0)
        while self._events:
            self._at = now, kind, index = heappop(self._events)
            if kind == _STEP_DONE:
                self._step_done(index, now)
            elif kind == _ARRIVAL:
                self._end = now
                self._arrive(now)
            else:
                self._expire(now)
            if self._waiting:
                self._rouse()
        if self._live:
            raise RuntimeError(f"{len(self._live)} requests never ended; first: {next(iter(self._live))}")
        totals = self._core.totals()
        return Run(
            self._records,
            tuple(self._timeline.points(self._end)),
            self._timeline.peak_waiting,
            self._last_arrival,
            self._end,
            totals.steps,
            totals.planned_tokens,
            totals.preemptions,
            tuple(executor.busy_ns for executor in self._executors),
            {} if self._service is None else self._service.tenants(self._end),
        )

    # Events.

    def _arrive(self, now: int) -> None:
        request = self._next
        if self._clients is not None:
            request = next(self._source, None)
        else:
            self._await_next(now)
        if request is None:
            return
        number = self._records.arrive(request, now)
        self._last_arrival = now
        key = str(number)
        max_tokens = self._fleet.max_tokens(request.output_len)
        try:
            self._tell_accounts()
            self._core.submit(self._submission(key, request, max_tokens), now, self._estimate)
        except (InvalidSubmission, DuplicateKey):
            raise  # no load makes these
        except SubmitError as refusal:
            outcome = Outcome.UNFIT if isinstance(refusal, DoesNotFit) else Outcome.REFUSED
            self._records.refuse(number, outcome, now)
            if self._clients is not None:
                self._await_next(now)
            return
        told = max_tokens == request.output_len
        live = self._live[key] = Live(number, request.prompt_len, request.output_len, told, request.tenant)
        self._moved(live, now, waiting=1)
        self._after(now)

    def _step_done(self, index: int, now: int) -> None:
        executor = self._executors[index]
        if executor.stretch is not None and not self._interrupts(executor.stretch, index, now):
            return
        if executor.ends_at != now:
            return  # the event is of a step that was gone over
        executor.ends_at = NEVER
        self._end = now
        step = executor.steps.popleft()
        outcomes = tuple([draw(row, self._live.get(row[1])) for row in step.rows])
        if executor.steps:
            self._start(executor, index, now)
        self._carry_out(self._core.apply(executor.lane, StepOutcome(step.step_id, outcomes), now), now)
        self._plan(index, now)
        self._after(now)
        if self._skipping and len(executor.steps) == self._depth:
            self._fall_quiet(executor, index)

    def _expire(self, now: int) -> None:
        if self._armed != now:
            return  # an earlier one took its place
        self._armed = None
        for index, executor in enumerate(self._executors):
            stretch = executor.stretch
            if stretch is not None and stretch.before_ns is not None and stretch.before_ns <= now:
                self._wake_up(index, stretch)
        self._carry_out(self._core.expire(now), now)
        self._after(now)

    # What the shell does after each.

    def _after(self, now: int) -> None:
        """Whoever has room looks at the queue, in the executors' order; and the timer is set anew."""
        if self._waiting:
            for index in tuple(self._hungry):
                self._plan(index, now)
                if not self._waiting:
                    break
        deadline = self._core.next_deadline()
        if deadline is not None and (self._armed is None or deadline < self._armed):
            self._armed = max(deadline, now)
            heappush(self._events, (self._armed, _EXPIRY, 0))

    def _plan(self, index: int, now: int) -> None:
        executor = self._executors[index]
        if executor.stretch is not None:
            return
        while len(executor.steps) < self._depth and (plan := self._core.plan(executor.lane, now)) is not None:
            executor.steps.append(step_of(plan))
            if self._service is not None:
                self._charge(self._service, plan, now)
            self._carry_out(plan.preempted, now)
            self._carry_out(plan.admitted, now)
            if len(executor.steps) == 1:
                self._start(executor, index, now)
        hungry = len(executor.steps) < self._depth
        if hungry != executor.hungry:
            executor.hungry = hungry
            if hungry:
                insort(self._hungry, index)
            else:
                del self._hungry[bisect_left(self._hungry, index)]

    def _carry_out(self, emissions: Iterable[Emission], now: int) -> None:
        for emission in emissions:
            live = self._live[emission.key]
            match emission:
                case Tokens():
                    self._records.token(live.number, now)
                    if self._service is not None:
                        self._service.drawn(live.tenant, (now,))
                case Admitted():
                    self._moved(live, now, waiting=-1, running=1)
                case Preempted() | Displaced():
                    self._tell_accounts()
                    self._moved(live, now, waiting=1, running=-1)
                case Finished():
                    del self._live[emission.key]
                    self._records.end(live.number, emission, now)
                    queued = emission.phase is Phase.QUEUE
                    self._moved(live, now, waiting=-queued, running=queued - 1)
                    if self._clients is not None:
                        self._await_next(now)

    def _charge(self, service: Service, plan: Plan, now: int) -> None:
        """What is computed of prompts, once: not what is computed again after a preemption."""
        for piece in plan.slices:
            live = self._live.get(piece.key)
            if live is not None and piece.start < live.prompt_len:
                end = min(piece.start + piece.count, live.prompt_len)
                service.prompt(live.tenant, now, max(0, end - max(piece.start, live.reached)))
                live.reached = max(live.reached, end)

    def _moved(self, live: Live, now: int, waiting: int = 0, running: int = 0) -> None:
        if self._service is not None and waiting:
            self._service.waits(live.tenant, now, waiting)
        self._waiting += waiting
        self._running += running
        self._timeline.change(now, self._waiting, self._running)

    # Executors.

    def _start(self, executor: Executor, index: int, now: int) -> None:
        elapsed = executor.cost.step_ns(executor.steps[0].work)
        executor.busy_ns += elapsed
        executor.ends_at = now + elapsed
        heappush(self._events, (executor.ends_at, _STEP_DONE, index))

    # Quiet steps.

    def _fall_quiet(self, executor: Executor, index: int) -> None:
        first, last = executor.steps[0], executor.steps[-1]
        rows = len(first.rows)
        if any(step.work.prefill_tokens or len(step.rows) != rows for step in (first, last)):
            return
        if first.work.decode_rows != last.work.decode_rows:
            return  # the padding is another
        quiet = self._core.quiet_steps(executor.lane)
        if quiet is None:
            return
        if any(self._records.first[self._live[key].number] == NEVER for _, key, _ in first.rows):
            return  # the moment of a first token is to be seen
        left = min(quiet.steps, *(self._live[row[1]].draws_left(row) for row in first.rows))
        if left < _WORTH_SKIPPING:
            return
        stretch = stretch_of(
            executor.ends_at,
            left,
            quiet.before_ns,
            joinable=quiet.joinable,
            rows=rows,
            context=first.work.decode_context,
            fixed_ns=executor.cost.rows_ns(first.work.decode_rows),
            context_ns=executor.cost.decode_context_ns,
        )
        if stretch.steps >= _WORTH_SKIPPING:
            executor.stretch = stretch
            self._sleep(index, stretch)
            heappush(self._events, (stretch.over_at, _STEP_DONE, index))

    def _interrupts(self, stretch: Stretch, index: int, now: int) -> bool:
        """The clock visits a lane in a stretch. Whether the step that ends now is one to be looked at."""
        if now not in (stretch.over_at, stretch.peek):
            return False
        if now == stretch.over_at or (self._waiting and stretch.joinable):
            self._tell(index, stretch.ended(now, also_now=False))
            self._leave_stretch(index, stretch)
            return True
        stretch.peek = None
        self._sleep(index, stretch)
        if self._waiting:  # others may have room, and every event wakes them
            self._after(now)
        return False

    def _rouse(self) -> None:
        """Somebody waits: whoever could do something about it at its next step is visited then."""
        for sleeping in (self._joinable, self._full) if self._hungry else (self._joinable,):
            for index in sleeping:
                stretch = self._executors[index].stretch
                if stretch is None:
                    raise RuntimeError(f"executor {index} sleeps, and is in no stretch")
                stretch.peek = stretch.ends[self._ended(stretch, index)]
                if stretch.peek < stretch.over_at:
                    heappush(self._events, (stretch.peek, _STEP_DONE, index))
            sleeping.clear()

    def _sleep(self, index: int, stretch: Stretch) -> None:
        (self._joinable if stretch.joinable else self._full)[index] = None

    def _tell_accounts(self) -> None:
        """Before somebody new waits, where it counts who was given how much."""
        if self._core.waits_for_accounts:
            for index, executor in enumerate(self._executors):
                if executor.stretch is not None:
                    self._tell(index, self._ended(executor.stretch, index))

    def _wake_up(self, index: int, stretch: Stretch) -> None:
        """The step that runs now is an ordinary one again."""
        self._tell(index, self._ended(stretch, index))
        self._leave_stretch(index, stretch)
        heappush(self._events, (self._executors[index].ends_at, _STEP_DONE, index))

    def _leave_stretch(self, index: int, stretch: Stretch) -> None:
        executor = self._executors[index]
        executor.stretch, executor.ends_at = None, stretch.ends[stretch.told]
        self._joinable.pop(index, None)
        self._full.pop(index, None)

    def _ended(self, stretch: Stretch, index: int) -> int:
        """Steps gone over by now: the clock takes those of one time by the executors' number."""
        now, kind, at = self._at
        return stretch.ended(now, also_now=kind != _STEP_DONE or index <= at)

    def _glance(self, lanes: Iterable[Lane]) -> None:
        """Another lane's choice depends on how these do."""
        for lane in lanes:
            index = int(lane.id)
            stretch = self._executors[index].stretch
            if stretch is not None and (ended := self._ended(stretch, index)) > stretch.seen:
                self._core.glance(lane.id, stretch.ends[stretch.told : ended], stretch.seen - stretch.told)
                stretch.seen = ended

    def _tell(self, index: int, ended: int) -> None:
        """The core learns of so many steps gone over."""
        executor = self._executors[index]
        stretch = executor.stretch
        if stretch is None or ended == stretch.told:
            return
        times = stretch.ends[stretch.told : ended]
        for key in self._core.skip(executor.lane, times, stretch.seen - stretch.told):
            live = self._live[key]
            self._records.token(live.number, times[-1])
            if self._service is not None:
                self._service.drawn(live.tenant, times)
        executor.busy_ns += stretch.ends[ended] - stretch.ends[stretch.told]
        stretch.seen = stretch.told = ended
        for step in executor.steps:
            step.go_on(len(times))

    # Arrivals.

    def _await_next(self, now: int) -> None:
        if self._clients is not None:
            heappush(self._events, (now, _ARRIVAL, 0))
            return
        self._next = next(self._source, None)
        if self._next is not None:
            heappush(self._events, (self._next.at_ns, _ARRIVAL, 0))

    def _submission(self, key: SequenceKey, request: Request, max_tokens: int | None) -> Submission:
        keys: tuple[bytes, ...] = ()
        if request.block_ids:
            full = request.prompt_len // self._fleet.lane.block_size
            keys = tuple([block.to_bytes(8) for block in request.block_ids[:full]])
        return Submission(
            key=key,
            tenant=request.tenant,
            prompt_len=request.prompt_len,
            max_tokens=max_tokens,
            limits=self._fleet.limits,
            priority=request.priority,
            block_keys=keys,
            key_block_size=self._fleet.lane.block_size if keys else 0,
        )

    def _cost_estimate(self) -> CostEstimate | None:
        """What the scheduler would have measured, for policies that ask."""
        cost = self._fleet.cost
        return CostEstimate(int(cost.base_ns), int(cost.prefill_token_ns)) if self._core.refuses_late else None
