"""Failures that users of other servers met, each as a test by its name in the field."""

import pytest
from scheduler_model import World, ask

from services.scheduler.core.calls import (
    CoreConfig,
    DoesNotFit,
    DuplicateKey,
    LaneSpec,
    Limits,
    Phase,
    Plan,
    QueueFull,
    Reason,
    TimeLimit,
)
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.policies.queue import Walk
from services.scheduler.core.sequence import Sequence

ROOMY = LaneSpec(block_size=16, total_blocks=64, max_batched_tokens=256, max_sequences=8, max_model_len=4096)


def world(spec: LaneSpec, **config: object) -> World:
    made = World(CoreConfig(**config))  # type: ignore[arg-type]
    made.attach("lane", spec)
    return made


def keys(plan: Plan | None) -> list[str]:
    return [] if plan is None else [piece.key for piece in plan.slices]


def reason(made: World, key: str) -> Reason:
    finished = made.users[key].finished
    assert finished is not None
    return finished.reason


def test_s01_a_request_that_can_never_fit_is_refused_with_both_numbers_and_blocks_nobody() -> None:
    made = world(ROOMY)
    with pytest.raises(DoesNotFit, match="needs 126 blocks of 16 tokens; the pool has 64") as refusal:
        made.submit(ask("impossible", 2000, 2))
    assert refusal.value.field == "prompt_len"
    with pytest.raises(DoesNotFit, match="needs 65 blocks of 16 tokens; the pool has 64") as refusal:
        made.submit(ask("too much output", 24, 1002))
    assert refusal.value.field == "max_tokens"
    made.submit(ask("just fits", 24, 1001))  # the last token drawn is never computed
    made.submit(ask("small", 20, 5))
    made.drain()
    assert reason(made, "small") is Reason.LENGTH


@pytest.mark.parametrize("depth", [1, 2])
def test_s02_the_sole_running_sequence_ends_with_the_pool_and_is_never_its_own_victim(depth: int) -> None:
    made = world(LaneSpec(4, 3, 16, 4, 4096), steps_in_flight=depth)
    made.submit(ask("sole", 5, None))
    made.drain(steps=20)
    finished = made.users["sole"].finished
    assert finished is not None
    assert (finished.reason, finished.usage.delivered, finished.usage.preemptions) == (Reason.LENGTH, 8, 0)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cap", [0, 1, 3])
def test_s03_thirty_sequences_in_a_pool_for_one_and_a_half_make_steady_progress(depth: int, cap: int) -> None:
    made = world(
        LaneSpec(2, 15, 32, 8, 21),
        steps_in_flight=depth,
        preemption_cap=cap,
        default_output_estimate=1,
        watermark=0.0,
        prefill_chunk=8,
    )
    for number in range(30):
        made.submit(ask(f"s{number}", 4, None))
    progress, still = 0, 0
    while made.live():
        while made.plan("lane") is not None:
            made.core.check()
        made.apply("lane")
        given = sum(user.given for user in made.users.values())
        still = 0 if given > progress else still + 1
        progress = given
        assert still <= 2 * depth, "steps pass and nobody gets a token"
    made.drain()
    assert made.core.totals().preemptions > 0
    if cap:
        assert max(user.preempted for user in made.users.values()) <= cap
    assert [user.given for user in made.users.values()] == [17] * 30


def test_s03_the_peak_estimate_admits_no_more_than_lasts_when_lengths_are_known() -> None:
    made = world(LaneSpec(2, 15, 32, 8, 20), watermark=0.0)
    for number in range(8):
        made.submit(ask(f"s{number}", 4, 12))
    made.drain()
    assert made.core.totals().preemptions == 0


def test_s03_past_the_cap_nobody_takes_the_reserved_blocks_not_even_the_oldest() -> None:
    made = world(
        LaneSpec(1, 11, 16, 4, 13),
        steps_in_flight=1,
        preemption_cap=1,
        preemption_cooldown=0,
        default_output_estimate=1,
        watermark=0.0,
    )
    made.submit(ask("first", 4, 3))
    made.submit(ask("old", 1, None))
    made.submit(ask("young", 2, 5))
    planned: list[list[str]] = []
    while (plan := made.plan("lane")) is not None:
        planned.append(keys(plan))
        made.apply("lane")
    assert made.users["young"].preempted == 1
    # Side by side again, until old wants a block and just waits for young's end.
    assert planned[2:6] == [["first", "old"], ["old", "young"], ["old", "young"], ["young"]]
    made.drain()


def test_s05_after_preemption_all_that_was_known_is_computed_again_and_the_boundary_stays() -> None:
    made = world(LaneSpec(1, 9, 16, 4, 10), steps_in_flight=1, default_output_estimate=1, watermark=0.0)
    made.submit(ask("first", 3, None))
    made.submit(ask("second", 3, None))
    given_at_preemption = resumed = None
    while (plan := made.plan("lane")) is not None:
        if plan.preempted:
            given_at_preemption = made.users["second"].given
            assert plan.preempted[0].recompute_tokens == 3 + given_at_preemption - 1
        for piece in plan.slices:
            if piece.key == "second" and piece.admitted and given_at_preemption is not None:
                resumed = piece
        made.apply("lane")
    assert given_at_preemption is not None
    assert resumed is not None
    # One stretch over prompt and output: the draw that follows is for the position that was next anyway.
    assert (resumed.start, resumed.count, resumed.samples) == (0, 3 + given_at_preemption, True)
    finished = made.users["second"].finished
    assert finished is not None
    assert (finished.usage.prompt_tokens, finished.usage.delivered) == (3, 7)
    made.drain()


def test_s07_a_victim_with_a_draw_in_flight_gets_that_token_once_and_never_ends_without_blocks() -> None:
    made = world(LaneSpec(1, 8, 16, 4, 9), default_output_estimate=1, watermark=0.0)
    made.submit(ask("old", 3, None))
    made.submit(ask("young", 3, None))
    assert keys(made.plan("lane")) == ["old", "young"]
    assert keys(made.plan("lane")) == ["old", "young"]  # 8 blocks: none is left
    made.apply("lane")
    benched = made.plan("lane")
    assert benched is None  # young's blocks are wanted and in flight: it is not preempted yet
    view = made.core.sequences()[1]
    assert (view.phase, view.blocks, view.preemptions) == (Phase.DECODE, 4, 0)
    made.apply("lane")
    assert made.users["young"].given == 2
    preempting = made.plan("lane")
    assert preempting is not None
    assert [one.key for one in preempting.preempted] == ["young"]
    made.drain()
    assert made.users["young"].given == 6


def test_s07_a_benched_sequence_whose_last_token_was_in_flight_just_ends() -> None:
    made = world(LaneSpec(1, 8, 16, 4, 9), default_output_estimate=1, watermark=0.0)
    made.submit(ask("old", 3, None))
    made.submit(ask("young", 3, None))
    made.plan("lane")
    made.plan("lane")
    made.apply("lane")
    assert made.plan("lane") is None
    made.apply("lane", ended=1)
    assert reason(made, "young") is Reason.STOP
    assert keys(made.plan("lane")) == ["old"]
    made.drain()
    assert made.core.totals().preemptions == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_block_freed_inside_a_step_in_flight_is_not_given_away_before_its_results(depth: int) -> None:
    made = world(LaneSpec(4, 4, 16, 4, 64), steps_in_flight=depth)
    made.submit(ask("holder", 13, 2))
    assert keys(made.plan("lane")) == ["holder"]
    made.submit(ask("next", 13, 2))
    made.cancel("holder")
    assert made.core.load().lanes["lane"].blocks_fenced == 4
    assert made.plan("lane") is None  # four blocks are wanted, and the step in flight still writes all four
    made.apply("lane")
    assert keys(made.plan("lane")) == ["next"]
    made.drain()


def test_a_slot_freed_inside_a_step_in_flight_may_be_taken_over_at_once() -> None:
    made = world(LaneSpec(4, 8, 16, 1, 64))
    made.submit(ask("holder", 3, 9))
    made.plan("lane")
    made.cancel("holder")
    made.submit(ask("next", 3, 2))
    plan = made.plan("lane")
    assert plan is not None
    assert [(piece.key, piece.slot, piece.admitted) for piece in plan.slices] == [("next", 0, True)]
    made.apply("lane")  # the old owner's token: nobody gets it
    assert made.users["next"].given == 0
    made.drain()


def test_an_abort_inside_a_step_in_flight_discards_the_draw_and_counts_it() -> None:
    made = world(ROOMY)
    made.submit(ask("a", 3, 9))
    made.plan("lane")
    made.plan("lane")
    made.cancel("a")
    finished = made.users["a"].finished
    assert finished is not None
    assert (finished.usage.delivered, finished.usage.discarded) == (0, 2)
    made.drain()


def test_s10_saturated_decode_leaves_every_prompt_its_share() -> None:
    made = world(LaneSpec(4, 64, 8, 8, 64), prefill_chunk=4, steps_in_flight=1)
    for number in range(40):
        made.submit(ask(f"s{number}", 1 + 7 * (number % 2), 9))
    waits: dict[str, int] = {}
    while made.live():
        planned = keys(made.plan("lane"))
        for view in made.core.sequences():
            if view.lane is not None:
                waits[view.key] = 0 if view.key in planned else waits.get(view.key, 0) + 1
                assert waits[view.key] <= 1, f"{view.key} runs and gets nothing"
        made.apply("lane")
    made.drain()


def test_s10_an_endless_stream_of_long_prompts_delays_no_decode_and_no_newcomer() -> None:
    made = world(LaneSpec(16, 2000, 64, 8, 8192), prefill_chunk=32, steps_in_flight=1)
    made.submit(ask("decode", 1, 40))
    made.plan("lane")
    made.apply("lane")
    for number in range(5):
        made.submit(ask(f"long{number}", 4000, 2))
    for step in range(20):
        if step == 10:
            made.submit(ask("newcomer", 4, 2))
        plan = made.plan("lane")
        assert plan is not None
        assert "decode" in keys(plan), "a prompt delays a decode"
        assert all(piece.count <= 32 for piece in plan.slices)
        if step == 10:
            assert "newcomer" in keys(plan), "running prompts take the whole budget from one that waits"
        made.apply("lane")
    assert made.users["newcomer"].finished is not None
    for user in made.live():
        made.cancel(user.submission.key)
    made.drain()


def test_s12_equal_priorities_never_preempt_each_other_for_a_slot_or_by_turns() -> None:
    made = world(LaneSpec(1, 64, 16, 2, 16))
    for number in range(6):
        made.submit(ask(f"s{number}", 2, 10))
    made.drain()
    assert made.core.totals().preemptions == 0


def test_s13_the_queue_is_bounded_in_requests_and_in_tokens() -> None:
    made = world(ROOMY, max_queued_requests=3, max_queued_tokens=100)
    made.submit(ask("a", 40, 2))
    made.submit(ask("b", 40, 2))
    with pytest.raises(QueueFull, match="80 tokens wait and 21 would come; the limit is 100") as refusal:
        made.submit(ask("c", 21, 2))
    assert refusal.value.field == "queued_tokens"
    made.submit(ask("d", 20, 2))
    with pytest.raises(QueueFull, match="3 requests wait; the limit is 3"):
        made.submit(ask("e", 1, 2))
    with pytest.raises(DoesNotFit, match="101 tokens are more than the queue's 100"):
        made.submit(ask("f", 101, 2))
    made.plan("lane")  # they run now: the queue has room again
    made.submit(ask("e", 1, 2))
    made.drain()


def test_s15_a_live_key_is_refused_and_a_finished_one_may_be_used_again_at_once() -> None:
    made = world(ROOMY)
    made.submit(ask("a", 5, 4))
    with pytest.raises(DuplicateKey, match="a live sequence has the key a"):
        made.submit(ask("a", 6, 4))
    made.plan("lane")
    with pytest.raises(DuplicateKey):
        made.submit(ask("a", 6, 4))
    made.cancel("a")
    made.submit(ask("a", 6, 4))
    made.plan("lane")
    made.apply("lane")  # the first owner's results do not reach the second
    assert made.users["a"].given == 0
    made.drain()
    assert made.users["a"].given == 4


def test_c04_what_is_cancelled_while_queued_costs_no_prefill() -> None:
    made = world(LaneSpec(16, 1000, 256, 1, 16_000))
    made.submit(ask("busy", 4, 30))
    made.plan("lane")
    for number in range(50):
        made.submit(ask(f"dead{number}", 8000, 5))
    made.submit(ask("live", 10, 1))
    before = made.core.totals().planned_tokens
    for number in range(50):
        made.cancel(f"dead{number}")
    made.cancel("busy")
    plan = made.plan("lane")
    assert keys(plan) == ["live"]
    assert made.core.totals().planned_tokens == before + 10
    made.drain()


def test_c05_a_deadline_eaten_by_the_queue_is_no_success_and_costs_no_prefill() -> None:
    made = world(LaneSpec(16, 100, 256, 1, 1000))
    made.submit(ask("busy", 4, 500))
    made.plan("lane")
    made.submit(ask("late", 100, 5, limits=Limits(total_ns=2_000)))
    made.now = 2_000
    before = made.core.totals().planned_tokens
    # Also where the shell forgets to call `expire`, nothing of it is computed.
    made.core.cancel("busy", made.now)
    assert made.core.plan("lane", made.now) is None
    assert made.core.totals().planned_tokens == before
    [finished] = made.core.expire(made.now)
    assert (finished.key, finished.reason, finished.limit, finished.phase) == (  # type: ignore[union-attr]
        "late",
        Reason.DEADLINE,
        TimeLimit.TOTAL,
        Phase.QUEUE,
    )


def test_c05_a_deadline_in_the_middle_of_decode_has_its_own_reason() -> None:
    made = world(ROOMY)
    made.submit(ask("a", 4, 500, limits=Limits(total_ns=100)))
    for _ in range(3):
        made.plan("lane")
        made.apply("lane")
    made.plan("lane")
    made.now = 100
    made.expire()
    finished = made.users["a"].finished
    assert finished is not None
    assert (finished.reason, finished.limit) == (Reason.TIME_LIMIT, TimeLimit.TOTAL)
    assert (finished.usage.delivered, finished.usage.discarded) == (3, 1)
    made.drain()


def test_c07_ten_thousand_that_expire_in_the_queue_leave_nothing() -> None:
    core = SchedulerCore(CoreConfig(max_queued_requests=20_000, max_queued_tokens=10_000_000))
    core.attach("lane", ROOMY, 0)
    for number in range(10_000):
        core.submit(ask(f"s{number}", 10, 10, limits=Limits(queue_ns=100 + number % 7, total_ns=10_000)), 0)
    core.check()
    assert len(core.expire(110)) == 10_000
    core.check()
    assert core.sequences() == ()
    assert (core.load().waiting, core.load().waiting_tokens, core.next_deadline()) == (0, 0, None)
    queue = core._waiting
    for container in (core._sequences, core._deadlines, queue._places, queue._flows, queue._tenants):
        assert len(container) == 0
    for heap in (core._deadlines._heap, queue._aging):
        assert len(heap._entries) <= 16


def test_a_long_queue_costs_a_step_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning looks at the head of the queue only, however many wait behind it."""
    core = SchedulerCore(CoreConfig(max_queued_requests=20_000, steps_in_flight=1, max_passes=0))
    core.attach("lane", LaneSpec(16, 4, 64, 8, 64), 0)
    for number in range(10_000):
        core.submit(ask(f"s{number}", 30, 30), 0)
    looked_at: list[str] = []
    following = Walk.next

    def counted(walk: Walk) -> Sequence | None:
        sequence = following(walk)
        looked_at.append("" if sequence is None else sequence.key)
        return sequence

    monkeypatch.setattr(Walk, "next", counted)
    plan = core.plan("lane", 0)
    assert keys(plan) == ["s0"]
    assert looked_at == ["s0", "s1"]
