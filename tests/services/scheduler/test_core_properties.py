"""Random calls on tiny pools: after every one `check()` holds and the model of users and executors agrees."""

from contextlib import suppress
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_model import World

from services.scheduler.core.calls import CoreConfig, LaneSpec, Limits, Submission, SubmitError
from services.scheduler.core.cost import CostEstimate
from services.scheduler.core.limits import LadderConfig, TenantQuota
from services.scheduler.core.policies.policy import POLICIES

specs = st.builds(
    LaneSpec,
    block_size=st.integers(1, 4),
    total_blocks=st.one_of(st.integers(3, 12), st.integers(13, 64)),
    max_batched_tokens=st.integers(1, 12),
    max_sequences=st.integers(1, 5),
    max_model_len=st.integers(4, 24),
)
tight_specs = st.builds(
    LaneSpec,
    block_size=st.integers(1, 3),
    total_blocks=st.integers(4, 9),
    max_batched_tokens=st.integers(4, 12),
    max_sequences=st.integers(3, 5),
    max_model_len=st.integers(10, 24),
)
policies = st.sampled_from(list(POLICIES))
ladders = st.sampled_from(
    [LadderConfig(), LadderConfig(True, 1, enter_at=0.1, enter_ns=2, leave_at=0.05, leave_ns=3, max_tokens=2)]
)
quotas = st.sampled_from(
    [
        {},
        {},
        {"b": TenantQuota(weight=2.0, concurrency=2)},
        {"a": TenantQuota(requests_per_minute=5), "b": TenantQuota(tokens_per_minute=40)},
    ]
)
tight_configs = st.builds(  # optimistic enough to be preempted often
    CoreConfig,
    policy=policies,
    aging_ns=st.integers(1, 9),
    max_passes=st.sampled_from([0, 1, 3]),
    long_prompt_tokens=st.sampled_from([3, 2048]),
    ladder=ladders,
    prefill_chunk=st.integers(2, 6),
    watermark=st.just(0.0),
    preemption_cap=st.integers(0, 3),
    preemption_cooldown=st.integers(0, 2),
    default_output_estimate=st.just(1),
    session_lease_ns=st.sampled_from([0, 5]),
)
configs = st.builds(
    CoreConfig,
    policy=policies,
    aging_ns=st.integers(1, 30),
    max_passes=st.sampled_from([0, 1, 3]),
    long_prompt_tokens=st.sampled_from([3, 2048]),
    long_prompt_share=st.sampled_from([0.1, 0.5]),
    learn_output=st.booleans(),
    max_queued_bytes=st.sampled_from([40, 1000]),
    quotas=quotas,
    ladder=ladders,
    max_queued_requests=st.sampled_from([3, 1000]),
    max_queued_tokens=st.sampled_from([30, 1000]),
    prefill_chunk=st.integers(1, 6),
    watermark=st.sampled_from([0.0, 0.1, 0.5]),
    preemption_cap=st.integers(0, 2),
    preemption_cooldown=st.integers(0, 2),
    default_output_estimate=st.sampled_from([1, 1, 3, 1024]),
    tenant_cache_share=st.sampled_from([1.0, 0.3]),
    session_lease_ns=st.sampled_from([0, 4, 100]),
    session_lease_full_below=st.sampled_from([0.0, 0.5]),
)
durations = st.one_of(st.none(), st.none(), st.integers(0, 30))
mild_limits = st.sampled_from([Limits(), Limits(between_tokens_ns=6), Limits(first_token_ns=40, total_ns=90)])
limits = st.one_of(mild_limits, st.builds(Limits, durations, durations, durations, durations))


class CoreMachine(RuleBasedStateMachine):
    @initialize(
        made=st.one_of(st.tuples(configs, specs), st.tuples(tight_configs, tight_specs)),
        lanes=st.sampled_from([0, 1, 1, 1, 2, 3]),
        depth=st.integers(0, 2),
    )
    def start(self, made: tuple[CoreConfig, LaneSpec], lanes: int, depth: int) -> None:
        """depth: steps whose results are still to come when the next one is planned; 0: each is answered at once."""
        config, spec = made
        self.depth = depth
        self.world = World(replace(config, steps_in_flight=max(1, depth)))
        self.epochs = 0
        for _ in range(lanes):
            self._attach(spec)

    def _attach(self, spec: LaneSpec) -> None:
        self.epochs += 1
        self.world.attach(f"lane-{self.epochs}", spec)

    def _lane(self, pick: int) -> str:
        lanes = list(self.world.executors)
        return lanes[pick % len(lanes)]

    def _key(self, pick: int) -> str:
        keys = list(self.world.users)
        return keys[pick % len(keys)]

    @rule(
        number=st.integers(0, 9),
        prompt_len=st.integers(1, 14),
        max_tokens=st.one_of(st.none(), st.integers(1, 9)),
        limits=limits,
        priority=st.sampled_from([0, 0, 0, 1, -1, 100]),
        output_len=st.sampled_from([0, 0, 0, 1, 3]),
        tenant=st.sampled_from(["a", "b", "c"]),
        bits=st.one_of(st.none(), st.integers(0, 1 << 17), st.just(0)),
        cost=st.sampled_from([None, None, CostEstimate(1, 1, 2)]),
        siblings=st.sampled_from([(), (), (0,), (0, 0), (0, 1, 2)]),
        scores=st.sampled_from([False, False, True]),
    )
    def submit(
        self,
        number: int,
        prompt_len: int,
        max_tokens: int | None,
        limits: Limits,
        priority: int,
        output_len: int,
        tenant: str = "a",
        bits: int | None = None,
        cost: CostEstimate | None = None,
        siblings: tuple[int, ...] = (),
        scores: bool = False,
    ) -> None:
        """bits: ids of its prompt, one bit each, so that many begin alike; None: it takes no part in the cache.
        siblings: further answers, of which so many tokens are known less than of the first."""
        ids = None if bits is None else [bits >> index & 1 for index in range(prompt_len + output_len)]
        submission = Submission(
            *(f"s{number}", tenant, prompt_len, max_tokens, limits, priority, output_len, prompt_len),
            scores_prompt=scores,
        )
        others = [(f"s{number}.{place}", max(0, output_len - less)) for place, less in enumerate(siblings)]
        before = (self.world.core.load(), self.world.core.totals(), self.world.core.sequences())
        try:
            self.world.submit(submission, cost, ids, others)
        except SubmitError:  # then nothing is kept
            assert before == (self.world.core.load(), self.world.core.totals(), self.world.core.sequences())

    @rule(
        count=st.integers(2, 4),
        prompt_len=st.integers(1, 5),
        priorities=st.sampled_from([(0,), (0, 1), (1, 0)]),
        limits=mild_limits,
    )
    def crowd(self, count: int, prompt_len: int, priorities: tuple[int, ...], limits: Limits) -> None:
        """Several at once without max_tokens: what admission can only guess at."""
        for index in range(count):
            priority = priorities[index % len(priorities)]
            self.submit(10 + len(self.world.users) + index, prompt_len, None, limits, priority, 0, "abc"[index % 3], 0)

    @precondition(lambda self: self.world.users)
    @rule(pick=st.integers(0, 99), more=st.integers(0, 7), count=st.integers(0, 3))
    def next_turn(self, pick: int, more: int, count: int) -> None:
        """A chat goes on: all that was said, and something new."""
        user = self.world.users[self._key(pick)]
        ids = [*user.ids, *(more >> index & 1 for index in range(count))][:20]
        number = 10 + len(self.world.users)
        asked = Submission(f"s{number}", user.submission.tenant, len(ids), 3, size_bytes=1)
        with suppress(SubmitError):
            self.world.submit(asked, None, ids)

    @precondition(lambda self: self.world.users)
    @rule(pick=st.integers(0, 99), ttl_ns=st.sampled_from([0, 1, 5, 100]))
    def pin(self, pick: int, ttl_ns: int) -> None:
        user = self.world.users[self._key(pick)]
        self.world.pin(user.ids, user.submission.tenant, ttl_ns)

    @rule()
    def flush(self) -> None:
        self.world.core.flush()
        assert all(not lane.blocks_cached for lane in self.world.core.load().lanes.values())

    @precondition(lambda self: self.world.users)
    @rule(pick=st.integers(0, 99))
    def cancel(self, pick: int) -> None:
        self.world.cancel(self._key(pick))
        assert self.world.cancel(self._key(pick)) == []

    @precondition(lambda self: self.world.users)
    @rule(pick=st.integers(0, 99))
    def fail(self, pick: int) -> None:
        self.world.fail(self._key(pick))
        assert self.world.fail(self._key(pick)) == []

    @precondition(lambda self: self.world.live())
    @rule(pick=st.integers(0, 99), back=st.integers(0, 3))
    def stop(self, pick: int, back: int) -> None:
        live = self.world.live()
        user = live[pick % len(live)]
        self.world.stop(user.submission.key, max(0, user.given - back))

    @precondition(lambda self: self.world.executors)
    @rule(pick=st.integers(0, 2))
    def plan(self, pick: int) -> None:
        lane = self._lane(pick)
        if self.world.plan(lane) is not None and not self.depth:
            self.world.apply(lane)

    @precondition(lambda self: any(executor.answered for executor in self.world.executors.values()))
    @rule(pick=st.integers(0, 2))
    def repeat(self, pick: int) -> None:
        """Results come twice."""
        lanes = [lane for lane, executor in self.world.executors.items() if executor.answered]
        self.world.repeat(lanes[pick % len(lanes)])

    @precondition(lambda self: self.world.executors and self.depth == 2)
    @rule(pick=st.integers(0, 2), lost=st.booleans())
    def swap(self, pick: int, lost: bool) -> None:
        """Results come out of order: then the lane is lost, or they come in order after all."""
        lane = self._lane(pick)
        while self.world.plan(lane) is not None:
            pass
        if len(self.world.executors[lane].in_flight) == 2:
            self.world.swap(lane)
            if lost:
                self.world.lose(lane)

    @precondition(lambda self: any(executor.in_flight for executor in self.world.executors.values()))
    @rule(pick=st.integers(0, 2), verdict=st.integers(0, 11), row=st.integers(0, 2))
    def apply(self, pick: int, verdict: int, row: int) -> None:
        busy = [lane for lane, executor in self.world.executors.items() if executor.in_flight]
        self.world.apply(
            busy[pick % len(busy)], ended=row if verdict == 1 else None, failed=row if verdict == 2 else None
        )

    @precondition(lambda self: self.world.executors)
    @rule(rounds=st.integers(1, 12), ns=st.integers(0, 2))
    def run(self, rounds: int, ns: int) -> None:
        """A stretch of ordinary service, so that histories get long enough for preemption."""
        for _ in range(rounds):
            self.world.now += ns
            for lane, executor in self.world.executors.items():
                while self.world.plan(lane) is not None:
                    self.world.core.check()
                if executor.in_flight:
                    self.world.apply(lane)

    @precondition(lambda self: self.world.executors)
    @rule(pick=st.integers(0, 2))
    def lose(self, pick: int) -> None:
        self.world.lose(self._lane(pick))

    @precondition(lambda self: self.world.executors)
    @rule(pick=st.integers(0, 2))
    def close(self, pick: int) -> None:
        """Its executor drains."""
        self.world.close(self._lane(pick))

    @precondition(lambda self: len(self.world.executors) < 3)
    @rule(spec=specs)
    def attach(self, spec: LaneSpec) -> None:
        self._attach(spec)

    @rule(policy=policies)
    def follow(self, policy: str) -> None:
        before = self.world.core.load().policy
        assert self.world.core.set_policy(policy, self.world.now) == before

    @rule(ns=st.integers(0, 9))
    def wait(self, ns: int) -> None:
        self.world.now += ns
        self.world.expire()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.core.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            if not self.world.executors:
                self._attach(LaneSpec(4, 12, 8, 4, 24))
            self.world.drain()


CoreMachine.TestCase.settings = settings(
    max_examples=250,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCore = CoreMachine.TestCase
