"""A model of users and executors that distrusts the scheduler core: every plan and emission is held against it.

It keeps its own books (what each slot holds, which block belongs to whom, what each position of the KV memory stands
for, what each user was given) and derives nothing from the core's state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from executor_model import Executor, User, key_of

from services.scheduler.core.calls import (
    Admitted,
    CoreConfig,
    Displaced,
    Emission,
    Finished,
    LaneSpec,
    OutOfStep,
    Plan,
    Preempted,
    Reason,
    SequenceOutcome,
    Sibling,
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
        self,
        submission: Submission,
        cost: CostEstimate | None = None,
        ids: Sequence[int] | None = None,
        others: Sequence[tuple[str, int]] = (),
    ) -> None:
        """ids: of what is known; with them it takes part in the cache of lanes with blocks like the last one's.
        others: keys of further answers, and how many ids behind the prompt are known of each."""
        if ids is None:
            ids = [len(self.users) % 97] * (submission.prompt_len + submission.output_len)
        else:
            size = next(reversed(self.executors.values())).spec.block_size if self.executors else 0
            submission = replace(submission, key_block_size=size)
        answers = (
            submission,
            *(
                replace(submission, key=key, output_len=count, size_bytes=0, scores_prompt=False)
                for key, count in others
            ),
        )
        users = [User(one, list(ids[: one.prompt_len + one.output_len]), self.now) for one in answers]
        for user in users:
            user.submission = replace(user.submission, block_keys=user.new_keys())
        first, *rest = (user.submission for user in users)
        asked = replace(first, others=tuple(Sibling(one.key, one.output_len, one.block_keys) for one in rest))
        accepted = self.core.submit(asked, self.now, cost)
        assert accepted.answers == (1 if Rung.SINGLE_ANSWER in accepted.degraded else len(users))
        for user in users[: accepted.answers]:
            one = user.submission
            if Rung.MAX_TOKENS in accepted.degraded:
                one = replace(one, max_tokens=accepted.max_tokens or self.config.ladder.max_tokens)
            if one.key in self.users:
                self.past.append(self.users[one.key])
            begun = one.output_len > 0
            user.submission = one
            user.admitted, user.last_token_at = begun, self.now if begun else None
            self.users[one.key] = user

    def cancel(self, key: str) -> list[Emission]:
        return self.take(self.core.cancel(key, self.now))

    def fail(self, key: str) -> list[Emission]:
        return self.take(self.core.fail(key, self.now))

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
