"""Random work in a universe so small that prefixes collide all the time: two ids, blocks of one or two.

The real engine and core drive the fake executor, which notices every entry that is read and is not what the history
says. After every rule the core's own check holds, and each published key is held against what the pages really hold.
"""

from contextlib import suppress

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prefix_driver import Driver, output_of

from executor.step import Capacity
from services.errors import Cancelled, InvalidArgument
from services.executor.fake import FakeRunner, Faults
from services.executor.fake_tokens import expected_hash_tokens
from services.scheduler.core.calls import CoreConfig
from services.scheduler.core.policies.policy import POLICIES
from services.scheduler.intake import CacheUse
from services.scheduler.live import LiveRequest
from services.scheduler.outbox import Drawn, Ended
from services.scheduler.prefix_keys import KeyChain, NameSpace

IDS = 2
capacities = st.builds(
    Capacity,
    block_size=st.integers(1, 2),
    total_blocks=st.integers(5, 14),
    max_batched_tokens=st.integers(2, 12),
    max_sequences=st.integers(1, 4),
    max_model_len=st.just(12),
    vocab_size=st.just(IDS),
)
configs = st.builds(
    CoreConfig,
    policy=st.sampled_from(["fcfs", "cache", *POLICIES]),
    steps_in_flight=st.integers(1, 2),
    prefill_chunk=st.integers(1, 6),
    watermark=st.just(0.0),
    preemption_cap=st.integers(0, 3),
    preemption_cooldown=st.integers(0, 1),
    default_output_estimate=st.just(1),
    tenant_cache_share=st.sampled_from([1.0, 1.0, 0.3, 0.0]),
    kv_events=st.booleans(),
)
prompts = st.lists(st.integers(0, IDS - 1), min_size=1, max_size=7)
tenants = st.sampled_from(["a", "a", "a", "b"])
uses = st.sampled_from([CacheUse()] * 5 + [CacheUse("salt"), CacheUse(bypass=True)])


class PrefixMachine(RuleBasedStateMachine):
    @initialize(config=configs, capacity=capacities)
    def start(self, config: CoreConfig, capacity: Capacity) -> None:
        self.driver = Driver(config)
        self.capacity = capacity
        self.epochs = 0
        self.meanings: dict[bytes, list[int]] = {}  # key -> all ids up to its block's end
        self._attach()

    def _attach(self) -> None:
        self.epochs += 1
        self.runner = FakeRunner("hash", self.capacity)
        self.lane = f"lane-{self.epochs}"
        self.driver.attach(self.lane, self.runner)

    @rule(
        prompt=prompts,
        max_tokens=st.one_of(st.none(), st.integers(1, 5)),
        tenant=tenants,
        use=uses,
        priority=st.sampled_from([0, 0, 1]),
    )
    def submit(self, prompt: list[int], max_tokens: int | None, tenant: str, use: CacheUse, priority: int) -> None:
        self._try_submit(prompt, max_tokens, tenant, use, priority)

    def _try_submit(
        self, prompt: list[int], max_tokens: int | None, tenant: str, use: CacheUse, priority: int = 0
    ) -> None:
        with suppress(InvalidArgument):  # it can never fit the pool
            self.driver.submit(prompt, max_tokens, tenant=tenant, cache=use, priority=priority)

    @rule(prompt=prompts, count=st.integers(2, 4))
    def crowd(self, prompt: list[int], count: int) -> None:
        """The same prompt several times at once."""
        for _ in range(count):
            self._try_submit(prompt, None, "a", CacheUse())

    @precondition(lambda self: self.driver.engine.live_requests())
    @rule(pick=st.integers(0, 99), more=prompts)
    def next_turn(self, pick: int, more: list[int]) -> None:
        """A chat goes on: all that was said, and something new."""
        live = self._pick(pick)
        self._try_submit([*live.answers[0].ids, *more][:9], 3, live.admission.caller.tenant, live.admission.cache)

    @precondition(lambda self: self.driver.engine.live_requests())
    @rule(pick=st.integers(0, 99))
    def cancel(self, pick: int) -> None:
        self.driver.engine.cancel(self._pick(pick), Cancelled("by the test"))

    @precondition(lambda self: self.driver.engine.live_requests())
    @rule(pick=st.integers(0, 99), back=st.integers(0, 2))
    def stop(self, pick: int, back: int) -> None:
        live = self._pick(pick)
        caller = live.admission.caller
        if live.output_tokens:
            self.driver.engine.stop(caller.tenant, caller.request_id, max(1, live.output_tokens - back))

    def _pick(self, pick: int) -> LiveRequest:
        live = list(self.driver.engine.live_requests())
        return live[pick % len(live)]

    @rule()
    def plan(self) -> None:
        self.driver.plan(self.lane)

    @precondition(lambda self: self.driver.lanes[self.lane].in_flight)
    @rule(nan=st.sampled_from([None] * 9 + [0]))
    def apply(self, nan: int | None) -> None:
        if nan is not None:
            self.runner.faults = Faults(nan_slots=frozenset({nan}))
        self.driver.apply(self.lane)
        self.runner.faults = Faults()

    @rule(rounds=st.integers(1, 10))
    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.driver.round()

    @rule()
    def lose(self) -> None:
        assert not self.runner.violations
        self.driver.lose(self.lane)
        self._attach()

    @rule(prompt=prompts, tenant=tenants, ttl_ns=st.sampled_from([0, 1, 3, 100]))
    def pin(self, prompt: list[int], tenant: str, ttl_ns: int) -> None:
        pinned = self.driver.engine.pin(tenant, CacheUse(), prompt, ttl_ns)
        assert pinned.tokens <= len(prompt)
        assert ttl_ns or not pinned.tokens

    @rule()
    def flush(self) -> None:
        _, held = self.driver.engine.flush()
        load = self.driver.core.load().lanes[self.lane]
        assert not load.blocks_cached
        assert held <= load.blocks_live

    @rule(ns=st.integers(1, 4))
    def wait(self, ns: int) -> None:
        self.driver.now += ns

    @invariant()
    def the_core_is_sound(self) -> None:
        self.driver.core.check()

    @invariant()
    def no_entry_was_read_that_is_not_of_the_history(self) -> None:
        assert not self.runner.violations

    @invariant()
    def each_key_names_a_block_that_holds_its_tokens(self) -> None:
        for live in self.driver.requests:
            if live.answers[0].keys is not None:
                caller = live.admission.caller
                space = NameSpace("numerics", caller.tenant, self.capacity.block_size, live.admission.cache.salt)
                for index, key in enumerate(KeyChain(space).grow(live.answers[0].ids), 1):
                    self.meanings.setdefault(key, live.answers[0].ids[: index * self.capacity.block_size])
        cache = self.driver.core._lanes[self.lane].cache
        for key, block in cache._block_of.items():
            ids = self.meanings[key]
            first = len(ids) - self.capacity.block_size
            entries = self.runner._store[block]  # written by now: its step was applied
            stored = [(entries[offset].position, entries[offset].token_id) for offset in range(len(ids) - first)]
            assert stored == list(enumerate(ids[first:], first))

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.drain()
        assert not self.runner.violations
        for live in self.driver.requests:
            asked = live.admission
            expected = expected_hash_tokens(asked.prompt_ids, len(output_of(live)), IDS)
            assert output_of(live) == list(expected)
            while isinstance(event := live.outbox.take(), Drawn):
                pass
            if isinstance(event, Ended):
                assert event.completed.finished.usage.cached_tokens < len(asked.prompt_ids)
                assert not asked.cache.bypass or not event.completed.finished.usage.cached_tokens


PrefixMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestPrefix = PrefixMachine.TestCase
