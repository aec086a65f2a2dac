"""The scheduler's pure core: owns every request's lengths, places, blocks and time limits, through a few verbs.

Must not know I/O, a clock, randomness, token ids or how a step is carried out: time is an argument, the shell holds
the ids. Equal calls give equal outputs, so the list of calls is a trace. Invariant: a live sequence waits in the
queue or runs on exactly one lane, and ends with exactly one Finished; `check` says all that holds besides.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from services.scheduler.admission import fit, queue_room, validate
from services.scheduler.calls import (
    Accepted,
    CoreConfig,
    Displaced,
    DoesNotFit,
    DuplicateKey,
    Emission,
    Finished,
    InvalidSubmission,
    InvariantError,
    LaneId,
    LaneSpec,
    Load,
    Plan,
    Reason,
    SequenceKey,
    SequenceOutcome,
    SequenceView,
    StepOutcome,
    Submission,
    TimeLimit,
    Tokens,
    Totals,
)
from services.scheduler.deadlines import Deadlines, earliest
from services.scheduler.lane import Lane
from services.scheduler.planning import StepDraft
from services.scheduler.policy import POLICIES, WaitingQueue
from services.scheduler.sequence import Sequence

_P = ParamSpec("_P")
_R = TypeVar("_R")

_STORY = 64  # calls kept for an InvariantError


def _told(
    verb: Callable[Concatenate["SchedulerCore", _P], _R],
) -> Callable[Concatenate["SchedulerCore", _P], _R]:
    """Keeps the call for the story, and puts the story into an InvariantError on its way out."""

    @wraps(verb)
    def call(self: "SchedulerCore", /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        self._story.append((verb.__name__, args, kwargs))
        try:
            return verb(self, *args, **kwargs)
        except InvariantError as error:
            error.story = self.story()
            raise

    return call


class SchedulerCore:
    def __init__(self, config: CoreConfig) -> None:
        if config.policy not in POLICIES:
            raise ValueError(f"policy {config.policy!r} is unknown; there are {', '.join(POLICIES)}")
        self._config = config
        self._sequences: dict[SequenceKey, Sequence] = {}  # the live ones, by submission
        self._waiting = WaitingQueue(POLICIES[config.policy])  # those without a placement
        self._lanes: dict[LaneId, Lane] = {}
        self._deadlines = Deadlines()
        self._totals = Totals()
        self._finished = dict.fromkeys(Reason, 0)
        self._arrivals = 0
        self._story: deque[tuple[str, tuple[object, ...], dict[str, object]]] = deque(maxlen=_STORY)

    # Lanes.

    @_told
    def attach(self, lane: LaneId, spec: LaneSpec, now: int) -> list[Emission]:
        """A new lane with an empty pool. Sequences that wait and that no lane can ever hold end here."""
        if lane in self._lanes:
            raise ValueError(f"lane {lane!r} is attached already")
        self._lanes[lane] = Lane(lane, spec, self._config)
        return self._fit_waiting()

    @_told
    def lose(self, lane: LaneId, now: int) -> list[Emission]:
        """The lane is gone: its sequences wait again, its steps in flight are forgotten, later results ignored."""
        lost = self._lanes.pop(lane, None)
        if lost is None:
            return []
        emissions: list[Emission] = []
        for sequence in lost.running:
            recompute = sequence.displace(now)
            self._waiting.push(sequence)
            emissions.append(Displaced(sequence.key, recompute))
            self._count(displacements=1, recomputed_tokens=recompute)
        return emissions + self._fit_waiting()

    # Requests.

    @_told
    def submit(self, submission: Submission, now: int) -> Accepted:
        """Raises InvalidSubmission, DuplicateKey, DoesNotFit or QueueFull; then nothing is kept.

        While no lane is attached the fit is unknown, and looked at when one is.
        """
        validate(submission)
        if submission.key in self._sequences:
            raise DuplicateKey("key", f"a live sequence has the key {submission.key}")
        limit = fit(submission, self._specs()) if self._lanes else None
        queue_room(submission, len(self._waiting), self._waiting.tokens, self._config)
        position = len(self._waiting)
        self._arrivals += 1
        sequence = Sequence(submission, arrival=self._arrivals, submitted_at=now, queued_at=now, limit=limit)
        self._sequences[sequence.key] = sequence
        self._waiting.push(sequence)
        self._arm(sequence)
        self._count(submitted=1)
        return Accepted(position, None if limit is None else limit - submission.prompt_len)

    @_told
    def cancel(self, key: SequenceKey, now: int) -> list[Emission]:
        """In every phase; nothing for a key that is not live."""
        sequence = self._sequences.get(key)
        return [] if sequence is None else [self._finish(sequence, Reason.CANCELLED)]

    @_told
    def stop(self, key: SequenceKey, kept_tokens: int, now: int) -> list[Emission]:
        """A stop string ends in delivered token `kept_tokens` (resumed ones not counted); later ones are discarded.

        Nothing for a key that is not live. Raises InvalidSubmission where fewer tokens were delivered.
        """
        sequence = self._sequences.get(key)
        if sequence is None:
            return []
        if not 0 <= kept_tokens <= sequence.delivered:
            raise InvalidSubmission(
                "kept_tokens", f"kept_tokens is {kept_tokens}; {sequence.delivered} tokens of {key} were delivered"
            )
        return [self._finish(sequence, Reason.STOP, kept=kept_tokens)]

    # Time.

    @_told
    def expire(self, now: int) -> list[Emission]:
        """Ends every sequence with a limit that `now` reached."""
        emissions: list[Emission] = []
        for key, limit in self._deadlines.pop_due(now):
            sequence = self._sequences[key]
            reason = Reason.TIME_LIMIT if sequence.delivered else Reason.DEADLINE
            emissions.append(self._finish(sequence, reason, limit=limit))
        return emissions

    def next_deadline(self) -> int | None:
        """When `expire` has something to do again, ns."""
        return self._deadlines.next()

    # Steps.

    @_told
    def plan(self, lane: LaneId, now: int) -> Plan | None:
        """The lane's next step. None only while something is in flight or nothing is runnable on it.

        A sequence whose deadline passed gets no slice, also before `expire` was called.
        """
        at = self._lanes.get(lane)
        if at is None or len(at.in_flight) >= self._config.steps_in_flight:
            return None
        plan = StepDraft(at, self._waiting, self._deadlines, self._config, now).build()
        if plan is None:
            return None
        for admitted in plan.admitted:
            self._arm(self._sequences[admitted.key])
        self._count(
            steps=1,
            planned_tokens=sum(piece.count for piece in plan.slices),
            admissions=len(plan.admitted),
            preemptions=len(plan.preempted),
            recomputed_tokens=sum(preempted.recompute_tokens for preempted in plan.preempted),
        )
        return plan

    @_told
    def apply(self, lane: LaneId, outcome: StepOutcome, now: int) -> list[Emission]:
        """Takes the results of the oldest step in flight. Those of a lost lane and of repeated steps are ignored.

        Raises OutOfStep, having changed nothing, where they answer another step or other rows.
        """
        at = self._lanes.get(lane)
        if at is None or 1 <= outcome.step_id <= at.applied:
            return []
        emissions: list[Emission] = []
        for row, result in at.pop_step(outcome):
            if row.alive:  # else it ended, and the draw was counted as discarded then
                emissions += self._accept(row.sequence, result, now)
        self._count(sampled=sum(emission.count for emission in emissions if isinstance(emission, Tokens)))
        return emissions

    # What there is to see.

    def load(self) -> Load:
        lanes = {lane_id: lane.load() for lane_id, lane in self._lanes.items()}
        return Load(waiting=len(self._waiting), waiting_tokens=self._waiting.tokens, lanes=lanes)

    def totals(self) -> Totals:
        return replace(self._totals, finished=dict(self._finished))

    def sequences(self) -> tuple[SequenceView, ...]:
        """Live ones, in the order of submission."""
        return tuple(sequence.view() for sequence in self._sequences.values())

    def story(self) -> tuple[str, ...]:
        """The last calls, oldest first."""
        return tuple(
            f"{verb}({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"
            for verb, args, kwargs in self._story
        )

    @_told
    def check(self) -> None:
        """Every invariant, in time linear in all there is. Raises InvariantError with the story."""
        self._waiting.check()
        self._deadlines.check()
        places = dict.fromkeys(self._sequences, 0)
        for lane in self._lanes.values():
            lane.check(self._config)
            for sequence in lane.running:
                if self._sequences.get(sequence.key) is not sequence:
                    raise InvariantError(f"{sequence.key} runs on lane {lane.id} and is not live")
                places[sequence.key] += 1
        for sequence in self._waiting:
            if self._sequences.get(sequence.key) is not sequence or sequence.placement is not None:
                raise InvariantError(f"{sequence.key} waits and is not live, or is placed")
            places[sequence.key] += 1
        if any(count != 1 for count in places.values()):
            raise InvariantError(f"not in exactly one place: {[key for key, count in places.items() if count != 1]}")
        if self._waiting.tokens != sum(sequence.known for sequence in self._waiting):
            raise InvariantError(f"the queue counts {self._waiting.tokens} tokens, and holds others")
        for sequence in self._sequences.values():
            if self._deadlines.get(sequence.key) != self._deadline(sequence):
                raise InvariantError(f"the deadline of {sequence.key} is not its earliest limit")
        if len(self._deadlines) > len(self._sequences):
            raise InvariantError("a finished sequence has a deadline")
        totals = self.totals()
        undecided = sum(sequence.delivered for sequence in self._sequences.values())
        if totals.sampled != totals.delivered + totals.discarded + undecided:
            raise InvariantError(f"tokens do not reconcile: {totals}, {undecided} undecided")
        if totals.submitted != sum(totals.finished.values()) + len(self._sequences):
            raise InvariantError(f"requests do not reconcile: {totals}, {len(self._sequences)} live")

    # How they are made.

    def _accept(self, sequence: Sequence, result: SequenceOutcome, now: int) -> list[Emission]:
        sequence.placed().pending -= 1
        if result.failed:
            return [self._finish(sequence, Reason.ERROR)]
        sequence.delivered += result.tokens
        sequence.last_token_at = now
        tokens = Tokens(sequence.key, result.tokens)
        if result.ended:
            return [tokens, self._finish(sequence, Reason.STOP)]
        if sequence.known == sequence.bound:
            return [tokens, self._finish(sequence, Reason.LENGTH)]
        self._arm(sequence)
        return [tokens]

    def _finish(
        self,
        sequence: Sequence,
        reason: Reason,
        *,
        kept: int | None = None,
        limit: TimeLimit | None = None,
        detail: str = "",
    ) -> Finished:
        usage = sequence.usage(sequence.delivered if kept is None else kept)
        finished = Finished(sequence.key, reason, usage, sequence.phase, limit, detail)
        drawn_in_flight = 0
        if sequence.placement is None:
            self._waiting.remove(sequence)
        else:
            drawn_in_flight = sequence.placement.pending
            self._lanes[sequence.placement.lane].vacate(sequence)
            sequence.placement = None
        self._deadlines.drop(sequence.key)
        del self._sequences[sequence.key]
        self._finished[reason] += 1
        self._count(sampled=drawn_in_flight, delivered=usage.delivered, discarded=usage.discarded)
        return finished

    def _fit_waiting(self) -> list[Emission]:
        """The lanes changed: limits may shrink (they never grow), and what no lane can hold ends."""
        if not self._lanes:
            return []
        emissions: list[Emission] = []
        for sequence in tuple(self._waiting):
            try:
                limit = fit(sequence.submission, self._specs())
            except DoesNotFit as refusal:
                emissions.append(self._finish(sequence, Reason.DOES_NOT_FIT, detail=refusal.message))
                continue
            sequence.limit = limit if sequence.limit is None else min(limit, sequence.limit)
            if sequence.known >= sequence.limit:
                emissions.append(self._finish(sequence, Reason.LENGTH))
        return emissions

    def _specs(self) -> list[LaneSpec]:
        return [lane.spec for lane in self._lanes.values()]

    def _deadline(self, sequence: Sequence) -> tuple[int, TimeLimit] | None:
        return earliest(
            sequence.submission.limits,
            sequence.submitted_at,
            admitted=sequence.admitted,
            last_token_at=sequence.last_token_at,
        )

    def _arm(self, sequence: Sequence) -> None:
        self._deadlines.set(sequence.key, self._deadline(sequence))

    def _count(self, **increments: int) -> None:
        counted = {name: getattr(self._totals, name) + by for name, by in increments.items()}
        self._totals = replace(self._totals, **counted)
