"""Policies by example, and the pathologies that each is there to avoid: a naive variant of it fails the same test."""

import dataclasses

import pytest
from scheduler_model import World, answer, ask

from services.scheduler.core.calls import CoreConfig, LaneSpec, Limits, Plan, Submission
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.cost import CostEstimate
from services.scheduler.core.lateness import TooLate
from services.scheduler.core.limits import TenantQuota
from services.scheduler.core.policies.fair import OUTPUT_COST, PROMPT_COST
from services.scheduler.core.policies.policy import POLICIES, Policy, by_arrival, priority_class

ROOMY = LaneSpec(block_size=16, total_blocks=512, max_batched_tokens=256, max_sequences=4, max_model_len=4096)
ONE_SLOT = dataclasses.replace(ROOMY, max_sequences=1)


def world(spec: LaneSpec, policy: str, **config: object) -> World:
    made = World(CoreConfig(policy=policy, **{"steps_in_flight": 1, **config}))  # type: ignore[arg-type]
    made.attach("lane", spec)
    return made


def admitted(plan: Plan | None) -> list[str]:
    return [] if plan is None else [one.key for one in plan.admitted]


def step(made: World, ns: int = 1) -> list[str]:
    """One step of the only lane; who was admitted."""
    made.now += ns
    plan = made.plan("lane")
    if plan is not None:
        made.apply("lane")
    return admitted(plan)


def order_of_admission(made: World) -> list[str]:
    order: list[str] = []
    while made.live():
        order += step(made)
    made.drain()
    return order


def given(made: World, key: str) -> int:
    return int(made.users[key].given)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [1, 2])
def test_everybody_ends_under_every_policy(policy: str, depth: int) -> None:
    made = world(
        LaneSpec(2, 15, 32, 4, 21), policy, steps_in_flight=depth, default_output_estimate=1, watermark=0.0, aging_ns=3
    )
    for number in range(24):
        tenant, priority = "abc"[number % 3], (0, 0, 5, -5)[number % 4]
        made.submit(Submission(f"s{number}", tenant, 1 + number % 9, None, priority=priority))
    for _ in range(40):
        step(made)
        made.core.check()
    made.drain()


def test_higher_priority_leaves_the_queue_first_and_equals_by_arrival() -> None:
    made = world(ONE_SLOT, "priority")
    for key, priority in (("a", 0), ("b", 5), ("c", -5), ("d", 5)):
        made.submit(ask(key, 4, 1, priority=priority))
    assert order_of_admission(made) == ["b", "d", "a", "c"]


def test_s40004_no_inversion_a_higher_priority_takes_the_slot_of_running_work() -> None:
    """All slots run low work; the newcomer must not wait for its end."""
    for policy, waits in (("priority", False), ("fcfs", True)):
        made = world(ONE_SLOT, policy)
        made.submit(ask("low", 4, 200))
        step(made)
        made.submit(ask("high", 4, 2, priority=1))
        for _ in range(3):
            step(made)
        assert (given(made, "high") == 0) == waits
        made.drain()
        assert made.core.totals().preemptions == (0 if waits else 1)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_higher_priority_takes_the_blocks_of_as_few_as_will_do(depth: int) -> None:
    made = world(LaneSpec(1, 40, 64, 8, 40), "priority", steps_in_flight=depth, watermark=0.0)
    for number in range(4):
        made.submit(ask(f"low{number}", 5, 5))
    step(made)
    made.submit(ask("high", 12, 4, priority=1))
    for _ in range(4):
        step(made)
    assert given(made, "high") >= 1
    assert made.core.totals().preemptions == 2  # the last two: 20 blocks and 15 needed
    assert [made.users[f"low{number}"].preempted for number in range(4)] == [0, 0, 1, 1]
    made.drain()


def test_one_lane_alone_makes_room_for_a_request() -> None:
    made = world(ONE_SLOT, "priority", steps_in_flight=2)
    made.attach("other", ONE_SLOT)
    for key in ("a", "b"):
        made.submit(ask(key, 4, 50))
    for lane in ("lane", "other"):
        made.plan(lane)
    made.submit(ask("high", 4, 4, priority=1))
    for _ in range(6):
        for lane, executor in made.executors.items():
            while made.plan(lane) is not None:
                made.core.check()
            if executor.in_flight:
                made.apply(lane)
    assert given(made, "high") >= 1
    made.drain()
    assert made.core.totals().preemptions == 1


@pytest.mark.parametrize("priority", [2, 5])
def test_nobody_is_preempted_for_one_that_would_not_fit_even_then(priority: int) -> None:
    made = world(LaneSpec(1, 30, 64, 8, 30), "priority", watermark=0.0)
    made.submit(ask("first", 10, 10, priority=priority))
    made.submit(ask("low", 2, 6))
    step(made)
    made.submit(ask("high", 14, 14, priority=2))  # fits alone, not beside first, which is no lower
    for _ in range(4):
        step(made)
    assert made.core.totals().preemptions == 0
    made.drain()


def test_s12_ping_pong_equals_and_the_aged_never_take_running_work() -> None:
    made = world(ONE_SLOT, "priority", aging_ns=2)
    for number in range(6):
        made.submit(ask(f"s{number}", 4, 30, priority=number % 2))
    for _ in range(5):
        step(made)
    made.submit(ask("top", 4, 2, priority=100))
    made.drain()
    # top took a slot once. An odd one took one from no even one, since they came first; the aged took none.
    assert made.core.totals().preemptions == 1


def test_s20608_low_priority_does_not_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endless stream of high work, and one low request; aging lets it in, and without aging it starves."""

    def waits(policy: str) -> int:
        made = world(ONE_SLOT, policy, aging_ns=10)
        made.submit(ask("low", 4, 2, priority=-100))
        for number in range(100):
            made.submit(ask(f"high{number}", 4, 1, priority=100))
            step(made)
            if made.users["low"].finished is not None:
                return number
        return 100

    assert waits("priority") <= 50
    monkeypatch.setattr("services.scheduler.core.policies.queue.AGING_RUNGS", 0)
    assert waits("priority") == 100


def test_aging_takes_a_bounded_number_of_rungs() -> None:
    made = world(ONE_SLOT, "priority", aging_ns=10)
    made.submit(ask("busy", 4, 200, priority=100))
    made.submit(ask("low", 4, 2, priority=-100))
    for _ in range(100):
        step(made, ns=7)
    [low] = [sequence for sequence in made.core._sequences.values() if sequence.key == "low"]
    assert low.aged == 4
    assert made.core._waiting.next_aging() is None
    made.drain()


def service(made: World, tenant: str, weight: float = 1.0) -> float:
    users = [user for user in (*made.users.values(), *made.past) if user.submission.tenant == tenant]
    prompt = sum(user.submission.prompt_len for user in users if user.given)
    return float(prompt * PROMPT_COST + OUTPUT_COST * sum(user.given for user in users)) / weight


def backlog(policy: str, weights: dict[str, float], rounds: int = 600) -> World:
    """Two tenants with work always waiting, one of which asks for ten times as much."""
    quotas = {tenant: TenantQuota(weight=weight) for tenant, weight in weights.items()}
    made = world(ROOMY, policy, quotas=quotas, max_queued_requests=10_000)
    for number in range(60):
        made.submit(Submission(f"small{number}", "small", 20, 10))
    for number in range(600):
        made.submit(Submission(f"big{number}", "big", 20, 10))
    for number in range(rounds):
        made.submit(Submission(f"more{number}", "small", 20, 10))
        step(made)
    return made


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_tenant_monopoly_two_backlogged_tenants_get_their_weighted_shares(weight: float) -> None:
    made = backlog("fair", {"big": weight})
    ratio = service(made, "big", weight) / service(made, "small")
    assert 0.9 < ratio < 1.1
    naive = backlog("fcfs", {"big": weight})
    assert service(naive, "big", weight) / service(naive, "small") > 2 / weight


def test_an_idle_tenant_earns_no_credit() -> None:
    made = world(ONE_SLOT, "fair")
    for number in range(20):
        made.submit(Submission(f"busy{number}", "busy", 10, 5))
    for _ in range(50):
        step(made)
    for number in range(10):
        made.submit(Submission(f"back{number}", "back", 10, 5))
        made.submit(Submission(f"on{number}", "busy", 10, 5))
    order = order_of_admission(made)
    first = [key[:4] for key in order[:10]]
    assert 4 <= first.count("back") <= 6, "by turns from the start, though busy was served long before"


def test_recomputing_is_never_charged() -> None:
    made = world(LaneSpec(1, 9, 16, 4, 10), "fair", default_output_estimate=1, watermark=0.0)
    made.submit(Submission("first", "a", 3, None))
    made.submit(Submission("second", "b", 3, None))
    made.drain()
    assert made.core.totals().preemptions > 0
    counters = made.core._gate.counters
    assert counters.served("a") == counters.served("b")  # the same prompt and the same answer


def test_the_earliest_deadline_leaves_first() -> None:
    made = world(ONE_SLOT, "deadline")
    for key, limit in (("late", 900), ("none", None), ("soon", 300), ("mid", 600)):
        made.submit(ask(key, 4, 1, limits=Limits(first_token_ns=limit)))
    assert order_of_admission(made) == ["soon", "mid", "late", "none"]


def test_c05_a_deadline_that_cannot_be_made_is_refused_at_once_and_only_that() -> None:
    made = world(ROOMY, "deadline")
    cost = CostEstimate(step_ns=100, token_ns=10)
    with pytest.raises(TooLate, match="first_token time limit: with 0 requests ahead it would take about") as refusal:
        made.submit(ask("never", 1000, 5, limits=Limits(first_token_ns=5_000)), cost)
    assert refusal.value.field == "limits"
    made.submit(ask("long", 1000, 5, limits=Limits(first_token_ns=10_500)), cost)
    with pytest.raises(TooLate):  # behind long it is too late, in spite of its own few tokens
        made.submit(ask("behind", 10, 5, limits=Limits(total_ns=10_550)), cost)
    made.submit(ask("before", 10, 5, limits=Limits(first_token_ns=400)), cost)  # it leaves the queue first
    made.submit(ask("unlimited", 1000, 5), cost)
    made.drain()


def test_requests_that_end_slowly_count_too() -> None:
    made = world(ONE_SLOT, "deadline")
    made.submit(ask("busy", 4, 100))
    step(made)
    cost = CostEstimate(step_ns=1, token_ns=1, request_ns=1_000)
    made.submit(ask("next", 4, 5, limits=Limits(first_token_ns=1_100)), cost)
    with pytest.raises(TooLate, match="with 1 requests ahead"):
        made.submit(ask("second", 4, 5, limits=Limits(first_token_ns=1_100)), cost)
    made.drain()


def test_other_policies_refuse_nobody_for_its_deadline() -> None:
    made = world(ROOMY, "fcfs")
    made.submit(ask("never", 1000, 5, limits=Limits(first_token_ns=5)), CostEstimate(100, 10))


def test_the_shortest_leaves_first_and_equals_by_arrival() -> None:
    made = world(ONE_SLOT, "shortest")
    for key, length in (("long", 500), ("b", 30), ("mid", 100), ("a", 17)):
        made.submit(ask(key, length, 1))
    assert order_of_admission(made) == ["b", "a", "mid", "long"]  # b and a are of one size class


def test_a_rung_of_aging_takes_a_quarter_of_the_length_off() -> None:
    made = world(ONE_SLOT, "shortest", aging_ns=10)
    made.submit(ask("long", 800, 1))
    made.now += 10
    for key, length in (("longer", 700), ("shorter", 500)):
        made.submit(ask(key, length, 1))
    assert order_of_admission(made) == ["shorter", "long", "longer"]


def test_the_longest_does_not_starve_among_short_ones() -> None:
    made = world(ONE_SLOT, "shortest", aging_ns=10)
    made.submit(ask("long", 1000, 1))
    for number in range(100):
        made.submit(ask(f"short{number}", 8, 1))
        step(made)
        if made.users["long"].given:
            break
    assert made.users["long"].given
    assert number <= 60
    made.drain()


def with_keys(key: str, blocks: int, prefix: str) -> Submission:
    keys = tuple(f"{prefix}{number}".encode() for number in range(blocks))
    return Submission(key, "tenant", blocks * 16 + 1, 1, block_keys=keys, key_block_size=16)


def warmed(most: int) -> SchedulerCore:
    """One slot, and the prefix "hot" in its cache."""
    core = SchedulerCore(CoreConfig(policy="cache", max_passes=most, steps_in_flight=1))
    core.attach("lane", ONE_SLOT, 0)
    core.submit(with_keys("warm", 8, "hot"), 0)
    assert core_step(core) == ["warm"]
    return core


def core_step(core: SchedulerCore) -> list[str]:
    plan = core.plan("lane", 0)
    core.apply("lane", answer(plan), 0)
    core.check()
    return admitted(plan)


def test_s31954_cache_hot_requests_pass_a_cold_one_a_bounded_number_of_times() -> None:
    def passes(most: int) -> int:
        core = warmed(most)
        core.submit(with_keys("cold", 8, "cold"), 0)
        for number in range(40):
            core.submit(with_keys(f"hot{number}", 8, "hot"), 0)
            core.submit(with_keys(f"warmer{number}", 8, "hot"), 0)
            if core_step(core) == ["cold"]:
                return number
        return 40

    assert passes(5) == 5
    assert passes(0) == 0
    assert passes(1000) == 40, "without the bound it starves"


def test_the_longest_cached_prefix_leaves_first() -> None:
    core = warmed(16)
    for key, prefix in (("cold", "cold"), ("hot", "hot")):
        core.submit(with_keys(key, 8, prefix), 0)
    assert [core_step(core), core_step(core)] == [["hot"], ["cold"]]


@pytest.mark.parametrize(("policy", "padding"), [("static-padded", True), ("static-compact", False)])
def test_a_static_batch_lets_nobody_join(policy: str, padding: bool) -> None:
    made = world(ROOMY, policy)
    for number, tokens in enumerate((9, 2, 2, 2, 5, 5)):
        made.submit(ask(f"s{number}", 4, tokens))
    padded, joined = [], []
    while made.live():
        made.now += 1
        plan = made.plan("lane")
        assert plan is not None
        padded.append(plan.padding)
        joined.append(len(plan.admitted))
        made.apply("lane")
    assert joined == [4, *[0] * 8, 2, *[0] * 4]
    assert padded == ([0, 0, *[3] * 7, *[0] * 5] if padding else [0] * 14)
    made.drain()


def test_reserve_holds_the_whole_need_from_the_start() -> None:
    spec = LaneSpec(16, 64, 256, 8, 1024)
    together = {}
    for policy in ("reserve", "fcfs"):
        made = world(spec, policy, default_output_estimate=16)
        for number in range(8):
            made.submit(ask(f"s{number}", 16, None))
        together[policy] = len(step(made))
        if policy == "reserve":
            assert made.core.load().lanes["lane"].blocks_live == 64
    assert together == {"reserve": 1, "fcfs": 8}


def test_the_policy_changes_while_requests_wait_and_run() -> None:
    made = world(ONE_SLOT, "fcfs")
    made.submit(ask("busy", 4, 6))
    step(made)
    for key, priority in (("a", 0), ("b", 5)):
        made.submit(ask(key, 4, 1, priority=priority))
    assert made.core.set_policy("priority", made.now) == "fcfs"
    assert made.core.load().policy == "priority"
    made.core.check()
    assert order_of_admission(made)[:2] == ["b", "busy"]  # b took the slot, and busy came before a
    with pytest.raises(ValueError, match="policy 'best' is unknown; there are fcfs, priority"):
        made.core.set_policy("best", 0)
    with pytest.raises(ValueError, match="policy 'best' is unknown"):
        World(CoreConfig(policy="best"))


def test_a_policy_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def youngest(sequence: object) -> tuple[int, ...]:
        return (-by_arrival(sequence)[0],)  # type: ignore[arg-type]

    monkeypatch.setitem(POLICIES, "lifo", Policy(youngest, base=priority_class))
    made = world(ONE_SLOT, "lifo")
    for key in "abc":
        made.submit(ask(key, 4, 1))
    assert order_of_admission(made) == ["c", "b", "a"]
