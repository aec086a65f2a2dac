"""The scheduler's shell: one core, its live requests, its lanes. Everything runs on one event loop, so there are no
locks, and no method but `drain` waits.

Owns: ids and sampling of each request (the core knows lengths only), the mapping of emissions to streams, the
deadline timer. Must not know gRPC: `service` speaks to callers, `lease` to executors.
Invariant: whatever changes the core hands its emissions to `_carry_out` and wakes the lanes.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer

from executor.step import StepResult
from services.errors import Aborted, Cancelled, InvalidArgument, Unavailable
from services.scheduler import endings, stepping
from services.scheduler.alarm import Alarm
from services.scheduler.core.calls import (
    Admitted,
    Displaced,
    Emission,
    Finished,
    LaneId,
    LaneSpec,
    Load,
    Phase,
    Plan,
    Preempted,
    Reason,
    SequenceKey,
    SequenceView,
    SubmitError,
    Tokens,
    Usage,
)
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.cost import DrainRate, StepFit
from services.scheduler.core.waits import Wait
from services.scheduler.intake import Admission, CacheUse, ServedModel
from services.scheduler.live import FilledStep, LiveRequest
from services.scheduler.named import Named
from services.scheduler.observer import Observer, Refusal
from services.scheduler.outbox import Drawn, Outbox
from services.scheduler.prefixes import Pinned, PrefixConfig, Prefixes
from services.scheduler.request_trace import RequestTrace
from services.scheduler.tombstones import Tombstones

TICK_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class EngineConfig:
    stream_buffer_tokens: int = 256
    slow_reader_ns: int = 30_000_000_000
    executor_grace_ns: int = 60_000_000_000
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    losses_in_a_row: int = 5  # a request that loses its executor so often without a token between is given up


@dataclass(slots=True)
class _Lane:
    """The shell's part of a lane."""

    wake: asyncio.Event
    planned: dict[int, tuple[Plan, int]]  # steps in flight, and when they were planned


class Engine:
    def __init__(
        self,
        core: SchedulerCore,
        config: EngineConfig,
        tracer: Tracer,
        observer: Observer,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._core = core
        self._config = config
        self._tracer = tracer
        self._observer = observer
        self._clock = clock
        self._live: dict[SequenceKey, LiveRequest] = {}
        self._named = Named()
        self._tombstones = Tombstones()
        self._lanes: dict[LaneId, _Lane] = {}
        self._drain_rate = DrainRate()
        self._cost = StepFit()
        self.prefixes = Prefixes(config.prefix)
        self._serial = 0
        self._alarm = Alarm(lambda: self._after(self._core.expire(self._clock())))
        self._lost_since: int | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self.model: ServedModel | None = None

    # -- callers ---------------------------------------------------------------------------------------------------

    def served_model(self) -> ServedModel:
        """What requests are checked against. Raises Unavailable while nothing can serve."""
        if self.draining:
            raise Unavailable("the scheduler is draining and takes no new requests", reason="DRAINING")
        if self.model is None:
            raise Unavailable("no executor has answered yet", reason="NO_EXECUTOR")
        if self._lost_since is not None and self._clock() - self._lost_since > self._config.executor_grace_ns:
            raise Unavailable("the executor is lost", reason="EXECUTOR_LOST")
        return self.model

    def submit(self, admission: Admission, span: Span, parent: Context) -> LiveRequest:
        """Queues a request. Raises AlreadyExists, Cancelled, InvalidArgument, ResourceExhausted or Unavailable."""
        model = self.served_model()
        now = self._clock()
        caller = admission.caller
        name = (caller.tenant, caller.request_id)
        if self._tombstones.take(name, caller.attempt, now):
            raise Cancelled("the request was aborted before it came", reason="ABORTED_EARLY")
        older = self._named.superseded(name, caller.attempt)
        self._serial += 1
        key = f"{caller.tenant}/{caller.request_id}#{self._serial}"
        if admission.resumed_to_its_end:
            return self._end_resumed(key, admission, older, span, parent)
        keys = self.prefixes.chain(caller.tenant, admission.cache, model.numerics)
        try:
            cost = self._cost.estimate(self._drain_rate.request_ns(now))
            accepted = self._core.submit(stepping.measured(key, admission, keys), now, cost)
        except SubmitError as error:
            raise endings.of_submit_error(error, self._drain_rate.seconds_for(1, now)) from error
        max_tokens = accepted.max_tokens or model.max_model_len - len(admission.prompt_ids)
        live = self._enter(key, admission, accepted.position, max_tokens, older, span, parent)
        live.keys, live.degraded = keys, accepted.degraded
        self._after(())
        return live

    def _enter(
        self,
        key: SequenceKey,
        admission: Admission,
        position: int,
        max_tokens: int,
        older: LiveRequest | None,
        span: Span,
        parent: Context,
    ) -> LiveRequest:
        """A request is live from here on, in the place of `older`."""
        now = self._clock()
        if older is not None:
            self.cancel(older, Aborted(f"superseded by attempt {admission.caller.attempt}", reason="SUPERSEDED"))
        live = LiveRequest(
            key=key,
            admission=admission,
            position=position,
            max_tokens=max_tokens,
            numerics=self.served_model().numerics,
            outbox=Outbox(self._config.stream_buffer_tokens, self._config.slow_reader_ns),
            trace=RequestTrace(self._tracer, parent, now),
            span=span,
            ids=[*admission.prompt_ids, *admission.output_ids],
        )
        live.trace.queued("resumed" if admission.output_ids else "new", now)
        self._live[key] = live
        self._named.put(live)
        self._idle.clear()
        self._observer.accepted(live)
        return live

    def _end_resumed(
        self, key: SequenceKey, admission: Admission, older: LiveRequest | None, span: Span, parent: Context
    ) -> LiveRequest:
        """An answer whose last token is drawn already, and whose end nobody could tell. There is nothing to compute,
        so the core never sees it."""
        live = self._enter(key, admission, 0, admission.max_tokens or len(admission.output_ids), older, span, parent)
        reason = Reason.STOP if admission.ended_by_stop_id else Reason.LENGTH
        usage = Usage(prompt_tokens=len(admission.prompt_ids), delivered=0, discarded=0)
        self._finish(live, Finished(key, reason, usage, Phase.QUEUE), self._clock())
        return live

    def cancel(self, live: LiveRequest, verdict: endings.Verdict) -> None:
        """Ends a request from this side, in whatever phase it is. Nothing happens if it has ended."""
        if live.key in self._live:
            live.verdict = verdict
            self._after(self._core.cancel(live.key, self._clock()))

    def refused(self, refusal: Refusal) -> None:
        """A request came that was never queued."""
        self._observer.refused(refusal)

    def abort(self, tenant: str, request_id: str, attempt: int | None = None) -> bool:
        """Whether the request was live. An unknown one is remembered, since its Generate may still come.

        attempt: which one is meant, with those before it; None: whichever is live.
        """
        live = self._named.find((tenant, request_id))
        current = 0 if live is None else live.admission.caller.attempt
        if live is None or (attempt is not None and attempt > current):
            self._tombstones.put((tenant, request_id), attempt, self._clock())
        if live is None or (attempt is not None and attempt < current):
            return False
        self.cancel(live, Cancelled("the request was aborted", reason="ABORTED_BY_CALLER"))
        return True

    def stop(self, tenant: str, request_id: str, kept_tokens: int, attempt: int | None = None) -> bool:
        """A stop string was found after `kept_tokens` output tokens. Whether the request was live.

        attempt: whose tokens were counted; another one that is live by now goes on. None: whichever is live.
        """
        live = self._named.find((tenant, request_id))
        if live is None or attempt not in (None, live.admission.caller.attempt):
            return False
        if not 1 <= kept_tokens <= live.output_tokens:
            raise InvalidArgument(
                f"kept_tokens is {kept_tokens}; {live.output_tokens} tokens were delivered",
                field="kept_tokens",
                limit=live.output_tokens,
            )
        live.trace.stopped()
        drawn_here = max(0, kept_tokens - len(live.admission.output_ids))
        self._after(self._core.stop(live.key, drawn_here, self._clock()))
        return True

    def pin(self, tenant: str, cache: CacheUse, prompt_ids: Sequence[int], ttl_ns: int) -> Pinned:
        """Keeps what is cached of a prompt. Raises FailedPrecondition or Unavailable."""
        numerics = self.served_model().numerics
        return self.prefixes.pin(self._core, tenant, cache, numerics, prompt_ids, ttl_ns, self._clock())

    def set_policy(self, name: str) -> str:
        """Which policy orders the queue from now on. Returns the one before."""
        previous = self._core.set_policy(name, self._clock())
        self._after(())
        return previous

    def load(self) -> Load:
        return self._core.load()

    def live_requests(self) -> Sequence[LiveRequest]:
        """Oldest first."""
        return tuple(self._live.values())

    def views(self) -> Sequence[tuple[LiveRequest, SequenceView]]:
        """Live requests as the core sees them, oldest first."""
        return tuple((self._live[view.key], view) for view in self._core.sequences())

    def wait(self, view: SequenceView) -> Wait | None:
        """Why a request waits, if it does."""
        return self._core.wait(view.key)

    def now(self) -> int:
        """ns, of the clock that all times here are of."""
        return self._clock()

    async def drain(self, limit_s: float) -> int:
        """Refuses new work, waits for the old, cancels what is left at the limit. How many were cancelled."""
        self.draining = True
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        left = self.live_requests()
        for live in left:
            self.cancel(live, Unavailable("the scheduler was drained", reason="DRAINING"))
        return len(left)

    # -- lanes -----------------------------------------------------------------------------------------------------

    def serves_other(self, numerics: str) -> bool:
        """Whether executors serve here whose tokens are not those of `numerics`."""
        return bool(self._lanes) and self.model is not None and self.model.numerics != numerics

    def attach(self, lane: LaneId, spec: LaneSpec, model: ServedModel, executor: str = "") -> asyncio.Event:
        """A lease was granted. The event is set whenever planning may have become possible.

        Requests that wait and were begun or checked for other numerics end: no executor here computes those any more.
        """
        for live in self.live_requests():
            if live.numerics != model.numerics:
                self.cancel(live, endings.other_numerics(live.output_tokens, live.numerics, model.numerics))
        self.model = model
        self._lost_since = None
        state = _Lane(asyncio.Event(), {})
        self._lanes[lane] = state
        self.prefixes.attached(lane, executor, spec.block_size)
        self._after(self._core.attach(lane, spec, self._clock()))
        return state.wake

    def close(self, lane: LaneId) -> None:
        """Its executor is about to leave: what runs there may end there, nothing new comes."""
        if lane in self._lanes:
            self._core.close(lane, self._clock())
            self._after(())

    def is_empty(self, lane: LaneId) -> bool:
        load = self._core.load().lanes.get(lane)
        return load is None or not (load.running or load.steps_in_flight)

    def lose(self, lane: LaneId) -> None:
        """The lease is over; what ran there waits again."""
        if self._lanes.pop(lane, None) is None:
            return
        now = self._clock()
        if not self._lanes:
            self._lost_since = now
        self._observer.lost()
        self._after(self._core.lose(lane, now))
        self.prefixes.lost(lane)
        for live in self.live_requests():
            if live.losses >= self._config.losses_in_a_row:
                self.cancel(live, endings.lost_too_often(live.losses))

    def plan(self, lane: LaneId) -> FilledStep | None:
        """The next step of a lane, or None while there is nothing to send."""
        now = self._clock()
        plan = self._core.plan(lane, now)
        if plan is None:
            return None
        self._lanes[lane].planned[plan.step_id] = (plan, now)
        self._carry_out((*plan.preempted, *plan.admitted), now, plan.step_id)
        filled = stepping.fill(plan, self._live)
        self._observer.planned(filled.tokens, len(plan.slices))
        self.prefixes.collect(self._core)
        return filled

    def apply(self, lane: LaneId, result: StepResult) -> None:
        """What a step gave: tokens go to their streams, endings too."""
        now = self._clock()
        plan, planned_ns = self._lanes[lane].planned.pop(result.step_id)
        timings = result.timings
        self._cost.observe(
            sum(planned.count for planned in plan.slices), timings.prepare_ns + timings.forward_ns + timings.sample_ns
        )
        self._observer.applied(now - planned_ns)
        outcome, drawn = stepping.take_apart(plan, result, self._live)
        self._carry_out(self._core.apply(lane, outcome, now), now, result.step_id, drawn)
        self._after(())

    # -- what every change leads to --------------------------------------------------------------------------------

    def tick(self) -> None:
        """Called every TICK_S: what no other event brings up."""
        now = self._clock()
        self._tombstones.forget(now)
        for live in self.live_requests():
            if live.outbox.overdue(now):
                self.cancel(live, endings.slow_reader())
        if self._lost_since is not None and now - self._lost_since > self._config.executor_grace_ns:
            for live in self.live_requests():
                self.cancel(live, Unavailable("the executor is lost", reason="EXECUTOR_LOST"))
        self._observer.load(self._core.load(), self._core.totals())

    def _after(self, emissions: Iterable[Emission]) -> None:
        now = self._clock()
        self._carry_out(emissions, now)
        self.prefixes.collect(self._core)
        deadline = self._core.next_deadline()
        self._alarm.set(None if deadline is None else deadline - now)
        for lane in self._lanes.values():
            lane.wake.set()

    def _carry_out(
        self,
        emissions: Iterable[Emission],
        now: int,
        step_id: int = 0,
        drawn: dict[SequenceKey, Drawn] | None = None,
    ) -> None:
        for emission in emissions:
            live = self._live[emission.key]
            match emission:
                case Admitted():
                    live.trace.admitted(emission.cached_tokens, step_id, now)
                case Tokens():
                    live.deliver((drawn or {})[emission.key].first(emission.count), now)
                    live.losses = 0
                    if keys := live.new_block_keys():
                        self._core.extend(live.key, keys)
                    live.trace.token(step_id, now)
                    self._observer.tokens(live)
                case Preempted() | Displaced():
                    why = "preempted" if isinstance(emission, Preempted) else "executor_lost"
                    live.losses += isinstance(emission, Displaced)
                    live.trace.queued(why, now)
                    self._observer.preempted(live, why)
                case Finished():
                    self._finish(live, emission, now)

    def _finish(self, live: LiveRequest, finished: Finished, now: int) -> None:
        del self._live[live.key]
        self._named.drop(live)
        self._drain_rate.observe(now)
        phase = live.trace.phase
        times = live.trace.finished(finished.usage.delivered, now)
        ending = endings.of(finished, live.verdict, times, len(live.admission.output_ids))
        live.end(ending)
        if not self._live:
            self._idle.set()
        self._observer.ended(live, finished.usage, times, endings.outcome(ending, phase))
