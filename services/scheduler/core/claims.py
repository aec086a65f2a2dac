"""For whom running work makes room: who waits may claim slots and blocks from sequences that run.

Two titles to a claim, both of policies that preempt. *Priority*: from whatever is strictly below it. *Share*: in its
own priority, from a tenant that was served more than its own: by so much that the two, having changed places, would
still be in that order once the newcomer's prompt is computed; by what of the victim is to be computed again, which is
lost to both; and by LAG at least. Smaller differences are made up for as sequences end, for nothing. So no two can take
turns, whatever the title. A claim takes as few victims as will do, the youngest first, and none where all together
would not do.

Changes nothing of the lane or the queue but who claimed which lane; the victims are the caller's to preempt.
"""

from typing import Final

from services.scheduler.core.admission import fits
from services.scheduler.core.calls import LaneId
from services.scheduler.core.forecast import PoolForecast
from services.scheduler.core.moment import LOOK_PAST, Moment
from services.scheduler.core.policies.policy import claim
from services.scheduler.core.sequence import Sequence

CLAIMS: Final = 8  # waiting sequences that room is made for in one step
LAG: Final = 6  # a tenant is behind by what the lane's sequences draw in a 6th of Binding.SOON_NS, all together


class Claims:
    def __init__(self, moment: Moment) -> None:
        self.victims: list[Sequence] = []
        self.kept, self.kept_for = 0, 0  # blocks that no sequence takes whose protection is not as good as that
        self._moment = moment
        self._title = _Title(moment)

    def make(self) -> None:
        moment = self._moment
        lane = moment.lane
        if not moment.policy.preempts or not lane.running or not moment.waiting or moment.choice.closed:
            return
        if not moment.policy.by_tenant and moment.waiting.best_priority <= -lane.running[-1].placed().rank[0]:
            return
        walk, forecast = moment.waiting.walk(lambda _: 0), None
        claims = 0
        for _ in range(LOOK_PAST):
            head = walk.next()
            if head is None or claims == CLAIMS:
                return
            if not self._title.any(head):
                walk.leave_group()  # nobody in it has more of a title than its first
                continue
            if moment.passed(head) or not fits(head, lane.spec) or not _free_to_claim(head, lane.id):
                continue
            found = lane.find(head)
            if lane.computing(head, len(found)) is not None:
                continue
            forecast = forecast or PoolForecast(lane, moment.config)
            trial = forecast.copy()
            reach = len(found) * lane.spec.block_size
            reach += min(head.missing - reach, moment.cap(alone=False))
            reserved = moment.reserves(head)
            more: list[Sequence] = []
            while len(lane.free_slots) + len(self.victims) + len(more) <= claims or not trial.affords(
                head, found, reach, reserved=reserved
            ):
                victim = self._title.victim(head, len(found) * lane.spec.block_size, more)
                if victim is None:
                    return
                trial.leave(victim)
                more.append(victim)
            if more and moment.cooling(head):
                return
            if more and moment.choice.has_room_elsewhere(head):
                continue
            head.claimed = lane.id if more else head.claimed
            trial.enter(head, found, reach, reserved=reserved)
            self._title.take(head, len(found) * lane.spec.block_size, more)
            self.victims += more
            forecast, claims = trial, claims + 1
            self.kept, self.kept_for = trial.promised, claim(head)


class _Title:
    """Who may take from whom, with what was claimed in this step already."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        self._fair = moment.policy.by_tenant
        self._taken: dict[int, None] = {}  # ids of victims
        self._moved: dict[str, int] = {}  # what tenants' counters change by
        self._most: int | None = None  # counter of the tenant served most, of those that run here

    def any(self, head: Sequence) -> bool:
        """Whether there can be a victim for it, or for somebody behind it in its line."""
        lane = self._moment.lane
        if lane.running[-1].placed().rank[0] > claim(head):
            return True
        if not self._fair or (len(lane.tenants) < 2 and head.submission.tenant in lane.tenants):
            return False
        if self._most is None:
            self._most = max(map(self._moment.counters.counter, lane.tenants))
        return self._counter(head) + self._lag(head) < self._most

    def victim(self, head: Sequence, cached: int, more: list[Sequence]) -> Sequence | None:
        """The next of those that it may take from, besides `more`."""
        best: Sequence | None = None
        most = self._counter(head) + self._prompt(head, cached) + self._lag(head)
        for sequence in reversed(self._moment.lane.running):
            placement = sequence.placed()
            if placement.reserved or id(sequence) in self._taken or sequence in more:
                continue
            if placement.rank[0] > claim(head):
                return sequence
            if not self._fair:
                return None  # ranks ascend: nobody further up is below it
            tenant = sequence.submission.tenant
            if tenant == head.submission.tenant or sequence.submission.priority != head.submission.priority:
                continue
            counter = self._counter(sequence) - sequence.deposit
            counter -= sum(other.deposit for other in more if other.submission.tenant == tenant)
            counter -= self._lost(sequence)
            if counter > most:
                best, most = sequence, counter
        return best

    def take(self, head: Sequence, cached: int, victims: list[Sequence]) -> None:
        self._move(head, self._price(head) + self._prompt(head, cached))
        for victim in victims:
            self._taken[id(victim)] = None
            self._move(victim, -victim.deposit)

    def _counter(self, sequence: Sequence) -> int:
        tenant = sequence.submission.tenant
        return self._moment.counters.counter(tenant) + self._moved.get(tenant, 0)

    def _price(self, head: Sequence) -> int:
        return self._moment.waiting.price(head, 0, self._moment.soon)

    def _prompt(self, head: Sequence, cached: int) -> int:
        """What its tenant will have paid soon after it came in: without it, each of two tenants with long prompts would
        be ahead as soon as one of its own is computed, and they would take turns."""
        prompt, _ = head.ahead(cached)
        return self._moment.counters.of_prompt(head.submission.tenant, prompt)

    def _lost(self, victim: Sequence) -> int:
        """What is to be computed again. Nobody pays for it; as much service is not given meanwhile."""
        return self._moment.counters.of_prompt(victim.submission.tenant, victim.placed().computed)

    def _lag(self, head: Sequence) -> int:
        return self._price(head) * max(1, self._moment.lane.slots // LAG)

    def _move(self, sequence: Sequence, by: int) -> None:
        tenant = sequence.submission.tenant
        self._moved[tenant] = self._moved.get(tenant, 0) + by


def _free_to_claim(sequence: Sequence, lane: LaneId) -> bool:
    return sequence.claimed in (None, lane)
