"""Builds one step of one lane.

Knows the lane and the queue, and changes both; nothing of users or totals. One idea: computed chases the length, and a
slice is what is missing, cut by the budget. There is no prefill mode and no decode mode.

Running sequences come first, by rank; each is sure of the token a decode needs, and prompts share the rest. When the
pool is short the sequences of the lowest rank make room: one that a step in flight still references is *benched* (no
slice in this step) and preempted only once its results are in, so no drawn token is ever without an owner, and a
sequence that ends meanwhile is never recomputed. A needy sequence with nobody below it just waits: the best
protected one has nobody above it, fits the pool alone, and so always gets its blocks in the end.
"""

from services.scheduler.core.calls import InvariantError, Plan, Preempted, SequenceKey
from services.scheduler.core.claims import Claims
from services.scheduler.core.joining import Joining
from services.scheduler.core.moment import Moment
from services.scheduler.core.policies.policy import AGING_RUNGS, Batching
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.shares import PromptShares
from services.scheduler.core.sheet import Grant, Sheet


class StepDraft:
    def __init__(self, moment: Moment) -> None:
        lane = moment.lane
        self._moment = moment
        self._lane = lane
        padding = 0
        if moment.policy.batching is Batching.PADDED and lane.running:
            padding = max(0, lane.batch - len(lane.running))
        self._sheet = Sheet(lane, padding)
        self._shares = PromptShares(self._sheet.left, moment.ladder, moment.config)
        self._claims = Claims(moment)
        self._joining = Joining(moment, self._sheet, self._shares)
        self._preempted: list[Preempted] = []
        self._best_victim = 0  # protection; of no meaning before there is one
        self._benched: dict[SequenceKey, None] = {}  # no slice in this step: a victim once its results are in
        self._prompts: list[tuple[Sequence, int]] = []  # of those that run, who misses more than one token
        self._shorter: int | None = None  # tokens that the first in the queue misses: longer prompts give way to it
        self._short = False  # somebody wants a block and waits

    def build(self) -> Plan | None:
        self._moment.waiting.age(self._moment.now)
        self._claims.make()
        self._benched.update({victim.key: None for victim in self._claims.victims})
        self._serve_running()
        self._oust_for_claims()
        if not self._preempted and not self._benched and not self._short:
            self._joining.admit()
        self._hand_out_rest()
        if self._preempted and not self._sheet.grants:
            raise InvariantError(f"lane {self._lane.id}: a step that preempted has no slice")
        return self._commit() if self._sheet.grants else None

    def _oust_for_claims(self) -> None:
        """Once the results of all victims are in. Whoever they make room for comes in with the next step; with this one
        only where nobody else has a slice in it, since no step is empty."""
        victims = self._claims.victims
        if not victims or any(self._lane.busy(victim) for victim in victims):
            return
        alone = not self._sheet.grants
        for victim in victims:
            del self._benched[victim.key]
            self._preempt(victim)
        if alone and not self._benched:
            self._joining.admit()

    def _oust(self, victim: Sequence) -> None:
        if self._lane.busy(victim):
            self._benched[victim.key] = None
        else:
            self._preempt(victim)

    def _serve_running(self) -> None:
        lane, moment, sheet = self._lane, self._moment, self._sheet
        running = tuple(lane.running)
        if moment.some_passed:
            wants = [moment.missing(sequence) for sequence in running]
        else:
            wants = [sequence.missing for sequence in running]
        self._prompts = [(sequence, want) for sequence, want in zip(running, wants, strict=True) if want > 1]
        spare = sheet.left - wants.count(1)  # at least lane.prefill_minimum, by the number of slots
        newcomers = moment.waiting and lane.free_slots and not moment.closed()
        held_back = min(lane.prefill_minimum, spare // 2) if newcomers else 0
        if newcomers and self._prompts and moment.policy.gives_way:
            self._shorter = self._first_misses()
        self._shares.divide(spare)
        spare -= held_back
        coming = lane.pool.fenced  # blocks that steps in flight will set free; each is promised once
        victims: list[Sequence] | None = None  # the last goes first
        block_size, grants, benched, ones = lane.spec.block_size, sheet.grants, self._benched, 0
        for sequence, want in zip(running, wants, strict=True):
            placement = sequence.placement
            if placement is None or (benched and sequence.key in benched):
                continue
            if want == 1 and placement.computed < len(placement.blocks) * block_size:
                grants[sequence.key] = Grant(sequence, 1, 1)  # what most of them want
                ones += 1
                continue
            sheet.left, ones = sheet.left - ones, 0
            count = want if want <= 1 else min(want, self._cap, spare, self._allowance(sequence, want))
            if count == 0:
                continue
            if self._room(sequence) == 0 and self._room(sequence, kept=0):
                continue  # it waits for a better one that comes in now
            if want > 1 and self._gives_way(sequence, want):
                continue  # what newcomers leave is handed out to it at the end of this step
            if victims is None:
                victims = [other for other in lane.running if not other.placed().reserved]
            coming = self._make_room(sequence, victims, coming)
            count = min(count, self._room(sequence))
            if count == 0:
                self._short = True
                coming = max(0, coming - 1)
                continue
            sheet.grant(sequence, want, count)
            if want > 1:
                spare -= count
                self._shares.spend(sequence, want, count)
        sheet.left -= ones

    def _first_misses(self) -> int | None:
        """Tokens that the first of those that wait has to compute here; None where nobody waits."""
        first = self._moment.waiting.walk(lambda _: 0).next()
        return None if first is None else first.missing - len(self._lane.find(first)) * self._lane.spec.block_size

    def _gives_way(self, sequence: Sequence, want: int) -> bool:
        """Whether a running prompt leaves its part of this step to a shorter one. One that needs others' blocks does
        not, since no step is empty; nor one that came so long ago that it would be first if it waited."""
        moment = self._moment
        if self._shorter is None or want <= self._shorter or self._room(sequence) == 0:
            return False
        return moment.now - sequence.submitted_at < AGING_RUNGS * moment.config.aging_ns

    def _make_room(self, sequence: Sequence, victims: list[Sequence], coming: int) -> int:
        """Sequences below it go until there is a block for it, or will be. Returns the blocks that are coming."""
        lane = self._lane
        while self._room(sequence) == 0 and coming == 0:
            if not victims or victims[-1].placed().rank <= sequence.placed().rank:
                break
            victim = victims.pop()
            if victim.placement is None or victim.key in self._benched:
                continue
            if lane.busy(victim):
                coming += sum(lane.pool.holders(block) == 1 for block in victim.placed().blocks)
            self._oust(victim)
        return coming

    @property
    def _cap(self) -> int:
        return self._moment.cap(alone=self._moment.alone())

    def _allowance(self, sequence: Sequence, missing: int) -> int:
        allowed = self._shares.allowed(sequence, missing, alone=self._moment.alone())
        return self._sheet.left if allowed is None else min(self._sheet.left, allowed)

    def _hand_out_rest(self) -> None:
        """Tokens held back for those that wait, and not used, go to the prompts that run, long ones last. Only a
        throttled class gets no more than its share."""
        sheet, moment = self._sheet, self._moment
        prompts = [*(sequence for sequence, _ in self._prompts), *self._joining.prompts]
        if not sheet.left or not prompts:
            return
        cap = self._cap
        for sequence in sorted(
            prompts, key=lambda running: running.placement is None or self._shares.is_long(running.missing)
        ):
            if not sheet.left:
                break
            if sequence.placement is None:
                continue
            grant = sheet.grants.get(sequence.key)
            missing = moment.missing(sequence) if grant is None else grant.missing
            if missing <= 1 or sequence.key in self._benched:
                continue
            wanted = min(missing, cap) - (0 if grant is None else grant.count)
            of_class = self._shares.of_class(sequence, None)
            more = min(wanted if of_class is None else min(wanted, of_class), sheet.left, self._room(sequence))
            if more > 0:
                sheet.grant(sequence, missing, more)
                self._shares.spend(sequence, missing, more)

    def _commit(self) -> Plan:
        plan = self._sheet.commit(self._moment.counters, self._joining.admitted, self._preempted)
        if self._preempted:
            self._lane.cool_until = plan.step_id + 1 + self._moment.config.preemption_cooldown
            self._lane.cool_rank = self._best_victim
        return plan

    def _preempt(self, victim: Sequence) -> None:
        rank = victim.placed().rank[0]
        self._best_victim = min(rank, self._best_victim) if self._preempted else rank
        self._lane.vacate(victim)
        recompute = victim.displace(self._moment.now)
        victim.preemptions += 1
        self._moment.waiting.push(victim)
        self._preempted.append(Preempted(victim.key, recompute))

    def _room(self, sequence: Sequence, kept: int | None = None) -> int:
        if kept is None:
            claims = self._claims
            kept = claims.kept if sequence.placed().rank[0] > claims.kept_for else 0
        return self._sheet.room(sequence, kept)
