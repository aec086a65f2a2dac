"""Builds one step of one lane.

Knows the lane, the queue and the deadlines, and changes the first two; nothing of users or totals. One idea: computed
chases the length, and a slice is what is missing, cut by the budget. There is no prefill mode and no decode mode.

Running sequences come first, by rank; each is sure of the token a decode needs, and prompts share the rest. When the
pool is short the sequences of the lowest rank make room: one that a step in flight still references is *benched* (no
slice in this step) and preempted only once its results are in, so no drawn token is ever without an owner, and a
sequence that ends meanwhile is never recomputed. A needy sequence with nobody below it just waits: the best
protected one has nobody above it, fits the pool alone, and so always gets its blocks in the end.
"""

from dataclasses import dataclass

from services.scheduler.core.admission import fits
from services.scheduler.core.binding import Choice
from services.scheduler.core.calls import (
    Admitted,
    CoreConfig,
    InvariantError,
    Plan,
    PlannedSlice,
    Preempted,
    SequenceKey,
)
from services.scheduler.core.deadlines import Deadlines
from services.scheduler.core.degrade import Ladder
from services.scheduler.core.forecast import PoolForecast
from services.scheduler.core.lane import InFlight, Lane, Row
from services.scheduler.core.policies.policy import Batching, claim, protection
from services.scheduler.core.policies.queue import WaitingQueue
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.shares import PromptShares

_LOOK_PAST = 64  # sequences at the head of the queue that this lane can't take before it stops looking
_LOOK_SMALLER = 8  # of them, those that merely can't be afforded now
_CLAIMS = 8  # waiting sequences that room is made for in one step


@dataclass(slots=True)
class _Grant:
    sequence: Sequence
    missing: int  # tokens, before this step
    count: int  # of them granted
    new_blocks: list[int]
    admitted: bool


class StepDraft:
    def __init__(
        self,
        lane: Lane,
        waiting: WaitingQueue,
        deadlines: Deadlines,
        ladder: Ladder,
        choice: Choice,
        config: CoreConfig,
        now: int,
    ) -> None:
        self._lane = lane
        self._waiting = waiting
        self._policy = waiting.policy
        self._deadlines = deadlines
        self._choice = choice
        first = deadlines.next()
        self._some_passed = first is not None and first <= now
        self._config = config
        self._now = now
        self._padding = 0
        if self._policy.batching is Batching.PADDED and lane.running:
            self._padding = max(0, lane.batch - len(lane.running))
        self._left = lane.spec.max_batched_tokens - self._padding
        self._shares = PromptShares(self._left, ladder, config)
        self._grants: dict[SequenceKey, _Grant] = {}  # in the order of the slices
        self._admitted: list[Admitted] = []
        self._preempted: list[Preempted] = []
        self._best_victim = 0  # protection; of no meaning before there is one
        self._claimed: list[Sequence] = []  # who is to make room for a waiting one
        self._benched: dict[SequenceKey, None] = {}  # no slice in this step: a victim once its results are in
        self._kept, self._kept_for = 0, 0  # blocks that no sequence takes whose protection is not as good as that
        self._prompts: list[Sequence] = []  # of those that run, who misses more than one token
        self._short = False  # somebody wants a block and waits

    def build(self) -> Plan | None:
        self._waiting.age(self._now)
        self._claim()
        self._serve_running()
        self._oust_for_claims()
        if not self._preempted and not self._benched and not self._short:
            self._admit()
        self._hand_out_rest()
        if self._preempted and not self._grants:
            raise InvariantError(f"lane {self._lane.id}: a step that preempted has no slice")
        return self._commit() if self._grants else None

    def _claim(self) -> None:
        """Waiting sequences of a higher priority take slots and blocks from running work of a strictly lower class:
        as few victims as will do, and none where all together would not."""
        lane, policy = self._lane, self._policy
        if not policy.preempts or not lane.running or not self._waiting or self._choice.closed:
            return
        victims = [sequence for sequence in lane.running if not sequence.placed().reserved]  # the last goes first
        walk, forecast = self._waiting.walk(lambda _: 0), None
        slots, taken, claims = len(lane.free_slots), 0, 0
        for _ in range(_LOOK_PAST):
            head = walk.next()
            if head is None or claims == _CLAIMS:
                break
            if self._passed(head) or not fits(head, lane.spec) or head.claimed not in (None, lane.id):
                continue
            worst = lane.running[-1].placed().rank[0]
            if claim(head) >= worst:  # also of all behind it: none of them is of a higher class
                break
            found = lane.find(head)
            if lane.computing(head, len(found)) is not None:
                continue
            forecast = forecast or PoolForecast(lane, self._config)
            trial, more = forecast.copy(), 0
            reach = len(found) * lane.spec.block_size
            reach += min(head.missing - reach, self._cap(alone=False))
            reserved = self._reserves(head)
            while slots + taken + more <= claims or not trial.affords(head, found, reach, reserved=reserved):
                index = len(victims) - 1 - taken - more
                if index < 0 or victims[index].placed().rank[0] <= claim(head):
                    return self._bench(victims[len(victims) - taken :])
                trial.leave(victims[index])
                more += 1
            if more and self._cooling(head):
                break
            if more and self._choice.has_room_elsewhere(head):
                continue
            head.claimed = lane.id if more else head.claimed
            trial.enter(head, found, reach, reserved=reserved)
            forecast, taken, claims = trial, taken + more, claims + 1
            self._kept, self._kept_for = trial.promised, claim(head)
        self._bench(victims[len(victims) - taken :])

    def _bench(self, victims: list[Sequence]) -> None:
        self._claimed = victims
        self._benched.update({victim.key: None for victim in reversed(victims)})

    def _oust_for_claims(self) -> None:
        """Once the results of all victims are in. Whoever they make room for comes in with the next step; with this one
        only where nobody else has a slice in it, since no step is empty."""
        if not self._claimed or any(self._lane.busy(victim) for victim in self._claimed):
            return
        alone = not self._grants
        for victim in reversed(self._claimed):
            del self._benched[victim.key]
            self._preempt(victim)
        if alone and not self._benched:
            self._admit()

    def _oust(self, victim: Sequence) -> None:
        if self._lane.busy(victim):
            self._benched[victim.key] = None
        else:
            self._preempt(victim)

    def _serve_running(self) -> None:
        lane, waiting = self._lane, len(self._waiting)
        passed = self._passed if self._some_passed else None
        missing = {
            sequence.key: 0 if passed is not None and passed(sequence) else sequence.missing
            for sequence in lane.running
        }
        self._prompts = [sequence for sequence in lane.running if missing[sequence.key] > 1]
        decodes = sum(1 for count in missing.values() if count == 1)
        spare = self._left - decodes  # at least lane.prefill_minimum, by the number of slots
        held_back = min(lane.prefill_minimum, spare // 2) if waiting and lane.free_slots and not self._closed() else 0
        self._shares.divide(spare)
        spare -= held_back
        cap = self._cap(alone=len(lane.running) == 1 and not waiting)
        victims = [sequence for sequence in lane.running if not sequence.placed().reserved]  # the last goes first
        coming = lane.pool.fenced  # blocks that steps in flight will set free; each is promised once
        for sequence in tuple(lane.running):
            if sequence.placement is None or sequence.key in self._benched:
                continue
            want = missing[sequence.key]
            placement = sequence.placement
            if want == 1 and placement.computed < len(placement.blocks) * lane.spec.block_size:
                self._grants[sequence.key] = _Grant(sequence, 1, 1, [], False)  # what most of them want
                self._left -= 1
                continue
            want = want if want <= 1 else min(want, cap, spare, self._allowance(sequence, want))
            if want == 0:
                continue
            if self._room(sequence) == 0 and self._room(sequence, kept=0):
                continue  # it waits for a better one that comes in now
            while self._room(sequence) == 0 and coming == 0:
                if not victims or victims[-1].placed().rank <= sequence.placed().rank:
                    break
                victim = victims.pop()
                if victim.placement is None or victim.key in self._benched:
                    continue
                if lane.busy(victim):
                    coming += sum(lane.pool.holders(block) == 1 for block in victim.placed().blocks)
                self._oust(victim)
            count = min(want, self._room(sequence))
            if count == 0:
                self._short = True
                coming = max(0, coming - 1)
                continue
            self._grant(sequence, missing[sequence.key], count)
            if missing[sequence.key] > 1:
                spare -= count
                self._shares.spend(sequence, missing[sequence.key], count)

    def _admit(self) -> None:
        """In the policy's order. Where one can't be afforded, smaller ones of no lower protection pass it, a bounded
        number of times in its whole life: then nobody comes in before it."""
        if self._closed():
            return
        lane, most = self._lane, self._config.max_passes
        walk = self._waiting.walk(lambda waiting: len(lane.find(waiting)) * lane.spec.block_size)
        forecast: PoolForecast | None = None
        blocked: list[tuple[Sequence, int]] = []  # with the blocks that they will have
        looked = 0
        while self._left and lane.free_slots and looked < _LOOK_PAST and len(blocked) <= _LOOK_SMALLER:
            sequence = walk.next()
            if sequence is None or self._cooling(sequence):
                break
            if self._passed(sequence) or not fits(sequence, lane.spec):
                looked += 1
                continue
            found = lane.find(sequence)
            first = lane.computing(sequence, len(found))
            if first is not None and not self._passed(first):
                # Its next block is being computed: once is enough. It is looked at again when that one is there, or
                # when who computes it is gone.
                looked += 1
                continue
            forecast = forecast or PoolForecast(lane, self._config)
            size = sum(forecast.demand(sequence))
            if any(
                size >= larger or protection(self._policy, sequence) > protection(self._policy, other)
                for other, larger in blocked
            ):
                looked += 1
                continue
            reserved = self._reserves(sequence)
            start = len(found) * lane.spec.block_size
            missing = sequence.missing - start
            alone = not lane.running and len(self._waiting) == 1
            count = min(missing, self._cap(alone=alone), self._left)
            if sequence.passed < most and not alone:
                count = min(count, self._allowance(sequence, missing))
            if not count or not forecast.affords(sequence, found, start + count, reserved=reserved):
                if sequence.passed >= most:
                    break
                blocked.append((sequence, size))
                continue
            if sequence.claimed != lane.id and self._choice.leaves(sequence):
                looked += 1
                continue
            self._waiting.take(sequence, start)
            lane.place(sequence, protection=protection(self._policy, sequence), reserved=reserved, found=found)
            sequence.admitted = True
            self._admitted.append(Admitted(sequence.key, lane.id, self._now - sequence.queued_at, start))
            self._grant(sequence, sequence.missing, count, admitted=True)
            if missing > 1:
                self._prompts.append(sequence)
                self._shares.spend(sequence, missing, count)
            forecast.entered(sequence)
            self._choice.took(sequence)
            walk.admitted(sequence)
            for other, _ in blocked:
                other.passed += 1
            if any(other.passed >= most for other, _ in blocked):
                break
        if self._policy.batching is not Batching.CONTINUOUS and self._admitted:
            lane.batch = len(lane.running)

    def _reserves(self, sequence: Sequence) -> bool:
        return self._policy.reserves or sequence.preemptions >= self._config.preemption_cap > 0

    def _closed(self) -> bool:
        """Whether nobody at all may come in."""
        if self._choice.closed:
            return True
        if self._policy.batching is not Batching.CONTINUOUS and self._lane.running and not self._admitted:
            return True
        return self._cooling() and not self._policy.preempts

    def _allowance(self, sequence: Sequence, missing: int) -> int:
        allowed = self._shares.allowed(sequence, missing, alone=self._alone())
        return self._left if allowed is None else min(self._left, allowed)

    def _alone(self) -> bool:
        return len(self._lane.running) == 1 and not self._waiting

    def _hand_out_rest(self) -> None:
        """Tokens held back for those that wait, and not used, go to the prompts that run, long ones last. Only a
        throttled class gets no more than its share."""
        cap = self._cap(alone=self._alone())
        for sequence in sorted(
            self._prompts, key=lambda running: running.placement is None or self._shares.is_long(running.missing)
        ):
            if not self._left:
                break
            if sequence.placement is None:
                continue
            grant = self._grants.get(sequence.key)
            missing = self._missing(sequence) if grant is None else grant.missing
            if missing <= 1 or sequence.key in self._benched:
                continue
            wanted = min(missing, cap) - (0 if grant is None else grant.count)
            of_class = self._shares.of_class(sequence, None)
            more = min(wanted if of_class is None else min(wanted, of_class), self._left, self._room(sequence))
            if more > 0:
                self._grant(sequence, missing, more)
                self._shares.spend(sequence, missing, more)

    def _commit(self) -> Plan:
        lane = self._lane
        lane.planned += 1
        slices, rows, ends = [], [], []
        for key, grant in self._grants.items():
            sequence, placement = grant.sequence, grant.sequence.placed()
            start, count = placement.computed, grant.count
            samples = start + count == sequence.known + placement.pending
            slices.append(
                PlannedSlice(key, placement.slot, start, count, tuple(grant.new_blocks), samples, grant.admitted)
            )
            if start < placement.settled:
                sequence.prefill_chunks += 1
            placement.computed += count
            placement.last_step = lane.planned
            row = Row(sequence, placement)
            if samples:
                placement.pending += 1
                rows.append(row)
            ends.append((row, placement.computed))
        tokens = lane.spec.max_batched_tokens - self._padding - self._left
        lane.in_flight.append(InFlight(lane.planned, tuple(rows), tuple(ends), tokens))
        if self._preempted:
            lane.cool_until = lane.planned + 1 + self._config.preemption_cooldown
            lane.cool_rank = self._best_victim
        return Plan(lane.planned, tuple(slices), tuple(self._admitted), tuple(self._preempted), self._padding)

    def _grant(self, sequence: Sequence, missing: int, count: int, *, admitted: bool = False) -> None:
        placement, spec = sequence.placed(), self._lane.spec
        grant = self._grants.get(sequence.key)
        if grant is None:
            found = placement.blocks if admitted else []  # the executor hears of them with the first slice
            grant = self._grants[sequence.key] = _Grant(sequence, missing, 0, list(found), admitted)
        grant.count += count
        self._left -= count
        reach = sequence.bound - 1 if placement.reserved else placement.computed + grant.count
        lacking = spec.blocks_for(reach) - len(placement.blocks)
        if lacking:
            blocks = self._lane.cache.allocate(lacking)
            placement.blocks.extend(blocks)
            grant.new_blocks.extend(blocks)

    def _preempt(self, victim: Sequence) -> None:
        rank = victim.placed().rank[0]
        self._best_victim = min(rank, self._best_victim) if self._preempted else rank
        self._lane.vacate(victim)
        recompute = victim.displace(self._now)
        victim.preemptions += 1
        self._waiting.push(victim)
        self._preempted.append(Preempted(victim.key, recompute))

    def _missing(self, sequence: Sequence) -> int:
        """Nothing is computed for a sequence whose time is over: `expire` ends it."""
        return 0 if self._passed(sequence) else sequence.missing

    def _passed(self, sequence: Sequence) -> bool:
        return self._some_passed and self._deadlines.passed(sequence.key, self._now)

    def _room(self, sequence: Sequence, kept: int | None = None) -> int:
        """Tokens that its own blocks and those it may take still hold."""
        placement = sequence.placed()
        if kept is None:
            kept = self._kept if placement.rank[0] > self._kept_for else 0
        granted = self._grants.get(sequence.key)
        taken = placement.computed + (0 if granted is None else granted.count)
        blocks = len(placement.blocks) + max(0, self._lane.cache.available - kept)
        return blocks * self._lane.spec.block_size - taken

    def _cap(self, *, alone: bool) -> int:
        return self._lane.spec.max_batched_tokens if alone else self._config.prefill_chunk

    def _cooling(self, newcomer: Sequence | None = None) -> bool:
        """After a step that preempted, nobody comes in for a while, lest victims and newcomers take turns. Who is
        strictly above the victims may: they made room for it."""
        lane = self._lane
        if not lane.running or lane.planned + 1 >= lane.cool_until:
            return False
        return newcomer is None or not self._policy.preempts or claim(newcomer) >= lane.cool_rank
