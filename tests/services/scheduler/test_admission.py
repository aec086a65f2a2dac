"""Who comes in, and when: bypass, shares, quotas, the ladder; each with what happens without it."""

import pytest
from scheduler_model import World, ask

from services.errors import InvalidArgument
from services.scheduler.core.calls import (
    CoreConfig,
    DoesNotFit,
    LaneSpec,
    Plan,
    QueueFull,
    Sibling,
    Submission,
    SubmitError,
)
from services.scheduler.core.cost import CostEstimate, DrainRate, StepFit
from services.scheduler.core.degrade import Degraded, Ladder
from services.scheduler.core.expected_output import ENOUGH, OutputHistory
from services.scheduler.core.limits import LadderConfig, Rung, TenantQuota
from services.scheduler.core.policies.ranked import RUN, Ranked
from services.scheduler.core.quota import Bucket, QuotaExceeded, Quotas
from services.scheduler.core.sequence import Sequence
from services.scheduler.quota_settings import parse_quota, parse_quotas

MINUTE = 60_000_000_000


def world(spec: LaneSpec, **config: object) -> World:
    made = World(CoreConfig(**{"steps_in_flight": 1, **config}))  # type: ignore[arg-type]
    made.attach("lane", spec)
    return made


def counts(plan: Plan | None) -> dict[str, int]:
    return {} if plan is None else {piece.key: piece.count for piece in plan.slices}


def run_beside_a_big_one(most: int) -> tuple[int, int]:
    """Small requests arrive without pause while a big one can't be afforded: how many pass it, and steps until it is
    in (or 300)."""
    made = world(LaneSpec(1, 60, 64, 8, 60), max_passes=most, watermark=0.0, prefill_chunk=64)
    made.submit(ask("holder", 10, 8))
    made.plan("lane")
    made.apply("lane")
    made.submit(ask("big", 50, 9))
    passed = 0
    for steps in range(300):
        made.submit(ask(f"small{steps}", 3, 4))
        plan = made.plan("lane")
        made.apply("lane")
        if plan is not None and "big" in counts(plan):
            break
        passed += 0 if plan is None else len(plan.admitted)
    made.drain()
    return passed, steps


def test_head_of_line_blocking_smaller_ones_pass_one_that_cannot_be_afforded_a_bounded_number_of_times() -> None:
    assert run_beside_a_big_one(0)[0] == 0, "without bypass the lane idles beside a big request"
    passed, steps = run_beside_a_big_one(6)
    assert passed == 6
    assert steps < 30
    assert run_beside_a_big_one(10_000)[1] == 299, "without the bound the big one starves"


def test_s10_a_short_request_behind_a_long_prompt_is_served_within_three_chunks() -> None:
    for depth in (1, 2):
        made = world(LaneSpec(16, 1000, 512, 8, 16_000), prefill_chunk=256, steps_in_flight=depth)
        made.submit(ask("long", 8_000, 5))
        made.plan("lane")
        made.submit(ask("short", 20, 5))
        for _ in range(3):
            made.apply("lane")
            made.plan("lane")
        made.apply("lane")
        assert made.users["short"].given >= 1
        for key in ("long", "short"):
            made.cancel(key)
        made.drain()


def test_decode_starves_prefill_not_prompts_keep_a_share_of_every_step() -> None:
    made = world(LaneSpec(4, 400, 16, 64, 64), prefill_chunk=4)
    for number in range(11):
        made.submit(ask(f"decode{number}", 1, 40))
    for _ in range(3):
        made.plan("lane")
        made.apply("lane")
    made.submit(ask("prompt", 40, 2))
    for _ in range(10):
        plan = made.plan("lane")
        assert counts(plan)["prompt"] == 4
        made.apply("lane")
    made.drain()


def test_long_prompts_have_one_share_between_them() -> None:
    made = world(LaneSpec(16, 2000, 100, 8, 16_000), prefill_chunk=64, long_prompt_tokens=500, long_prompt_share=0.3)
    for number in range(3):
        made.submit(ask(f"long{number}", 4_000, 2))
    made.plan("lane")
    made.apply("lane")
    made.submit(ask("short", 200, 2))
    for _ in range(3):
        plan = made.plan("lane")
        given = counts(plan)
        assert given["short"] == 64
        assert sum(count for key, count in given.items() if key.startswith("long")) <= 36
        made.apply("lane")
    for key in list(made.users):
        made.cancel(key)
    made.drain()


def test_the_queue_is_bounded_in_bytes() -> None:
    made = world(LaneSpec(16, 64, 256, 8, 512), max_queued_bytes=100)
    made.submit(ask("a", 4, 2, size_bytes=60))
    with pytest.raises(QueueFull, match="60 bytes wait and 41 would come; the limit is 100") as refusal:
        made.submit(ask("b", 4, 2, size_bytes=41))
    assert refusal.value.field == "queued_bytes"
    with pytest.raises(DoesNotFit, match="101 bytes are more than the queue's 100"):
        made.submit(ask("b", 4, 2, size_bytes=101))
    made.plan("lane")
    made.submit(ask("b", 4, 2, size_bytes=100))
    made.drain()


def test_a_quota_of_concurrency_counts_live_requests_of_that_tenant_alone() -> None:
    made = world(LaneSpec(16, 64, 256, 8, 512), quotas={"a": TenantQuota(concurrency=2)})
    for key in ("a1", "a2"):
        made.submit(Submission(key, "a", 4, 2))
    with pytest.raises(QuotaExceeded, match="tenant a has 2 requests running or waiting") as refusal:
        made.submit(Submission("a3", "a", 4, 2))
    assert (refusal.value.field, refusal.value.wait_ns) == ("concurrency", None)
    made.submit(Submission("b1", "b", 4, 2))
    made.cancel("a1")
    made.submit(Submission("a3", "a", 4, 2))
    made.drain()


def test_requests_a_minute_refill_evenly_and_the_refusal_says_when() -> None:
    made = world(LaneSpec(16, 64, 256, 8, 512), default_quota=TenantQuota(requests_per_minute=2))
    for key in ("a1", "a2"):
        made.submit(Submission(key, "a", 4, 2))
    with pytest.raises(QuotaExceeded, match="2 requests per minute") as refusal:
        made.submit(Submission("a3", "a", 4, 2))
    assert refusal.value.wait_ns == MINUTE // 2
    made.now = MINUTE // 2 - 1
    with pytest.raises(QuotaExceeded):
        made.submit(Submission("a3", "a", 4, 2))
    made.now += 1
    made.submit(Submission("a3", "a", 4, 2))
    made.drain()


def test_tokens_a_minute_are_charged_up_front_and_the_unused_is_refunded() -> None:
    made = world(LaneSpec(16, 64, 256, 8, 512), default_quota=TenantQuota(tokens_per_minute=100))
    made.submit(Submission("a1", "a", 10, 80))
    with pytest.raises(QuotaExceeded, match="100 tokens per minute") as refusal:
        made.submit(Submission("a2", "a", 5, 10))
    assert refusal.value.wait_ns == MINUTE * 5 // 100
    made.plan("lane")
    made.apply("lane", ended=0)  # 1 of 80 tokens: 79 come back
    made.submit(Submission("a2", "a", 5, 84))
    with pytest.raises(QuotaExceeded):
        made.submit(Submission("a3", "a", 1, 1))
    made.cancel("a2")  # nothing of it was computed: all comes back
    with pytest.raises(DoesNotFit, match="101 tokens, prompt and output, are more than tenant a may have in a minute"):
        made.submit(Submission("a4", "a", 1, 100))
    made.submit(Submission("a4", "a", 1, 88))
    made.drain()


def test_a_refused_request_is_charged_nothing() -> None:
    quota = TenantQuota(requests_per_minute=1, tokens_per_minute=50)
    made = world(LaneSpec(16, 64, 256, 8, 512), default_quota=quota, max_queued_requests=1)
    made.submit(Submission("b", "b", 4, 2))
    for _ in range(3):
        with pytest.raises(QueueFull):
            made.submit(Submission("a", "a", 40, 10))
    made.plan("lane")
    made.submit(Submission("a", "a", 40, 10))
    made.drain()


def test_a_bucket_is_exact_over_many_small_steps() -> None:
    bucket = Bucket(7, 0)
    bucket.take(7)
    for now in range(0, MINUTE, MINUTE // 1000):
        bucket.wait_ns(1, now)
    assert bucket.wait_ns(7, MINUTE - 1) == 1
    assert bucket.full(MINUTE)


def test_accounts_of_tenants_that_left_are_forgotten() -> None:
    quotas = Quotas(TenantQuota(requests_per_minute=5), {})
    for number in range(5000):
        quotas.charge(f"t{number}", f"k{number}", 1, number * MINUTE)
        quotas.settle(f"k{number}", 1, number * MINUTE)
    assert len(quotas._accounts) < 2100


def test_quotas_are_read_from_text() -> None:
    assert parse_quota("a:b=requests:60+tokens:1000+concurrency:4+weight:2.5") == (
        "a:b",
        TenantQuota(concurrency=4, requests_per_minute=60, tokens_per_minute=1000, weight=2.5),
    )
    default, named = parse_quotas(("*=concurrency:1", "a=weight:2"))
    assert (default, named) == (TenantQuota(concurrency=1), {"a": TenantQuota(weight=2.0)})
    for text in ("a", "=tokens:1", "a=speed:1", "a=tokens:x", "a=tokens:0", "a=tokens:1+tokens:2", "a=weight:0"):
        with pytest.raises(InvalidArgument):
            parse_quota(text)
    with pytest.raises(InvalidArgument, match="two quotas"):
        parse_quotas(("a=tokens:1", "a=tokens:2"))


LADDER = LadderConfig(enabled=True, protects=0, enter_at=0.5, enter_ns=10, leave_at=0.25, leave_ns=20, max_tokens=3)


def test_rungs_are_taken_under_sustained_pressure_and_released_with_hysteresis() -> None:
    ladder = Ladder(LADDER)
    levels = []
    for now in range(0, 60, 5):
        ladder.observe(0.6, now)
        levels.append(len(ladder.rungs))
    assert levels == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4]
    for now in range(60, 200, 5):
        ladder.observe(0.4, now)  # between the marks: nothing moves
    assert len(ladder.rungs) == 4
    for now in range(200, 300, 5):
        ladder.observe(0.1 if now % 15 else 0.4, now)  # relief with breaks
    assert len(ladder.rungs) == 4
    for now in range(300, 400, 5):
        ladder.observe(0.1, now)
    assert not ladder.rungs
    assert (ladder.taken, ladder.released) == (4, 4)


def test_a_short_burst_takes_no_rung_and_off_is_off() -> None:
    ladder, off = Ladder(LADDER), Ladder(LadderConfig())
    for now in range(0, 1000, 9):
        ladder.observe(1.0 if now % 2 else 0.3, now)
        off.observe(1.0, now * 1_000_000_000)
    assert ladder.rungs == off.rungs == ()


def test_several_answers_come_in_together_or_not_at_all_and_pay_the_prompt_once() -> None:
    quotas = {"tenant": TenantQuota(concurrency=5, requests_per_minute=6, tokens_per_minute=100)}
    made = world(LaneSpec(16, 64, 64, 8, 512), quotas=quotas)
    others = (Sibling("b"), Sibling("c"))
    accepted = made.core.submit(ask("a", 20, 10, others=others), made.now)  # 20 + 3 * 10 tokens
    assert (accepted.answers, made.core.load().waiting) == (3, 3)
    for refused in (
        ask("d", 20, 1, others=(Sibling("e"), Sibling("f"))),  # 6 at once
        ask("d", 20, 20, others=(Sibling("e"),)),  # 60 tokens, 50 are left
        ask("d", 20, 1, others=(Sibling("e"), Sibling("d"))),
        ask("d", 20, 1, others=(Sibling("a"),)),
    ):
        with pytest.raises(SubmitError):
            made.core.submit(refused, made.now)
        assert [view.key for view in made.core.sequences()] == ["a", "b", "c"]
        made.core.check()
    assert made.core.submit(ask("d", 20, 15, others=(Sibling("e"),)), made.now).answers == 2
    for key in "abcde":
        made.core.cancel(key, made.now)
    made.core.check()


def test_each_rung_takes_from_low_classes_alone_and_is_told() -> None:
    made = world(LaneSpec(16, 64, 40, 1, 512), ladder=LADDER, max_queued_requests=4)
    made.submit(ask("busy", 4, 100))
    made.plan("lane")
    made.apply("lane")
    for key in ("w1", "w2"):
        made.submit(ask(key, 4, 1))
    told: list[tuple[tuple[Rung, ...], int | None]] = []
    for number in range(5):
        low = ask(f"low{number}", 20, 50, priority=-1, others=(Sibling(f"low{number}b"),))
        try:
            accepted = made.core.submit(low, made.now)
            told.append((accepted.degraded, accepted.max_tokens))
            assert accepted.answers == (1 if Rung.SINGLE_ANSWER in accepted.degraded else 2)
            for key in (f"low{number}", f"low{number}b"):
                made.core.cancel(key, made.now)
        except Degraded:
            told.append(((Rung.ADMISSION,), None))
        made.now += 10
        made.core.expire(made.now)
    first, second, third = Rung.PREFILL_SHARE, Rung.SINGLE_ANSWER, Rung.MAX_TOKENS
    assert told == [
        ((), 50),
        ((first,), 50),
        ((first, second), 50),
        ((first, second, third), 3),
        ((Rung.ADMISSION,), None),
    ]
    high = made.core.submit(ask("high", 20, 50, others=(Sibling("high b"),)), made.now)
    assert (high.degraded, high.answers) == ((), 2)
    assert made.core.rungs(0) == ()
    assert made.core.rungs(-1) == made.core.load().rungs == tuple(Rung)
    assert made.core.totals().rungs_taken == 4


def test_throttled_prompts_share_a_part_of_the_step() -> None:
    made = world(LaneSpec(16, 400, 100, 8, 2048), ladder=LADDER, max_queued_requests=2, prefill_chunk=100)
    for key in ("low1", "low2"):
        made.submit(ask(key, 500, 5, priority=-1))
    for _ in range(3):
        made.now += 10
        made.expire()
    assert Rung.PREFILL_SHARE in made.core.rungs(-1)
    assert sum(counts(made.plan("lane")).values()) <= 25
    made.apply("lane")
    for key in ("low1", "low2"):
        made.cancel(key)
    made.drain()


def test_expected_output_is_the_ninetieth_percentile_of_the_last_answers() -> None:
    history = OutputHistory()
    for length in range(1, ENOUGH):
        history.observe("a", length)
    assert history.expected("a") is None
    history.observe("a", ENOUGH)
    assert history.expected("a") == 15  # 15 of 16 were no longer; 14 would be fewer than nine of ten
    for _ in range(1000):
        history.observe("a", 7)
    assert history.expected("a") == 7
    assert history.expected("b") is None


@pytest.mark.parametrize(("learn", "together"), [(True, 4), (False, 1)])
def test_what_a_tenants_answers_used_to_be_lets_more_run_together(learn: bool, together: int) -> None:
    made = world(LaneSpec(4, 40, 64, 4, 161), learn_output=learn)
    for number in range(20):
        made.submit(ask(f"past{number}", 4, 4))
    made.drain()
    for number in range(4):
        made.submit(ask(f"now{number}", 4, None))
    assert len(counts(made.plan("lane"))) == together
    made.apply("lane")
    made.drain()


def test_step_costs_are_a_line_through_what_steps_took() -> None:
    fitted = StepFit()
    assert fitted.estimate() is None
    for tokens in (1, 10, 100, 50, 200):
        fitted.observe(tokens, 1000 + 7 * tokens)
    assert fitted.estimate(5) == CostEstimate(1000, 7, 5)
    same = StepFit()
    for _ in range(5):
        same.observe(8, 500)
    assert same.estimate() == CostEstimate(500, 0)


def test_the_time_between_ends_is_measured_over_a_full_window_only() -> None:
    rate = DrainRate(window=4)
    for now in (10, 20, 30):
        rate.observe(now)
    assert rate.request_ns(30) == 0
    rate.observe(50)
    assert rate.request_ns(50) == 10


def test_ranks_stay_in_order_over_many_runs() -> None:
    ranked = Ranked()
    numbers = [number * 7919 % 5003 for number in range(5003)]
    for number in numbers:
        ranked.add((number,), Sequence(ask(f"s{number}", 3), number, 0, 0, None), 3)
    ranked.check()
    assert [sequence.arrival for sequence in ranked] == list(range(5003))
    assert ranked.ahead((1234,)) == (1234, 3 * 1234)
    assert len(ranked._runs) <= 2 * 5003 // RUN
    for number in numbers[::2]:
        ranked.remove((number,), 3)
    ranked.check()
    left = sorted(numbers[1::2])
    entry, walked = ranked.after(None), []
    while entry is not None:
        walked.append(entry[0][0])
        entry = ranked.after(entry[0])
    assert walked == left
