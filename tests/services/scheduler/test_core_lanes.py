"""Lanes by example: lost and found, short of blocks, shared by many."""

import pytest
from scheduler_model import SPEC, answer, ask

from services.scheduler.core.admission import peak_blocks
from services.scheduler.core.calls import (
    Accepted,
    Admitted,
    CoreConfig,
    Displaced,
    Emission,
    Finished,
    LaneSpec,
    Phase,
    Plan,
    PlannedSlice,
    Preempted,
    Reason,
    SequenceView,
    Tokens,
    Usage,
)
from services.scheduler.core.core import SchedulerCore


def test_a_lost_lane_gives_its_sequences_back_in_order_of_arrival(core: SchedulerCore) -> None:
    for key in ("a", "b"):
        core.submit(ask(key, 3), 0)
    first = core.plan("lane", 0)
    core.apply("lane", answer(first), 1)
    in_flight = core.plan("lane", 2)
    core.submit(ask("c", 3), 3)
    assert core.lose("lane", 4) == [Displaced("a", 4), Displaced("b", 4)]
    assert core.lose("lane", 4) == []
    assert core.apply("lane", answer(in_flight), 5) == []
    assert core.plan("lane", 5) is None
    assert core.attach("next", SPEC, 6) == []
    assert core.plan("next", 7) == Plan(
        1,
        (  # a and b know one token more than their prompts
            PlannedSlice("a", 0, 0, 4, (0,), samples=True, admitted=True),
            PlannedSlice("b", 1, 0, 4, (1,), samples=True, admitted=True),
            PlannedSlice("c", 2, 0, 3, (2,), samples=True, admitted=True),
        ),
        admitted=(Admitted("a", "next", 3), Admitted("b", "next", 3), Admitted("c", "next", 4)),
    )


def test_preemption_takes_the_youngest_of_the_lowest_class_once_its_results_are_in(cores: list[SchedulerCore]) -> None:
    core = SchedulerCore(CoreConfig(default_output_estimate=1, watermark=0.0))
    cores.append(core)
    core.attach("lane", LaneSpec(1, 9, 16, 4, 10), 0)
    core.submit(ask("low", 2, None, priority=-1), 0)
    core.submit(ask("old", 2, None), 0)
    core.submit(ask("young", 2, None), 0)
    one, two = core.plan("lane", 0), core.plan("lane", 0)
    assert two is not None
    assert [piece.key for piece in two.slices] == ["old", "young", "low"]  # all 9 blocks are taken now
    assert core.apply("lane", answer(one), 1) == [Tokens("low", 1), Tokens("old", 1), Tokens("young", 1)]
    # old needs a block; low, in step 2, is benched and its blocks will do for young too.
    assert core.plan("lane", 1) is None
    assert core.apply("lane", answer(two), 2) == [Tokens("old", 1), Tokens("young", 1), Tokens("low", 1)]
    assert core.plan("lane", 3) == Plan(
        3,
        (
            PlannedSlice("old", 1, 3, 1, (0,), samples=True, admitted=False),
            PlannedSlice("young", 2, 3, 1, (1,), samples=True, admitted=False),
        ),
        preempted=(Preempted("low", 3),),
    )
    assert core.sequences()[0] == SequenceView("low", "tenant", -1, Phase.QUEUE, None, 0, 2, 2, 0, 0, 1)


@pytest.mark.parametrize(("watermark", "together"), [(0.0, 2), (0.25, 1)])
def test_the_watermark_stays_free_at_admission(cores: list[SchedulerCore], watermark: float, together: int) -> None:
    core = SchedulerCore(CoreConfig(watermark=watermark))
    cores.append(core)
    core.attach("lane", LaneSpec(1, 20, 64, 4, 20), 0)
    for key in ("a", "b"):
        core.submit(ask(key, 5, 5), 0)  # 9 blocks each in the end, of 20
    plan = core.plan("lane", 0)
    assert plan is not None
    assert len(plan.admitted) == together


def test_one_victim_is_benched_where_its_blocks_will_do(cores: list[SchedulerCore]) -> None:
    core = SchedulerCore(CoreConfig(default_output_estimate=1, watermark=0.0))
    cores.append(core)
    core.attach("lane", LaneSpec(4, 3, 16, 4, 12), 0)
    for key, prompt_len in (("needy", 4), ("content", 2), ("young", 3)):
        core.submit(ask(key, prompt_len, None), 0)
    first, second = core.plan("lane", 0), core.plan("lane", 0)
    assert first is not None
    assert second is not None
    assert [piece.key for piece in first.slices] == ["needy", "content", "young"]
    assert [piece.key for piece in second.slices] == ["content"]


def test_each_coming_block_is_promised_once(cores: list[SchedulerCore]) -> None:
    core = SchedulerCore(CoreConfig(default_output_estimate=1, watermark=0.0))
    cores.append(core)
    core.attach("lane", LaneSpec(4, 4, 16, 4, 12), 0)
    for key, prompt_len in (("needy", 4), ("needy too", 4), ("young", 1), ("youngest", 1)):
        core.submit(ask(key, prompt_len, None), 0)
    first = core.plan("lane", 0)
    assert first is not None
    assert len(first.slices) == 4
    assert core.plan("lane", 0) is None  # two blocks are wanted: both young ones are benched
    core.apply("lane", answer(first), 1)
    second = core.plan("lane", 1)
    assert second is not None
    assert second.preempted == (Preempted("youngest", 1), Preempted("young", 1))


def test_a_busy_lane_that_preempted_admits_nobody_for_some_steps(cores: list[SchedulerCore]) -> None:
    core = SchedulerCore(CoreConfig(default_output_estimate=1, watermark=0.0, steps_in_flight=1, preemption_cooldown=3))
    cores.append(core)
    core.attach("lane", LaneSpec(1, 20, 32, 4, 21), 0)
    core.submit(ask("old", 9, None), 0)
    core.submit(ask("young", 9, None), 0)
    preempted_at = 0
    while not preempted_at:
        plan = core.plan("lane", 0)
        assert plan is not None
        preempted_at = plan.step_id if plan.preempted else 0
        core.apply("lane", answer(plan), 0)
    core.cancel("young", 0)
    core.submit(ask("tiny", 1, 2), 0)
    admitted_at = 0
    while not admitted_at:
        plan = core.plan("lane", 0)
        assert plan is not None
        admitted_at = plan.step_id if plan.admitted else 0
        core.apply("lane", answer(plan), 0)
    assert admitted_at == preempted_at + 4


def test_tokens_held_back_for_one_that_cannot_come_go_to_those_that_run(cores: list[SchedulerCore]) -> None:
    core = SchedulerCore(CoreConfig(prefill_chunk=8, steps_in_flight=1))
    cores.append(core)
    core.attach("lane", LaneSpec(4, 16, 8, 4, 64), 0)
    core.submit(ask("running", 40, 4), 0)
    core.submit(ask("waiting", 40, 4), 0)
    for start in (0, 8, 16):
        plan = core.plan("lane", 0)
        assert plan is not None
        assert [(piece.key, piece.start, piece.count) for piece in plan.slices] == [("running", start, 8)]
        core.apply("lane", answer(plan), 0)


def test_past_the_cap_the_whole_need_is_reserved(cores: list[SchedulerCore]) -> None:
    core = SchedulerCore(CoreConfig(default_output_estimate=1, watermark=0.0, preemption_cap=1, steps_in_flight=1))
    cores.append(core)
    core.attach("lane", LaneSpec(1, 6, 16, 4, 7), 0)
    core.submit(ask("a", 2, 4), 0)
    core.submit(ask("b", 2, None), 0)
    plans: list[Plan] = []
    emissions: list[Emission] = []
    while (plan := core.plan("lane", 0)) is not None:
        plans.append(plan)
        emissions += core.apply("lane", answer(plan), 0)
        core.check()
    again = [piece for plan in plans for piece in plan.slices if piece.key == "b" and piece.admitted][1]
    assert len(again.new_block_ids) == 6  # positions up to the context, less the last token that is never computed
    assert again.count < 6
    assert [emission for emission in emissions if isinstance(emission, Finished)] == [
        Finished("a", Reason.LENGTH, Usage(2, 4, 0, prefill_chunks=1), Phase.DECODE),
        Finished(
            "b",
            Reason.LENGTH,
            Usage(2, 5, 0, preemptions=1, recomputed_tokens=3, prefill_chunks=2),
            Phase.DECODE,
        ),
    ]


def test_without_a_lane_requests_wait_and_fit_is_looked_at_when_one_comes(cores: list[SchedulerCore]) -> None:
    core = SchedulerCore(CoreConfig())
    cores.append(core)
    assert core.submit(ask("small", 4, None), 0) == Accepted(0, None)
    assert core.submit(ask("big", 100, 5), 0) == Accepted(1, None)
    assert core.attach("lane", SPEC, 1) == [
        Finished(
            "big",
            Reason.DOES_NOT_FIT,
            Usage(100, 0, 0),
            Phase.QUEUE,
            detail="100 tokens leave no room for output in the context of 64",
        )
    ]
    plan = core.plan("lane", 1)
    assert plan is not None
    assert [piece.key for piece in plan.slices] == ["small"]


def test_when_the_roomy_lane_goes_what_only_it_could_hold_ends(core: SchedulerCore) -> None:
    core.attach("small", LaneSpec(4, 4, 32, 4, 64), 0)
    core.submit(ask("big", 30, 10), 0)
    core.submit(ask("little", 3, 10), 0)
    plan = core.plan("small", 0)
    assert plan is not None
    assert [piece.key for piece in plan.slices] == ["little"]  # big waits for the lane that holds it
    assert core.lose("lane", 1) == [
        Finished(
            "big",
            Reason.DOES_NOT_FIT,
            Usage(30, 0, 0),
            Phase.QUEUE,
            detail="prompt of 30 tokens with max_tokens 10 needs 10 blocks of 4 tokens; the pool has 4",
        )
    ]


def test_a_limit_only_shrinks_when_lanes_change(core: SchedulerCore) -> None:
    core.submit(ask("a", 30, 4), 0)
    core.submit(ask("b", 5, 20), 0)
    for _ in range(4):
        core.apply("lane", answer(core.plan("lane", 0)), 0)
    assert [view.delivered for view in core.sequences()] == [1, 4]
    core.lose("lane", 1)
    assert core.attach("shorter", LaneSpec(4, 16, 32, 4, 9), 2) == [
        Finished(
            "a",
            Reason.DOES_NOT_FIT,
            Usage(30, delivered=1, discarded=0, recomputed_tokens=30, prefill_chunks=4),
            Phase.QUEUE,
            detail="30 tokens leave no room for output in the context of 9",
        ),
        # The new context is full with what it has.
        Finished(
            "b",
            Reason.LENGTH,
            Usage(5, delivered=4, discarded=0, recomputed_tokens=8, prefill_chunks=1),
            Phase.QUEUE,
        ),
    ]
    assert core.submit(ask("c", 5, None), 3) == Accepted(0, 4)
    core.lose("shorter", 4)
    core.attach("longer", SPEC, 5)
    emissions: list[Emission] = []
    while (plan := core.plan("longer", 6)) is not None:
        emissions += core.apply("longer", answer(plan), 6)
    assert emissions[-1] == Finished("c", Reason.LENGTH, Usage(5, 4, 0, prefill_chunks=1), Phase.DECODE)


def test_a_lane_is_attached_once(core: SchedulerCore) -> None:
    with pytest.raises(ValueError, match="attached already"):
        core.attach("lane", SPEC, 1)


def test_the_peak_estimate_is_that_of_sequences_ending_in_turn() -> None:
    assert peak_blocks([]) == 0
    assert peak_blocks([(0, 5)]) == 5
    # left 10 at 3 held, left 2 at 4 held: after 2 rounds both are there, 7 + 2 * 2; later only the first, 3 + 10.
    assert peak_blocks([(2, 4), (10, 3)]) == 13
    assert peak_blocks([(2, 9), (10, 3)]) == 16
