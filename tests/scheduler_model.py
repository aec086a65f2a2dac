"""A model of users and executors that distrusts the scheduler core: every plan and emission is held against it.

It keeps its own books (what each slot holds, which block belongs to whom, what each position of the KV memory stands
for, what each user was given) and derives nothing from the core's state. Tokens are a hash of all that was before them,
and an entry of the memory is that hash up to its own position. So who reads what another wrote, from a cache or by
mistake, reads the right thing or is caught.
"""

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from services.scheduler.core.calls import (
    Admitted,
    CoreConfig,
    Displaced,
    Emission,
    Finished,
    LaneSpec,
    OutOfStep,
    Plan,
    PlannedSlice,
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


def grown(digest: int, token: int) -> int:
    """Of a history and one token more."""
    return (digest * 1_000_003 + token + 7) % ((1 << 61) - 1)


def drawn_from(digest: int) -> int:
    """The token that follows a history: of two, so that answers collide."""
    return (digest >> 7) & 1


def key_of(tenant: str, size: int, ids: Sequence[int]) -> bytes:
    return hashlib.sha1(repr((tenant, size, tuple(ids))).encode()).digest()[:8]


@dataclass(eq=False)
class User:
    """What one submission was promised and given."""

    submission: Submission
    ids: list[int]  # all that are known: prompt, resumed, given
    submitted_at: int = 0
    given: int = 0
    admitted: bool = False  # ever; or its answer had begun elsewhere
    last_token_at: int | None = None
    preempted: int = 0
    keyed: int = 0  # blocks whose keys the core was given
    finished: Finished | None = None

    def deliver(self, token: int, now: int) -> None:
        digest = 0
        for known in self.ids:
            digest = grown(digest, known)
        assert token == drawn_from(digest), "a token that its history does not demand"
        self.ids.append(token)
        self.given += 1
        self.last_token_at = now

    def new_keys(self) -> tuple[bytes, ...]:
        """Of blocks that became full since the last call."""
        size, full = self.submission.key_block_size, self.keyed
        self.keyed = len(self.ids) // size if size else 0
        return tuple(
            key_of(self.submission.tenant, size, self.ids[: (index + 1) * size]) for index in range(full, self.keyed)
        )

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
    digests: list[int] = field(default_factory=list)  # of the history up to each position that was fed

    def feed(self, token: int) -> None:
        self.digests.append(grown(self.digests[-1] if self.digests else 0, token))


@dataclass
class Flight:
    """A step in flight: whose slices they are (a key may be used again meanwhile), and every block they reference."""

    plan: Plan
    owners: list[User]
    tables: list[list[int]]
    drawn: dict[str, int]  # tokens, by key


@dataclass
class Executor:
    """Runs steps when they come, answers them in order. `cells` is the KV memory, tagged with who wrote it."""

    spec: LaneSpec
    slots: dict[int, Slot] = field(default_factory=dict)
    cells: dict[tuple[int, int], int] = field(default_factory=dict)  # (block, offset) -> digest
    in_flight: deque[Flight] = field(default_factory=deque)
    steps: int = 0
    answered: StepOutcome | None = None  # the last one

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
            if piece.admitted:  # before anything of this step is written: what it finds is there already
                self.slots[piece.slot] = self._admit(users[piece.key], piece)
        drawn: dict[str, int] = {}
        for piece in plan.slices:
            assert 0 <= piece.slot < self.spec.max_sequences
            assert piece.count >= 1
            user = users[piece.key]
            assert user.finished is None
            slot = self.slots[piece.slot]
            assert slot.user is user, "a slot was taken over without being replaced"
            assert piece.start == slot.next, "a slice starts elsewhere than the last one ended"
            found = piece.start // self.spec.block_size if piece.admitted else 0
            for block in piece.new_block_ids[found:]:
                self._reassign(block)
            slot.table += piece.new_block_ids[found:]
            self._compute(slot, piece.start, piece.count)
            slot.next = piece.start + piece.count
            self._check_length(user, piece.start, piece.count, samples=piece.samples)
            if piece.samples:
                drawn[piece.key] = drawn_from(slot.digests[-1])
        owners = [users[piece.key] for piece in plan.slices]
        tables = [list(self.slots[piece.slot].table) for piece in plan.slices]
        self.in_flight.append(Flight(plan, owners, tables, drawn))

    def _admit(self, user: User, piece: PlannedSlice) -> Slot:
        size = self.spec.block_size
        assert piece.start % size == 0
        assert piece.start < len(user.ids), "nothing is left to draw from"
        assert not piece.start or user.submission.key_block_size == size, "found, and nothing was looked for"
        slot = Slot(user, piece.start, list(piece.new_block_ids[: piece.start // size]))
        for position, token in enumerate(user.ids[: piece.start]):
            slot.feed(token)
            self._read(slot, position)
        return slot

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
            block = slot.table[position // size]
            for other in self.slots.values():
                assert other is slot or block not in other.table, f"block {block} is written while others read it"
            own = drawn_from(slot.digests[-1]) if slot.digests else 0
            slot.feed(slot.user.ids[position] if position < len(slot.user.ids) else own)
            self.cells[block, position % size] = slot.digests[position]
        for position in range(start + count):
            self._read(slot, position)

    def _read(self, slot: Slot, position: int) -> None:
        block = slot.table[position // self.spec.block_size]
        written = self.cells.get((block, position % self.spec.block_size))
        assert written == slot.digests[position], f"{slot.user} would read something else at position {position}"

    def _check_length(self, user: User, start: int, count: int, *, samples: bool) -> None:
        draws = sum(
            1
            for flight in self.in_flight
            for owner, piece in zip(flight.owners, flight.plan.slices, strict=True)
            if owner is user and piece.samples
        )
        length = len(user.ids) + draws
        assert start + count <= length
        assert samples == (start + count == length), "samples exactly at the last position"
        if start + count > len(user.ids):
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

    def submit(
        self, submission: Submission, cost: CostEstimate | None = None, ids: Sequence[int] | None = None
    ) -> None:
        """ids: of what is known; with them it takes part in the cache of lanes with blocks like the last one's."""
        if ids is None:
            ids = [len(self.users) % 97] * (submission.prompt_len + submission.output_len)
        else:
            size = next(reversed(self.executors.values())).spec.block_size if self.executors else 0
            submission = replace(submission, key_block_size=size)
        user = User(submission, list(ids), self.now)
        user.submission = submission = replace(submission, block_keys=user.new_keys())
        accepted = self.core.submit(submission, self.now, cost)
        if Rung.MAX_TOKENS in accepted.degraded:
            submission = replace(submission, max_tokens=accepted.max_tokens or self.config.ladder.max_tokens)
        if submission.key in self.users:
            self.past.append(self.users[submission.key])
        begun = submission.output_len > 0
        user.submission = submission
        user.admitted, user.last_token_at = begun, self.now if begun else None
        self.users[submission.key] = user

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
        flight = executor.in_flight.popleft()
        plan = flight.plan
        sampled = [piece for piece in plan.slices if piece.samples]
        outcomes = [
            SequenceOutcome(piece.slot, 0 if row == failed else 1, ended=row == ended != failed, failed=row == failed)
            for row, piece in enumerate(sampled)
        ]
        executor.answered = StepOutcome(plan.step_id, tuple(outcomes))
        return self.take(self.core.apply(lane, executor.answered, self.now), flight.drawn)

    def repeat(self, lane: str) -> None:
        """The last results once more, and those of a lane that is gone: nothing happens."""
        executor = self.executors[lane]
        assert executor.answered is not None
        before = self.seen()
        for name in (lane, "gone"):
            assert self.core.apply(name, executor.answered, self.now) == []
        assert before == self.seen()

    def swap(self, lane: str) -> None:
        """The results of the younger of two steps in flight come first: refused, and nothing happens."""
        plan = self.executors[lane].in_flight[-1].plan
        before = self.seen()
        try:
            self.core.apply(lane, answer(plan), self.now)
        except OutOfStep:
            assert before == self.seen()
        else:
            raise AssertionError("results out of order were taken")

    def seen(self) -> object:
        core = self.core
        return core.load(), core.totals(), core.sequences(), core.next_deadline()

    def pin(self, ids: Sequence[int], tenant: str, ttl_ns: int) -> None:
        for size in {executor.spec.block_size: None for executor in self.executors.values()}:
            keys = tuple(key_of(tenant, size, ids[:end]) for end in range(size, len(ids) + 1, size))
            assert self.core.pin(keys, size, tenant, ttl_ns, self.now) <= len(keys)

    def take(self, emissions: list[Emission], drawn: Mapping[str, int] = MappingProxyType({})) -> list[Emission]:
        for emission in emissions:
            user = self.users[emission.key]
            assert user.finished is None, f"{emission} after the end"
            match emission:
                case Tokens():
                    assert emission.count == 1
                    user.deliver(drawn[emission.key], self.now)
                    if keys := user.new_keys():
                        self.core.extend(emission.key, keys)
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
            assert lane.blocks_free + lane.blocks_cached == lane.blocks_total
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
        assert 0 <= usage.cached_tokens <= max(0, submission.prompt_len - (0 if submission.output_len else 1))
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
