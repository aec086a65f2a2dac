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
    Accepted,
    Emission,
    Finished,
    LaneId,
    LaneSpec,
    Load,
    Phase,
    Plan,
    Reason,
    SequenceKey,
    SequenceView,
    SubmitError,
    Usage,
)
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.cost import StepFit
from services.scheduler.core.waits import Wait
from services.scheduler.delivery import Delivery
from services.scheduler.intake import Admission, CacheUse, ServedModel
from services.scheduler.live import FilledStep, LiveAnswer, LiveRequest
from services.scheduler.observer import Observer, Refusal
from services.scheduler.outbox import Outbox
from services.scheduler.prefix_keys import KeyChain
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
    planned: dict[int, tuple[Plan, frozenset[int], int]]  # steps in flight; slots that score prompts; when planned


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
        self._streams = Delivery(core, observer)
        self._tombstones = Tombstones()
        self._lanes: dict[LaneId, _Lane] = {}
        self._cost = StepFit()
        self.prefixes = Prefixes(config.prefix)
        self._serial = 0
        self._alarm = Alarm(lambda: self._after(self._core.expire(self._clock())))
        self._lost_since: int | None = None
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
        older = self._streams.named.superseded(name, caller.attempt)
        first = self._serial + 1
        self._serial += len(admission.answers)
        keys = {
            index: f"{caller.tenant}/{caller.request_id}#{first + index}" for index in range(len(admission.answers))
        }
        drawing = {
            index: key
            for index, key in keys.items()
            if not admission.answers[index].told and not admission.is_whole(index)
        }
        accepted, chains = Accepted(0, admission.max_tokens, answers=0), dict[int, KeyChain]()
        if drawing:
            chain = self.prefixes.chain(caller.tenant, admission.cache, model.numerics)
            submission, chains = stepping.measured(drawing, admission, chain)
            try:
                cost = self._cost.estimate(self._streams.drain_rate.request_ns(now))
                accepted = self._core.submit(submission, now, cost)
            except SubmitError as error:
                raise endings.of_submit_error(error, self._streams.drain_rate.seconds_for(1, now)) from error
        if older is not None:
            self.cancel(older, Aborted(f"superseded by attempt {caller.attempt}", reason="SUPERSEDED"))
        live = LiveRequest(
            admission=admission,
            position=accepted.position,
            max_tokens=accepted.max_tokens or model.max_model_len - len(admission.prompt_ids),
            numerics=model.numerics,
            outbox=Outbox(self._config.stream_buffer_tokens * len(keys), self._config.slow_reader_ns),
            span=span,
            serial=first,
            degraded=accepted.degraded,
        )
        if accepted.answers < len(drawing):  # the first so many came in
            keys = drawing = dict(list(drawing.items())[: accepted.answers])
        live.answers = [self._answer(live, index, key, parent, chains.get(index), now) for index, key in keys.items()]
        live.answers[next(iter(drawing), 0)].scores = admission.scores_prompt
        self._begin(live, [live.answers[index] for index in drawing], now)
        self._after(())
        return live

    def _answer(
        self,
        live: LiveRequest,
        index: int,
        key: SequenceKey,
        parent: Context,
        keys: KeyChain | None,
        now: int,
    ) -> LiveAnswer:
        admission = live.admission
        trace = RequestTrace(self._tracer, parent, now, index if len(admission.answers) > 1 else None)
        ids = [*admission.prompt_ids, *admission.answers[index].output_ids]
        return LiveAnswer(live, index, key, trace, ids, keys)

    def _begin(self, live: LiveRequest, drawing: Sequence[LiveAnswer], now: int) -> None:
        """Of an answer whose last token is drawn already, and whose end nobody could tell, there is nothing to compute:
        the core never sees it, and it ends here."""
        admission = live.admission
        whole = [
            answer
            for answer in live.answers
            if admission.is_whole(answer.index) and not admission.answers[answer.index].told
        ]
        live.left = len(drawing) + len(whole)
        self._streams.enter(live, drawing)
        for answer in (*drawing, *whole):
            answer.trace.queued("resumed" if answer.resumed else "new", now)
        for answer in whole:
            reason = Reason.STOP if admission.ended_by_stop_id(answer.index) else Reason.LENGTH
            usage = Usage(prompt_tokens=len(admission.prompt_ids), delivered=0, discarded=0)
            self._streams.finish(answer, Finished(answer.key, reason, usage, Phase.QUEUE), now)

    def cancel(self, live: LiveRequest, verdict: endings.Verdict) -> None:
        """Ends a request from this side, in whatever phase it is. Nothing happens if it has ended."""
        if live.left:
            live.verdict = verdict
            self._streams.cancel(live, self._clock())
            self._after(())

    def refused(self, refusal: Refusal) -> None:
        """A request came that was never queued."""
        self._observer.refused(refusal)

    def abort(self, tenant: str, request_id: str, attempt: int | None = None) -> bool:
        """Whether the request was live. An unknown one is remembered, since its Generate may still come.

        attempt: which one is meant, with those before it; None: whichever is live.
        """
        live = self._streams.named.find((tenant, request_id))
        current = 0 if live is None else live.admission.caller.attempt
        if live is None or (attempt is not None and attempt > current):
            self._tombstones.put((tenant, request_id), attempt, self._clock())
        if live is None or (attempt is not None and attempt < current):
            return False
        self.cancel(live, Cancelled("the request was aborted", reason="ABORTED_BY_CALLER"))
        return True

    def stop(self, tenant: str, request_id: str, kept_tokens: int, attempt: int | None = None, index: int = 0) -> bool:
        """A stop string was found after `kept_tokens` output tokens of an answer. Whether the answer was live.

        attempt: whose tokens were counted; another one that is live by now goes on. None: whichever is live.
        """
        live = self._streams.named.find((tenant, request_id))
        if live is None or attempt not in (None, live.admission.caller.attempt):
            return False
        if index >= len(live.answers):
            raise InvalidArgument(
                f"index is {index}; the request has {len(live.answers)} answers",
                field="index",
                limit=len(live.answers) - 1,
            )
        answer = live.answers[index]
        if not 1 <= kept_tokens <= answer.output_tokens:
            raise InvalidArgument(
                f"kept_tokens is {kept_tokens}; {answer.output_tokens} tokens were delivered",
                field="kept_tokens",
                limit=answer.output_tokens,
            )
        if answer.key not in self._streams.answers:
            return False
        answer.trace.stopped()
        self._after(self._core.stop(answer.key, max(0, kept_tokens - answer.resumed), self._clock()))
        return True

    def pin(self, tenant: str, cache: CacheUse, prompt_ids: Sequence[int], ttl_ns: int) -> Pinned:
        """Keeps what is cached of a prompt. Raises FailedPrecondition or Unavailable."""
        numerics = self.served_model().numerics
        return self.prefixes.pin(self._core, tenant, cache, numerics, prompt_ids, ttl_ns, self._clock())

    def flush(self) -> tuple[int, int]:
        """Empties the prefix cache. Returns blocks forgotten, and known ones that requests which run still hold."""
        flushed = self._core.flush()
        self._after(())
        return flushed

    def set_policy(self, name: str) -> str:
        """Which policy orders the queue from now on. Returns the one before."""
        previous = self._core.set_policy(name, self._clock())
        self._after(())
        return previous

    def load(self) -> Load:
        return self._core.load()

    def live_requests(self) -> Sequence[LiveRequest]:
        """Oldest first."""
        return self._streams.requests()

    def views(self) -> Sequence[tuple[LiveAnswer, SequenceView]]:
        """Live answers as the core sees them, oldest first."""
        return tuple((self._streams.answers[view.key], view) for view in self._core.sequences())

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
                await self._streams.idle.wait()
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
            elif live.scores_prompt and not model.scores_prompts:
                self.cancel(live, endings.no_prompt_logprobs())
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
        self._streams.carry_out((*plan.preempted, *plan.admitted), now, plan.step_id)
        filled = stepping.fill(plan, self._streams.answers)
        self._lanes[lane].planned[plan.step_id] = (plan, filled.scoring, now)
        self._observer.planned(filled.tokens, len(plan.slices))
        self.prefixes.collect(self._core)
        return filled

    def apply(self, lane: LaneId, result: StepResult) -> None:
        """What a step gave: tokens go to their streams, endings too."""
        now = self._clock()
        plan, scoring, planned_ns = self._lanes[lane].planned.pop(result.step_id)
        timings = result.timings
        self._cost.observe(
            sum(planned.count for planned in plan.slices), timings.prepare_ns + timings.forward_ns + timings.sample_ns
        )
        self._observer.applied(now - planned_ns)
        apart = stepping.take_apart(plan, scoring, result, self._streams.answers)
        emissions = self._core.apply(lane, apart.outcome, now)
        for answer, scored in apart.scored:
            answer.request.score(scored, now)
        self._streams.carry_out(emissions, now, result.step_id, apart.drawn)
        for answer in apart.failed:
            self._after(self._core.fail(answer.key, now))
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
        self._streams.carry_out(emissions, now)
        self.prefixes.collect(self._core)
        deadline = self._core.next_deadline()
        self._alarm.set(None if deadline is None else deadline - now)
        for lane in self._lanes.values():
            lane.wake.set()
