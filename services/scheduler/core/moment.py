"""What one step of one lane is decided on: the lane, the queue, the time, the settings. Decides nothing by itself."""

from dataclasses import dataclass, field

from services.scheduler.core.binding import Choice
from services.scheduler.core.calls import CoreConfig
from services.scheduler.core.deadlines import Deadlines
from services.scheduler.core.degrade import Ladder
from services.scheduler.core.lane import Lane
from services.scheduler.core.policies.fair import TokenCounters
from services.scheduler.core.policies.policy import Batching, Policy, claim
from services.scheduler.core.policies.queue import WaitingQueue
from services.scheduler.core.sequence import Sequence

LOOK_PAST = 64  # sequences at the head of the queue that a lane can't take before it stops looking


@dataclass(slots=True, eq=False)
class Moment:
    lane: Lane
    waiting: WaitingQueue
    counters: TokenCounters
    deadlines: Deadlines
    ladder: Ladder
    choice: Choice
    config: CoreConfig
    now: int
    soon: int  # tokens that a sequence draws here in the next moments: Binding.soon
    some_passed: bool = field(init=False)  # whether any deadline may have passed

    def __post_init__(self) -> None:
        first = self.deadlines.next()
        self.some_passed = first is not None and first <= self.now

    @property
    def policy(self) -> Policy:
        return self.waiting.policy

    def passed(self, sequence: Sequence) -> bool:
        """Nothing is computed for a sequence whose time is over: `expire` ends it."""
        return self.some_passed and self.deadlines.passed(sequence.key, self.now)

    def missing(self, sequence: Sequence) -> int:
        return 0 if self.passed(sequence) else sequence.missing

    def cap(self, *, alone: bool) -> int:
        """Tokens of one sequence in one step."""
        return self.lane.spec.max_batched_tokens if alone else self.config.prefill_chunk

    def alone(self) -> bool:
        return len(self.lane.running) == 1 and not self.waiting

    def reserves(self, sequence: Sequence) -> bool:
        """Whether it comes in with blocks for its whole need, or not at all."""
        return self.policy.reserves or sequence.preemptions >= self.config.preemption_cap > 0

    def cooling(self, newcomer: Sequence | None = None) -> bool:
        """After a step that preempted, nobody comes in for a while, lest victims and newcomers take turns. Who is
        strictly above the victims may, and whoever they made room for."""
        lane = self.lane
        if not lane.running or lane.planned + 1 >= lane.cool_until:
            return False
        if newcomer is None or not self.policy.preempts:
            return True
        return claim(newcomer) >= lane.cool_rank and newcomer.claimed != lane.id

    def closed(self) -> bool:
        """Whether nobody at all may come in, whoever it is."""
        if self.choice.closed:
            return True
        if self.policy.batching is not Batching.CONTINUOUS and self.lane.running:
            return True
        return self.cooling() and not self.policy.preempts
