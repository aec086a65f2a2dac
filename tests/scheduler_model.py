"""A model of users and executors that distrusts the scheduler core: every plan and emission is held against it.

It keeps its own books (what each slot holds, which block belongs to whom, which positions are written, what each user
was given) and derives nothing from the core's state.
"""

from collections import deque
from dataclasses import dataclass, field, replace

from services.scheduler.core.calls import (
    Admitted,
    CoreConfig,
    Displaced,
    Emission,
    Finished,
    LaneSpec,
    Plan,
    Preempted,
    Reason,
    SequenceOutcome,
    StepOutcome,
    Submission,
    Tokens,
)
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.cost import CostEstimate
from services.scheduler.core.limits import Rung

SPEC = LaneSpec(block_size=4, total_blocks=16, max_batched_tokens=32, max_sequences=4, max_model_len=64)


def ask(key: str, prompt_len: int, max_tokens: int | None = 8, **rest: object) -> Submission:
    return Submission(key, "tenant", prompt_len, max_tokens, **rest)  # type: ignore[arg-type]


def answer(plan: Plan | None, *, ended: str = "", failed: str = "") -> StepOutcome:
    assert plan is not None
    return StepOutcome(
        plan.step_id,
        tuple(
            SequenceOutcome(piece.slot, int(piece.key != failed), ended=piece.key == ended, failed=piece.key == failed)
            for piece in plan.slices
            if piece.samples
        ),
    )


@dataclass(eq=False)
class User:
    """What one submission was promised and given."""

    submission: Submission
    submitted_at: int = 0
    given: int = 0
    admitted: bool = False  # ever; or its answer had begun elsewhere
    last_token_at: int | None = None
    preempted: int = 0
    finished: Finished | None = None

    @property
    def ids(self) -> int:
        return self.submission.prompt_len + self.submission.output_len + self.given

    def out_of_time(self, now: int) -> bool:
        limits, begun = self.submission.limits, self.last_token_at is not None
        return any(
            limit is not None and counts and since + limit <= now
            for limit, counts, since in (
                (limits.queue_ns, not self.admitted, self.submitted_at),
                (limits.first_token_ns, not begun, self.submitted_at),
                (limits.between_tokens_ns, begun, self.last_token_at or 0),
                (limits.total_ns, True, self.submitted_at),
            )
        )


@dataclass
class Slot:
    user: User
    next: int = 0  # position of the next slice
    table: list[int] = field(default_factory=list)


@dataclass
class Flight:
    """A step in flight: whose slices they are (a key may be used again meanwhile), and every block they reference."""

    plan: Plan
    owners: list[User]
    tables: list[list[int]]


@dataclass
class Executor:
    """Runs steps when they come, answers them in order. `cells` is the KV memory, tagged with who wrote it."""

    spec: LaneSpec
    slots: dict[int, Slot] = field(default_factory=dict)
    cells: dict[tuple[int, int], tuple[User, int]] = field(default_factory=dict)  # (block, offset) -> (who, position)
    in_flight: deque[Flight] = field(default_factory=deque)
    steps: int = 0

    def run(self, plan: Plan, users: dict[str, User]) -> None:
        assert plan.slices
        assert plan.step_id == self.steps + 1
        self.steps = plan.step_id
        assert sum(piece.count for piece in plan.slices) + plan.padding <= self.spec.max_batched_tokens
        assert len({piece.slot for piece in plan.slices}) == len(plan.slices)
        assert len({piece.key for piece in plan.slices}) == len(plan.slices)
        if plan.preempted:
            assert all(piece.admitted for piece in plan.slices) or not plan.admitted, "preempted for an admission"
        assert [one.key for one in plan.admitted] == [piece.key for piece in plan.slices if piece.admitted]
        for preempted in plan.preempted:
            victim = users[preempted.key]
            assert all(victim not in flight.owners for flight in self.in_flight), "preempted while in flight"
            self.forget(victim)
        for piece in plan.slices:
            assert 0 <= piece.slot < self.spec.max_sequences
            assert piece.count >= 1
            user = users[piece.key]
            assert user.finished is None
            if piece.admitted:
                self.slots[piece.slot] = Slot(user)
            slot = self.slots[piece.slot]
            assert slot.user is user, "a slot was taken over without being replaced"
            assert piece.start == slot.next, "a slice starts elsewhere than the last one ended"
            for block in piece.new_block_ids:
                self._reassign(block)
            slot.table += piece.new_block_ids
            self._compute(slot, piece.start, piece.count)
            slot.next = piece.start + piece.count
            self._check_length(user, piece.start, piece.count, samples=piece.samples)
        owners = [users[piece.key] for piece in plan.slices]
        tables = [list(self.slots[piece.slot].table) for piece in plan.slices]
        self.in_flight.append(Flight(plan, owners, tables))

    def forget(self, user: User) -> None:
        for number in [number for number, slot in self.slots.items() if slot.user is user]:
            del self.slots[number]

    def _reassign(self, block: int) -> None:
        assert 0 <= block < self.spec.total_blocks
        for slot in self.slots.values():
            assert block not in slot.table, f"block {block} has a living owner"
        for flight in self.in_flight:
            for table in flight.tables:
                assert block not in table, f"block {block} is given away while step {flight.plan.step_id} uses it"

    def _compute(self, slot: Slot, start: int, count: int) -> None:
        size = self.spec.block_size
        assert start + count <= len(slot.table) * size, "positions without a block"
        for position in range(start, start + count):
            self.cells[slot.table[position // size], position % size] = (slot.user, position)
        for position in range(start + count):
            written = self.cells[slot.table[position // size], position % size]
            assert written == (slot.user, position), f"{slot.user} would read {written} at position {position}"

    def _check_length(self, user: User, start: int, count: int, *, samples: bool) -> None:
        draws = sum(
            1
            for flight in self.in_flight
            for owner, piece in zip(flight.owners, flight.plan.slices, strict=True)
            if owner is user and piece.samples
        )
        length = user.ids + draws
        assert start + count <= length
        assert samples == (start + count == length), "samples exactly at the last position"
        if start + count > user.ids:
            assert count == 1, "more than one id is not known to the shell"
        most = self.spec.max_model_len
        if user.submission.max_tokens is not None:
            most = min(most, user.submission.prompt_len + user.submission.max_tokens)
        assert length + int(samples) <= most, "a draw beyond max_tokens or the context"


class World:
    """Users and executors around one core. Each verb goes to the core and its answer through the books."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.core = SchedulerCore(config)
        self.users: dict[str, User] = {}  # everyone ever, by the key of the last submission with it
        self.past: list[User] = []  # whose key was used again
        self.executors: dict[str, Executor] = {}
        self.closed: list[str] = []  # lanes that get nothing new
        self.now = 0

    def live(self) -> list[User]:
        return [user for user in self.users.values() if user.finished is None]

    def attach(self, lane: str, spec: LaneSpec) -> None:
        self.executors[lane] = Executor(spec)
        self.take(self.core.attach(lane, spec, self.now))

    def close(self, lane: str) -> None:
        self.closed.append(lane)
        self.core.close(lane, self.now)

    def lose(self, lane: str) -> None:
        del self.executors[lane]
        self.take(self.core.lose(lane, self.now))

    def submit(self, submission: Submission, cost: CostEstimate | None = None) -> None:
        accepted = self.core.submit(submission, self.now, cost)
        if Rung.MAX_TOKENS in accepted.degraded:
            submission = replace(submission, max_tokens=accepted.max_tokens or self.config.ladder.max_tokens)
        if submission.key in self.users:
            self.past.append(self.users[submission.key])
        begun = submission.output_len > 0
        self.users[submission.key] = User(
            submission, self.now, admitted=begun, last_token_at=self.now if begun else None
        )

    def cancel(self, key: str) -> list[Emission]:
        return self.take(self.core.cancel(key, self.now))

    def stop(self, key: str, kept: int) -> list[Emission]:
        return self.take(self.core.stop(key, kept, self.now))

    def expire(self) -> list[Emission]:
        late = [user.submission.key for user in self.live() if user.out_of_time(self.now)]
        deadline = self.core.next_deadline()
        assert not late or (deadline is not None and deadline <= self.now), "nobody would have called in time"
        ended = self.take(self.core.expire(self.now))
        assert sorted(one.key for one in ended) == sorted(late)
        assert not (after := self.core.next_deadline()) or after > self.now
        return ended

    def plan(self, lane: str) -> Plan | None:
        self.expire()
        plan = self.core.plan(lane, self.now)
        executor = self.executors[lane]
        if plan is None:
            if not executor.in_flight:
                self._check_nothing_runnable(lane, executor)
            return None
        for preempted in plan.preempted:
            self.users[preempted.key].preempted += 1
        assert all(isinstance(one, Admitted) and one.lane == lane for one in plan.admitted)
        for admitted in plan.admitted:
            self.users[admitted.key].admitted = True
        assert not (plan.admitted and lane in self.closed), f"{lane} is closed and admits"
        assert all(isinstance(one, Preempted) for one in plan.preempted)
        executor.run(plan, self.users)
        return plan

    def apply(self, lane: str, *, ended: int | None = None, failed: int | None = None) -> list[Emission]:
        """Answers the oldest step; sampling row `ended` draws a stop id, row `failed` fails."""
        executor = self.executors[lane]
        plan = executor.in_flight.popleft().plan
        sampled = [piece for piece in plan.slices if piece.samples]
        outcomes = [
            SequenceOutcome(piece.slot, 0 if row == failed else 1, ended=row == ended != failed, failed=row == failed)
            for row, piece in enumerate(sampled)
        ]
        emissions = self.core.apply(lane, StepOutcome(plan.step_id, tuple(outcomes)), self.now)
        return self.take(emissions)

    def take(self, emissions: list[Emission]) -> list[Emission]:
        for emission in emissions:
            user = self.users[emission.key]
            assert user.finished is None, f"{emission} after the end"
            match emission:
                case Tokens():
                    user.given += emission.count
                    user.last_token_at = self.now
                case Finished():
                    user.finished = emission
                    self._check_finished(user, emission)
                case Displaced():
                    pass
                case _:
                    raise AssertionError(f"{emission} outside a plan")
        return emissions

    def drain(self, *, steps: int = 4000) -> None:
        """Runs every lane until nothing is left; then nothing may be left anywhere. What waits for a closed lane, the
        only one that could hold it, runs on a new one like it."""
        for lane in dict.fromkeys(self.closed):
            if lane in self.executors:
                self.attach(f"after {lane}", self.executors[lane].spec)
        for _ in range(steps):
            if not self.live():
                break
            for lane in self.executors:
                while self.plan(lane) is not None:
                    self.core.check()
            for lane, executor in self.executors.items():
                if executor.in_flight:
                    self.apply(lane)
                    self.core.check()
        assert not self.live(), f"{[user.submission.key for user in self.live()]} never end"
        for lane, executor in self.executors.items():
            while executor.in_flight:
                assert self.apply(lane) == []
        self.assert_drained()

    def assert_drained(self) -> None:
        core = self.core
        core.check()
        assert core.sequences() == ()
        assert core.next_deadline() is None
        load = core.load()
        assert (load.waiting, load.waiting_tokens) == (0, 0)
        for lane in load.lanes.values():
            assert (lane.running, lane.blocks_live, lane.blocks_fenced) == (0, 0, 0)
            assert lane.blocks_free == lane.blocks_total
        ends = [user.finished for user in (*self.users.values(), *self.past)]
        totals = core.totals()
        assert totals.submitted == len(ends)
        assert totals.finished == {reason: sum(1 for end in ends if end and end.reason is reason) for reason in Reason}
        assert totals.delivered == sum(end.usage.delivered for end in ends if end)
        assert totals.discarded == sum(end.usage.discarded for end in ends if end)
        assert totals.sampled == totals.delivered + totals.discarded
        assert totals.preemptions == sum(end.usage.preemptions for end in ends if end)

    def _check_finished(self, user: User, finished: Finished) -> None:
        usage, submission = finished.usage, user.submission
        assert usage.prompt_tokens == submission.prompt_len
        assert usage.preemptions == user.preempted
        assert user.preempted <= self.config.preemption_cap or not self.config.preemption_cap
        if finished.reason is Reason.STOP:
            assert usage.delivered <= user.given
        else:
            assert usage.delivered == user.given
        assert usage.discarded >= user.given - usage.delivered
        if finished.reason is Reason.LENGTH and submission.max_tokens is not None and finished.usage.delivered:
            assert submission.output_len + user.given <= submission.max_tokens
        assert (finished.limit is not None) == (finished.reason in (Reason.DEADLINE, Reason.TIME_LIMIT))
        if finished.reason is Reason.DEADLINE:
            assert user.given == submission.output_len == 0
        if finished.reason is Reason.TIME_LIMIT:
            assert user.given or submission.output_len
        for executor in self.executors.values():
            executor.forget(user)

    def _check_nothing_runnable(self, lane: str, executor: Executor) -> None:
        views = self.core.sequences()
        assert not [view for view in views if view.lane == lane], f"{lane} rests with sequences on it"
        if len(self.executors) > 1 or lane in self.closed:
            return  # it may be left to a better lane; that nobody is left for ever, `drain` shows
        for view in views:
            if view.lane is None:
                assert not self._fits(view.key, executor.spec), f"{lane} rests while {view.key} waits"

    def _fits(self, key: str, spec: LaneSpec) -> bool:
        """Sure to fit: what can be served only by a roomier lane of several is not counted."""
        submission = self.users[key].submission
        most = max(other.spec.max_model_len for other in self.executors.values())
        room = max(other.spec.total_blocks * other.spec.block_size + 1 for other in self.executors.values())
        reach = min(most, room)
        if submission.max_tokens is not None:
            reach = min(most, submission.prompt_len + submission.max_tokens)
        return reach <= spec.max_model_len and reach - 1 <= spec.total_blocks * spec.block_size
