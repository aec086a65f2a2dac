"""The scheduler's pure core: owns every request's lengths, places, blocks and time limits, through a few verbs.

Must not know I/O, a clock, randomness, token ids or how a step is carried out: time is an argument, the shell holds
the ids. Equal calls give equal outputs, so the list of calls is a trace. Invariant: a live sequence waits in the
queue or runs on exactly one lane, and ends with exactly one Finished; `check` says all that holds besides.
"""

from dataclasses import replace

from services.scheduler.core.admission import check_block_keys, fit
from services.scheduler.core.binding import Binding
from services.scheduler.core.calls import (
    Accepted,
    BlockKey,
    CoreConfig,
    Displaced,
    DoesNotFit,
    DuplicateKey,
    Emission,
    Finished,
    InvalidSubmission,
    KvCleared,
    KvEvent,
    LaneId,
    LaneSpec,
    Load,
    Plan,
    Reason,
    SequenceKey,
    SequenceView,
    StepOutcome,
    Submission,
    TimeLimit,
    Totals,
)
from services.scheduler.core.cost import CostEstimate
from services.scheduler.core.deadlines import Deadlines, earliest
from services.scheduler.core.gate import Gate
from services.scheduler.core.invariants import check_deadlines, check_places
from services.scheduler.core.lane import Lane
from services.scheduler.core.lateness import in_time
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.limits import Rung
from services.scheduler.core.moment import Moment
from services.scheduler.core.planning import StepDraft
from services.scheduler.core.policies.policy import policy_named
from services.scheduler.core.policies.queue import WaitingQueue
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.story import Storied, told
from services.scheduler.core.waits import Wait, wait_of


class SchedulerCore(Storied):
    def __init__(self, config: CoreConfig) -> None:
        super().__init__()
        self._config = config
        self._gate = Gate(config)
        self._policy = config.policy
        self._sequences: dict[SequenceKey, Sequence] = {}  # the live ones, by submission
        self._waiting = WaitingQueue(  # those without a placement
            policy_named(config.policy), config.aging_ns, config.max_passes, self._gate.counters
        )
        self._lanes: dict[LaneId, Lane] = {}
        self._deadlines = Deadlines(lambda key: self._deadline(self._sequences[key]))
        self._ledger = Ledger()
        self._arrivals = 0
        self._binding = Binding()
        self._kv_events: list[KvEvent] = []

    # Lanes.

    @told
    def attach(self, lane: LaneId, spec: LaneSpec, now: int) -> list[Emission]:
        """A new lane with an empty pool. Sequences that wait and that no lane can ever hold end here."""
        if lane in self._lanes:
            raise ValueError(f"lane {lane!r} is attached already")
        self._lanes[lane] = Lane(lane, spec, self._config, self._kv_events.append if self._config.kv_events else None)
        self._binding.attach(lane)
        return self._fit_waiting(now)

    @told
    def close(self, lane: LaneId, now: int) -> None:
        """The lane goes soon: what runs there stays, nothing new comes. Without effect on one that is not attached."""
        if lane in self._lanes:
            self._binding.close(lane)

    @told
    def lose(self, lane: LaneId, now: int) -> list[Emission]:
        """The lane is gone: its sequences wait again, its steps in flight are forgotten, later results ignored."""
        lost = self._lanes.pop(lane, None)
        if lost is None:
            return []
        self._binding.lose(lane)
        emissions: list[Emission] = []
        for sequence in lost.running:
            recompute = sequence.displace(now)
            self._waiting.push(sequence)
            emissions.append(Displaced(sequence.key, recompute))
            self._ledger.count(displacements=1, recomputed_tokens=recompute)
        self._waiting.forget_claims(lane)
        if self._config.kv_events:
            self._kv_events.append(KvCleared(lane))
        return emissions + self._fit_waiting(now)

    # Requests.

    @told
    def submit(self, submission: Submission, now: int, cost: CostEstimate | None = None) -> Accepted:
        """Raises a SubmitError; then nothing is kept.

        While no lane is attached the fit is unknown, and looked at when one is. `cost`: what steps cost, where that is
        known; a policy that refuses what comes too late needs it.
        """
        keys = [submission.key, *(other.key for other in submission.others)]
        for place, key in enumerate(keys):
            if key in self._sequences or key in keys[:place]:
                raise DuplicateKey("key", f"a live sequence has the key {key}")
        let_in = self._gate.look(submission, self._waiting, self._specs(), now)
        coming = let_in.sequences(self._arrivals, now)
        ahead, ahead_tokens = self._waiting.ahead(coming[0])
        if cost is not None and self._waiting.policy.refuses_late and self._lanes:
            in_time(coming[0], ahead, ahead_tokens, self._lanes.values(), cost)
        self._gate.enter(let_in, now)
        for sequence in coming:
            self._sequences[sequence.key] = sequence
            self._waiting.push(sequence)
            self._arm(sequence)
        self._arrivals += len(coming)
        self._ledger.count(submitted=len(coming))
        most = None if let_in.limit is None else let_in.limit - submission.prompt_len
        return Accepted(ahead, most, let_in.degraded, len(coming))

    @told
    def cancel(self, key: SequenceKey, now: int) -> list[Emission]:
        """In every phase; nothing for a key that is not live."""
        sequence = self._sequences.get(key)
        return [] if sequence is None else [self._finish(sequence, Reason.CANCELLED, now)]

    @told
    def fail(self, key: SequenceKey, now: int) -> list[Emission]:
        """Its own failure on the executor, in a slice that draws nothing; nothing for a key that is not live."""
        sequence = self._sequences.get(key)
        if sequence is None:
            return []
        if sequence.placement is not None:
            self._lanes[sequence.placement.lane].withdraw(sequence)
        return [self._finish(sequence, Reason.ERROR, now)]

    @told
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
        return [self._finish(sequence, Reason.STOP, now, kept=kept_tokens)]

    # How it is decided.

    @told
    def set_policy(self, name: str, now: int) -> str:
        """Those that wait are put into the order of another policy; those that run stay. Returns the one before.

        Raises ValueError for a name that is not in POLICIES.
        """
        policy, previous = policy_named(name), self._policy
        self._policy = name
        self._waiting.follow(policy)
        self._waiting.age(now)
        return previous

    def rungs(self, priority: int) -> tuple[Rung, ...]:
        """What a request of this priority would go without now."""
        return self._gate.ladder.lost_by(priority)

    # Prefixes.

    @told
    def extend(self, key: SequenceKey, block_keys: tuple[BlockKey, ...]) -> None:
        """Keys of further full blocks of what is known of a sequence; nothing for a key that is not live.

        Raises InvalidSubmission where there are more keys than full blocks.
        """
        sequence = self._sequences.get(key)
        if sequence is None:
            return
        count = len(sequence.block_keys) + len(block_keys)
        check_block_keys(count, sequence.submission.key_block_size, sequence.known)
        sequence.block_keys.extend(block_keys)
        if sequence.placement is not None:
            self._lanes[sequence.placement.lane].publish(sequence)

    @told
    def pin(self, block_keys: tuple[BlockKey, ...], block_size: int, tenant: str, ttl_ns: int, now: int) -> int:
        """Keeps what is cached of a prefix for a while, on every lane; 0 ns end the lease. A running sequence that
        needs a block takes it all the same once nothing else is left.

        Returns how many leading blocks are pinned, on the lane that has most: no more than the tenant's share.
        """
        lanes = [lane for lane in self._lanes.values() if lane.spec.block_size == block_size]
        return max((lane.cache.lease(block_keys, tenant, ttl_ns, now) for lane in lanes), default=0)

    @told
    def flush(self) -> tuple[int, int]:
        """Forgets the blocks that nobody holds, on every lane. Returns how many, and how many known ones are held."""
        flushed = [lane.cache.flush() for lane in self._lanes.values()]
        return sum(removed for removed, _ in flushed), sum(held for _, held in flushed)

    def take_kv_events(self) -> list[KvEvent]:
        """What became known to the prefix caches or left them since the last call, in order."""
        events = list(self._kv_events)
        self._kv_events.clear()
        return events

    # Time.

    @told
    def expire(self, now: int) -> list[Emission]:
        """Ends every sequence with a limit that `now` reached."""
        emissions: list[Emission] = []
        self._gate.watch(self._waiting, now)
        for key, limit in self._deadlines.pop_due(now):
            sequence = self._sequences[key]
            begun = sequence.delivered or sequence.submission.output_len
            reason = Reason.TIME_LIMIT if begun else Reason.DEADLINE
            emissions.append(self._finish(sequence, reason, now, limit=limit))
        return emissions

    def next_deadline(self) -> int | None:
        """`expire` has nothing to do before, ns. It may turn out to have nothing to do then either: a limit between
        tokens has moved on with the tokens."""
        return self._deadlines.next()

    # Steps.

    @told
    def plan(self, lane: LaneId, now: int) -> Plan | None:
        """The lane's next step. None only while something is in flight or nothing is runnable on it.

        A sequence whose deadline passed gets no slice, also before `expire` was called.
        """
        at = self._lanes.get(lane)
        if at is None or len(at.in_flight) >= self._config.steps_in_flight:
            return None
        at.cache.expire(now)
        self._gate.watch(self._waiting, now)
        choice = self._binding.choice(at, self._lanes, self._config.max_passes, now)
        gate = self._gate
        moment = Moment(
            *(at, self._waiting, gate.counters, self._deadlines, gate.ladder, choice, self._config, now),
            soon=self._binding.soon(lane),
        )
        plan = StepDraft(moment).build()
        if plan is None:
            return None
        tokens = at.in_flight[-1].tokens
        self._binding.planned(lane, tokens, now)
        for admitted in plan.admitted:
            self._arm(self._sequences[admitted.key])
        self._ledger.planned(plan, tokens, sum(self._sequences[admitted.key].known for admitted in plan.admitted))
        return plan

    @told
    def apply(self, lane: LaneId, outcome: StepOutcome, now: int) -> list[Emission]:
        """Takes the results of the oldest step in flight. Those of a lost lane and of repeated steps are ignored.

        Raises OutOfStep, having changed nothing, where they answer another step or other rows.
        """
        at = self._lanes.get(lane)
        if at is None or 1 <= outcome.step_id <= at.applied:
            return []
        emissions: list[Emission] = []
        rows = at.pop_step(outcome)
        self._binding.applied(lane, now)
        served: dict[str, int] = {}  # tokens, by tenant
        for placement, result in zip(rows, outcome.outcomes, strict=True):
            sequence = placement.sequence
            if sequence.placement is not placement:
                continue  # it ended, and the draw was counted as discarded then
            placement.pending -= 1
            if result.failed:
                at.withdraw(sequence)
                emissions.append(self._finish(sequence, Reason.ERROR, now))
                continue
            tenant = sequence.submission.tenant
            served[tenant] = served.get(tenant, 0) + 1
            first = sequence.last_token_at is None
            sequence.deliver(1, now)
            emissions.append(sequence.token)
            if result.ended or sequence.known == sequence.limit:
                emissions.append(self._finish(sequence, Reason.STOP if result.ended else Reason.LENGTH, now))
            elif first:
                self._arm(sequence)
        self._gate.served(served)
        self._ledger.count(sampled=sum(served.values()))
        return emissions

    # What there is to see.

    def load(self) -> Load:
        lanes = {lane_id: lane.load() for lane_id, lane in self._lanes.items()}
        return Load(
            waiting=len(self._waiting),
            waiting_tokens=self._waiting.tokens,
            policy=self._policy,
            rungs=self._gate.ladder.rungs,
            lanes=lanes,
        )

    def totals(self) -> Totals:
        ladder = self._gate.ladder
        return replace(self._ledger.totals(), rungs_taken=ladder.taken, rungs_released=ladder.released)

    def sequences(self) -> tuple[SequenceView, ...]:
        """Live ones, in the order of submission."""
        return tuple(sequence.view() for sequence in self._sequences.values())

    def wait(self, key: SequenceKey) -> Wait | None:
        """Why a live sequence waits; None for one that does not."""
        sequence = self._sequences.get(key)
        if sequence is None or sequence.placement is not None:
            return None
        open_lanes = [lane for lane in self._lanes.values() if not self._binding.closed(lane.id)]
        return wait_of(sequence, self._waiting.ahead(sequence)[0], open_lanes)

    @told
    def check(self) -> None:
        """Every invariant, in time linear in all there is. Raises InvariantError with the story."""
        self._waiting.check()
        self._gate.check(self._sequences)
        for lane in self._lanes.values():
            lane.check(self._config)
        check_places(self._sequences, self._waiting, self._lanes.values())
        check_deadlines(self._sequences, self._deadlines, self._deadline)
        self._ledger.check(self._sequences.values())

    # How they are made.

    def _finish(
        self,
        sequence: Sequence,
        reason: Reason,
        now: int,
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
            self._lanes[sequence.placement.lane].vacate(sequence, ended=reason is not Reason.ERROR)
            self._waiting.vacated(sequence)
            sequence.placement = None
        self._deadlines.drop(sequence.key)
        self._gate.ended(sequence, reason, now)
        del self._sequences[sequence.key]
        self._ledger.finished(reason)
        self._ledger.count(sampled=drawn_in_flight, delivered=usage.delivered, discarded=usage.discarded)
        return finished

    def _fit_waiting(self, now: int) -> list[Emission]:
        """The lanes changed: limits may shrink (they never grow), and what no lane can hold ends."""
        if not self._lanes:
            return []
        emissions: list[Emission] = []
        for sequence in tuple(self._waiting):
            try:
                limit = fit(sequence.submission, self._specs())
            except DoesNotFit as refusal:
                emissions.append(self._finish(sequence, Reason.DOES_NOT_FIT, now, detail=refusal.message))
                continue
            sequence.limit = limit if sequence.limit is None else min(limit, sequence.limit)
            if sequence.known >= sequence.limit:
                emissions.append(self._finish(sequence, Reason.LENGTH, now))
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
