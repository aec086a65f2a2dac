"""The prefix cache in the engine and the core, over the fake executor: who hits, who waits, who pays.

The fake's tokens are a hash of the history that it reads back, and it notices entries that are not of that history.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from prefix_driver import Driver, output_of, spec_of, usage_of
from scheduler_model import answer

from executor.step import Capacity, SamplingParams
from services.errors import Cancelled, Internal
from services.executor.fake import FakeRunner, Faults
from services.executor.fake_tokens import expected_hash_tokens
from services.scheduler.core.calls import CoreConfig, InvalidSubmission, KvCleared, KvRemoved, KvStored, Submission
from services.scheduler.core.core import SchedulerCore
from services.scheduler.intake import CacheUse

CAPACITY = Capacity(
    block_size=4, total_blocks=64, max_batched_tokens=64, max_sequences=8, max_model_len=64, vocab_size=1000
)
PROMPT = list(range(100, 120))  # five blocks


def expected(prompt: list[int], count: int) -> list[int]:
    return list(expected_hash_tokens(prompt, count, 1000))


class Site(Driver):
    def __init__(self, core: CoreConfig = CoreConfig(), capacity: Capacity = CAPACITY) -> None:
        super().__init__(core)
        self.runner = FakeRunner("hash", capacity)
        self.attach("lane", self.runner)


@pytest.fixture
def sites() -> Iterator[list[Site]]:
    made: list[Site] = []
    yield made
    for site in made:
        site.core.check()
        assert not site.runner.violations


@pytest.fixture
def site(sites: list[Site]) -> Site:
    sites.append(Site())
    return sites[0]


def test_the_second_request_computes_only_what_is_new(site: Site) -> None:
    first, usage = site.answer([*PROMPT, 1, 2])
    assert usage.cached_tokens == 0
    before = site.planned_tokens
    second, usage = site.answer([*PROMPT, 3, 4])
    assert usage.cached_tokens == 20
    assert site.planned_tokens - before == 2 + 3
    assert (first, second) == (expected([*PROMPT, 1, 2], 4), expected([*PROMPT, 3, 4], 4))
    assert (site.core.totals().cached_tokens, site.core.totals().looked_up_tokens) == (20, 44)


def test_the_next_turn_of_a_chat_hits_what_was_generated(site: Site) -> None:
    answer, _ = site.answer(PROMPT, 12)
    again = [*PROMPT, *answer, 7, 8, 9]
    output, usage = site.answer(again, 3)
    assert usage.cached_tokens == 28  # the last of the 12 was drawn and never computed
    assert output == expected(again, 3)


@pytest.mark.parametrize("length", [4, 8, 16])
def test_p08_a_prompt_that_is_cached_whole_computes_its_last_block(site: Site, length: int) -> None:
    logprobs = SamplingParams(temperature=0.0, logprobs=2)
    first, _ = site.answer(PROMPT[:length], sampling=logprobs)
    for more in ([], [5]):
        prompt = PROMPT[:length] + more
        output, usage = site.answer(prompt, sampling=logprobs)
        assert output == expected(prompt, 4)
        assert usage.cached_tokens == length - (0 if more else 4)
    assert site.answer(PROMPT[:length])[0] == first
    assert all(piece.count for step in site.runner.steps for piece in step.slices)


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 61, 62, 63])
@pytest.mark.parametrize("new", [1, 2, 3])
def test_p13_lengths_at_the_edges_of_blocks_and_of_the_context(site: Site, length: int, new: int) -> None:
    if length + new > CAPACITY.max_model_len:
        new = CAPACITY.max_model_len - length
    prompt = [index % 50 for index in range(length)]
    for turn in range(2):
        output, usage = site.answer(prompt, new)
        assert output == expected(prompt, new)
        assert usage.cached_tokens == (length - 1) // 4 * 4 * turn


@pytest.mark.parametrize("depth", [1, 2])
def test_p03_many_with_one_cold_prefix_compute_it_once(sites: list[Site], depth: int) -> None:
    capacity = replace(CAPACITY, total_blocks=512, max_batched_tokens=256, max_sequences=64, max_model_len=256)
    site = Site(CoreConfig(steps_in_flight=depth, prefill_chunk=48), capacity)
    sites.append(site)
    shared = [index % 97 for index in range(128)]
    prompts = [[*shared, 200 + index, 300 + index] for index in range(64)]
    lives = [site.submit(prompt, 3) for prompt in prompts]
    site.drain()
    assert [output_of(live) for live in lives] == [expected(prompt, 3) for prompt in prompts]
    usages = [usage_of(live) for live in lives]
    assert sum(usage.cached_tokens for usage in usages) == 63 * 128
    assert site.planned_tokens == 128 + 64 * (2 + 2)


def test_p03_who_waits_for_one_that_dies_computes_by_itself(site: Site) -> None:
    first, second = site.submit(PROMPT), site.submit([*PROMPT, 1])
    step = site.plan("lane")
    assert step is not None
    assert len(step.slices) == 1
    assert [view.blocks for view in site.core.sequences()] == [5, 0]
    site.engine.cancel(first, Cancelled("by the test"))
    site.drain()
    assert output_of(second) == expected([*PROMPT, 1], 4)
    assert usage_of(second).cached_tokens == 0


def test_others_pass_the_one_that_waits_for_a_prefix(site: Site) -> None:
    site.submit(PROMPT)
    waiting = site.submit([*PROMPT, 1])
    other = site.submit([1, 2, 3])
    step = site.plan("lane")
    assert step is not None
    assert [piece.slot for piece in step.slices] == [0, 1]
    site.drain()
    assert output_of(waiting) == expected([*PROMPT, 1], 4)
    assert output_of(other) == expected([1, 2, 3], 4)


def test_p12_who_uses_a_prefix_does_not_change_it(site: Site) -> None:
    prefix = PROMPT[:18]  # its last block is half full
    lives = [site.submit([*prefix, 1], 30), site.submit([*prefix, 2], 30)]
    site.drain()
    lives += [site.submit([*prefix, 3], 5), site.submit([*prefix, 1], 5), site.submit(prefix, 5)]
    site.drain()
    for live in lives:
        assert output_of(live) == expected(list(live.admission.prompt_ids), len(output_of(live)))
    assert [usage_of(live).cached_tokens for live in lives] == [0, 16, 16, 16, 16]


def test_a_block_is_found_only_once_its_step_is_acknowledged(site: Site) -> None:
    site.submit(PROMPT, 8)
    site.plan("lane")
    assert [view.blocks for view in site.core.sequences()] == [5]
    probe = site.submit([*PROMPT[:8], 1])
    site.plan("lane")
    assert site.core.sequences()[1].lane is None
    site.apply("lane")
    site.plan("lane")
    assert site.core.sequences()[1].computed == 9
    site.drain()
    assert usage_of(probe).cached_tokens == 8


def test_salts_and_tenants_share_nothing_p10(site: Site) -> None:
    def cached(tenant: str, salt: str | None, **rest: bool) -> int:
        return site.answer([*PROMPT, 1], tenant=tenant, cache=CacheUse(salt, **rest))[1].cached_tokens

    assert cached("a", "pepper") == 0
    assert cached("a", "pepper") == 20
    assert cached("a", "other") == 0
    assert cached("a", None) == 0
    assert cached("a", None) == 20
    assert cached("b", "pepper") == 0  # a salt divides one's own name space and opens nobody else's
    assert cached("b", "a") == 0
    assert cached("b", None) == 0
    assert cached("a", None, bypass=True) == 0


def test_a_request_that_bypasses_leaves_nothing(site: Site) -> None:
    site.answer(PROMPT, cache=CacheUse(bypass=True))
    assert site.core.load().lanes["lane"].blocks_cached == 0
    assert site.answer([*PROMPT, 1])[1].cached_tokens == 0


def test_a_preempted_sequence_finds_its_own_blocks(sites: list[Site]) -> None:
    capacity = replace(CAPACITY, total_blocks=14)
    site = Site(CoreConfig(watermark=0.0, default_output_estimate=1, preemption_cap=0), capacity)
    sites.append(site)
    prompts = [[*PROMPT[:12], 1], [*PROMPT[:12], 2]]
    lives = [site.submit(prompt, None) for prompt in prompts]
    for _ in range(40):
        site.round()
        if site.core.totals().preemptions:
            break
    assert site.core.totals().preemptions == 1
    for live in lives:
        site.engine.stop("tenant", live.admission.caller.request_id, live.output_tokens) if live is lives[0] else None
    site.drain()
    usage = usage_of(lives[1])
    assert output_of(lives[1]) == expected(prompts[1], len(output_of(lives[1])))
    assert usage.preemptions == 1
    assert usage.recomputed_tokens < 12  # all but what others had taken meanwhile


def test_the_loss_of_a_lane_empties_its_cache(sites: list[Site]) -> None:
    site = Site(CoreConfig(kv_events=True))
    sites.append(site)
    site.answer(PROMPT)
    site.lose("lane")
    assert site.engine.prefixes.log.next == 3  # stored, cleared
    site.runner = FakeRunner("hash", CAPACITY)
    site.attach("lane-2", site.runner)
    output, usage = site.answer([*PROMPT, 1])
    assert usage.cached_tokens == 0
    assert output == expected([*PROMPT, 1], 4)


def test_what_a_failed_sequence_read_is_not_found_again(site: Site) -> None:
    site.answer(PROMPT)
    site.runner.faults = Faults(nan_slots=frozenset({0}))
    failed = site.submit([*PROMPT, 1])
    site.drain()
    event = failed.outbox.take()
    assert isinstance(event, Internal)
    site.runner.faults = Faults()
    assert site.answer([*PROMPT, 1])[1].cached_tokens == 0


def test_cached_blocks_make_room_for_work(sites: list[Site]) -> None:
    capacity = replace(CAPACITY, total_blocks=16)
    site = Site(CoreConfig(watermark=0.0), capacity)
    sites.append(site)
    for first in range(20):
        prompt = [first * 7 + index for index in range(40)]
        assert site.answer(prompt, 20)[0] == expected(prompt, 20)
    assert site.core.load().lanes["lane"].blocks_cached >= 14


def test_a_pinned_prefix_outlives_others(sites: list[Site]) -> None:
    capacity = replace(CAPACITY, total_blocks=16)
    site = Site(CoreConfig(watermark=0.0), capacity)
    sites.append(site)
    site.answer(PROMPT)
    assert site.engine.pin("tenant", CacheUse(), PROMPT, 1000).tokens == 20
    assert site.engine.pin("other", CacheUse(), PROMPT, 1000).tokens == 0
    for first in range(3):
        site.answer([500 + first * 7 + index for index in range(36)], 4)
    assert site.answer([*PROMPT, 1], 1)[1].cached_tokens == 20
    assert site.engine.pin("tenant", CacheUse(), PROMPT, 0).tokens == 0
    for first in range(3):
        site.answer([700 + first * 7 + index for index in range(36)], 4)
    assert site.answer([*PROMPT, 1], 1)[1].cached_tokens == 0


def test_a_lane_with_blocks_of_another_size_serves_without_a_cache(site: Site) -> None:
    site.answer(PROMPT)
    waiting = site.submit([*PROMPT, 1])
    site.lose("lane")
    site.runner = FakeRunner("hash", replace(CAPACITY, block_size=8))
    site.attach("other", site.runner)
    site.drain()
    assert output_of(waiting) == expected([*PROMPT, 1], 4)
    assert site.core.load().lanes["other"].blocks_cached == 0


def test_a_resumed_answer_finds_what_it_had_generated(site: Site) -> None:
    answer, _ = site.answer(PROMPT, 12)
    resumed = site.submit(PROMPT, 16, output=answer[:10])
    site.drain()
    assert output_of(resumed) == expected(PROMPT, 16)
    assert usage_of(resumed).cached_tokens == 20


def test_events_tell_what_can_be_found_in_order() -> None:
    core = SchedulerCore(CoreConfig(kv_events=True))
    site = Driver(CoreConfig(kv_events=True))
    site.attach("lane", FakeRunner("hash", replace(CAPACITY, total_blocks=6)))
    site.answer(PROMPT, 1)
    site.answer([*PROMPT, *range(3)], 1)
    site.answer([1] * 20, 1)
    site.lose("lane")
    log = site.engine.prefixes.log
    events = [numbered.event for numbered in log._kept]
    known: set[bytes] = set()
    for event in events:
        match event:
            case KvStored():
                assert not event.parent or event.parent in known
                assert known.isdisjoint(event.keys)
                known |= set(event.keys)
            case KvRemoved():
                assert known >= set(event.keys)
                known -= set(event.keys)
            case KvCleared():
                known = set()
    assert [type(event) for event in events].count(KvRemoved) >= 1
    assert events[-1] == KvCleared("lane")
    assert core.take_kv_events() == []


@pytest.mark.parametrize(("keys", "size"), [(2, 4), (1, 0), (1, 9)])
def test_keys_that_the_prompt_can_not_fill_are_refused(keys: int, size: int) -> None:
    core = SchedulerCore(CoreConfig())
    with pytest.raises(InvalidSubmission, match="block keys"):
        core.submit(Submission("a", "t", 7, 1, block_keys=(b"k",) * keys, key_block_size=size), 0)
    core.submit(Submission("a", "t", 7, 1, block_keys=(b"k",), key_block_size=4), 0)
    with pytest.raises(InvalidSubmission, match="block keys"):
        core.extend("a", (b"l",))
    core.extend("nobody", (b"l",))


def test_of_two_steps_in_flight_only_the_acknowledged_one_counts(sites: list[Site]) -> None:
    site = Site(CoreConfig(prefill_chunk=8), replace(CAPACITY, max_batched_tokens=8))
    sites.append(site)
    site.submit(PROMPT)
    site.plan("lane")
    site.plan("lane")
    assert site.core.sequences()[0].computed == 16
    assert site.engine.pin("tenant", CacheUse(), PROMPT, 1000).tokens == 0
    for tokens in (8, 16):
        site.apply("lane")
        assert site.engine.pin("tenant", CacheUse(), PROMPT, 1000).tokens == tokens
    site.drain()


def test_a_key_that_comes_late_makes_its_block_findable_at_once() -> None:
    core = SchedulerCore(CoreConfig())
    core.attach("lane", spec_of(CAPACITY), 0)
    core.submit(Submission("a", "t", 9, 5, key_block_size=4), 0)
    plan = core.plan("lane", 0)
    core.apply("lane", answer(plan), 0)
    assert core.pin((b"one", b"two"), 4, "t", 10, 0) == 0
    core.extend("a", (b"one", b"two"))
    core.check()
    assert core.pin((b"one", b"two", b"three"), 4, "t", 10, 0) == 2
    assert core.pin((b"one",), 8, "t", 10, 0) == 0
