"""The core by example: verbs in, whole frozen values out."""

import pytest
from scheduler_model import SPEC, answer, ask

from services.scheduler.core.calls import (
    Accepted,
    Admitted,
    CoreConfig,
    DoesNotFit,
    Emission,
    Finished,
    InvalidSubmission,
    InvariantError,
    LaneLoad,
    Limits,
    Load,
    OutOfStep,
    Phase,
    Plan,
    PlannedSlice,
    Reason,
    SequenceOutcome,
    StepOutcome,
    Submission,
    TimeLimit,
    Tokens,
    Usage,
)
from services.scheduler.core.core import SchedulerCore


def test_one_sequence_from_submission_to_length(core: SchedulerCore) -> None:
    assert core.submit(ask("a", 5, 3), 10) == Accepted(position=0, max_tokens=3)
    first = core.plan("lane", 20)
    assert first == Plan(
        1,
        (PlannedSlice("a", 0, start=0, count=5, new_block_ids=(0, 1), samples=True, admitted=True),),
        admitted=(Admitted("a", "lane", waited_ns=10),),
    )
    # The second step is planned on the token that the first still draws; it feeds that token itself.
    second = core.plan("lane", 21)
    assert second == Plan(2, (PlannedSlice("a", 0, 5, 1, (), samples=True, admitted=False),))
    assert core.plan("lane", 22) is None  # two in flight
    assert core.apply("lane", answer(first), 30) == [Tokens("a", 1)]
    third = core.plan("lane", 31)
    assert third == Plan(3, (PlannedSlice("a", 0, 6, 1, (), samples=True, admitted=False),))
    assert core.apply("lane", answer(second), 40) == [Tokens("a", 1)]
    assert core.plan("lane", 41) is None  # the last draw is in flight: nothing overshoots max_tokens
    assert core.apply("lane", answer(third), 50) == [
        Tokens("a", 1),
        Finished("a", Reason.LENGTH, Usage(5, delivered=3, discarded=0, prefill_chunks=1), Phase.DECODE),
    ]
    assert core.load() == Load(0, 0, {"lane": LaneLoad(0, 0, 16, 0, 0, 16)})


def test_a_prompt_is_computed_in_chunks_and_samples_only_at_its_end(core: SchedulerCore) -> None:
    core.submit(ask("long", 20), 0)
    core.submit(ask("short", 3), 0)
    assert core.plan("lane", 0) == Plan(
        1,
        (
            PlannedSlice("long", 0, 0, 8, (0, 1), samples=False, admitted=True),
            PlannedSlice("short", 1, 0, 3, (2,), samples=True, admitted=True),
        ),
        admitted=(Admitted("long", "lane", 0), Admitted("short", "lane", 0)),
    )
    second = core.plan("lane", 0)
    assert second is not None
    assert second.slices == (
        PlannedSlice("long", 0, 8, 8, (3, 4), samples=False, admitted=False),
        PlannedSlice("short", 1, 3, 1, (), samples=True, admitted=False),
    )


def test_alone_a_prompt_takes_the_whole_budget(core: SchedulerCore) -> None:
    core.submit(ask("a", 50, 4), 0)
    first, second = core.plan("lane", 0), core.plan("lane", 0)
    assert first is not None
    assert second is not None
    assert [(piece.start, piece.count, piece.samples) for piece in (*first.slices, *second.slices)] == [
        (0, 32, False),
        (32, 18, True),
    ]


def test_a_stop_id_ends_it_and_the_token_in_flight_is_discarded(core: SchedulerCore) -> None:
    core.submit(ask("a", 2), 0)
    first, second = core.plan("lane", 0), core.plan("lane", 0)
    assert core.apply("lane", answer(first, ended="a"), 5) == [
        Tokens("a", 1),
        Finished("a", Reason.STOP, Usage(2, delivered=1, discarded=1, prefill_chunks=1), Phase.DECODE),
    ]
    assert core.load().lanes["lane"].blocks_fenced == 1
    assert core.apply("lane", answer(second), 6) == []
    assert core.load().lanes["lane"].blocks_free == 16
    totals = core.totals()
    assert (totals.sampled, totals.delivered, totals.discarded) == (2, 1, 1)


def test_a_stop_string_ends_it_with_the_kept_tokens(core: SchedulerCore) -> None:
    core.submit(ask("a", 2), 0)
    for _ in range(3):
        core.apply("lane", answer(core.plan("lane", 0)), 0)
    in_flight = core.plan("lane", 0)
    with pytest.raises(InvalidSubmission, match="kept_tokens is 4; 3 tokens of a were delivered"):
        core.stop("a", 4, 1)
    assert core.stop("a", 2, 1) == [
        Finished("a", Reason.STOP, Usage(2, delivered=2, discarded=2, prefill_chunks=1), Phase.DECODE)
    ]
    assert core.stop("a", 2, 1) == []
    assert core.apply("lane", answer(in_flight), 2) == []


def test_a_failed_row_ends_that_sequence_alone(core: SchedulerCore) -> None:
    core.submit(ask("a", 2), 0)
    core.submit(ask("b", 2), 0)
    assert core.apply("lane", answer(core.plan("lane", 0), failed="a"), 1) == [
        Finished("a", Reason.ERROR, Usage(2, delivered=0, discarded=0, prefill_chunks=1), Phase.DECODE),
        Tokens("b", 1),
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_cancel_in_every_phase(depth: int, cores: list[SchedulerCore]) -> None:
    core = SchedulerCore(CoreConfig(steps_in_flight=depth, prefill_chunk=4))
    cores.append(core)
    core.attach("lane", SPEC, 0)
    core.submit(ask("decoding", 2), 0)
    core.apply("lane", answer(core.plan("lane", 0)), 0)
    core.submit(ask("prefilling", 9), 0)
    in_flight = core.plan("lane", 0)
    core.submit(ask("queued", 2), 0)
    assert core.cancel("queued", 1) == [Finished("queued", Reason.CANCELLED, Usage(2, 0, 0), Phase.QUEUE)]
    assert core.cancel("prefilling", 1) == [
        Finished("prefilling", Reason.CANCELLED, Usage(9, 0, 0, prefill_chunks=1), Phase.PREFILL)
    ]
    assert core.cancel("decoding", 1) == [
        Finished("decoding", Reason.CANCELLED, Usage(2, delivered=1, discarded=1, prefill_chunks=1), Phase.DECODE)
    ]
    assert [core.cancel(key, 1) for key in ("queued", "prefilling", "decoding", "never seen")] == [[]] * 4
    assert core.plan("lane", 1) is None
    assert core.apply("lane", answer(in_flight), 2) == []
    assert core.load() == Load(0, 0, {"lane": LaneLoad(0, 0, 16, 0, 0, 16)})


def test_each_time_limit_has_its_reason(core: SchedulerCore) -> None:
    limits = Limits(queue_ns=10, first_token_ns=30, between_tokens_ns=20, total_ns=100)
    core.submit(ask("a", 9, limits=limits), 0)
    assert core.next_deadline() == 10
    plan = core.plan("lane", 5)
    assert core.next_deadline() == 30  # admitted: the queue limit is over
    core.apply("lane", answer(plan), 25)
    assert core.next_deadline() == 45
    assert core.expire(44) == []
    assert core.expire(45) == [
        Finished(
            "a",
            Reason.TIME_LIMIT,
            Usage(9, delivered=1, discarded=0, prefill_chunks=1),
            Phase.DECODE,
            TimeLimit.BETWEEN_TOKENS,
        )
    ]
    core.submit(ask("b", 9, limits=limits), 50)
    assert core.expire(60) == [Finished("b", Reason.DEADLINE, Usage(9, 0, 0), Phase.QUEUE, TimeLimit.QUEUE)]
    assert core.next_deadline() is None


def test_a_running_sequence_whose_time_is_over_gets_no_slice_before_expire_is_called(core: SchedulerCore) -> None:
    core.submit(ask("a", 9, limits=Limits(total_ns=10)), 0)
    core.submit(ask("b", 9), 0)
    core.plan("lane", 5)
    plan = core.plan("lane", 10)
    assert plan is not None
    assert [piece.key for piece in plan.slices] == ["b"]


def test_resumed_output_counts_against_max_tokens(core: SchedulerCore) -> None:
    core.submit(ask("a", 5, 6, output_len=4), 0)
    plan = core.plan("lane", 0)
    assert plan is not None
    assert plan.slices[0].count == 9
    emissions: list[Emission] = []
    while plan is not None:
        emissions += core.apply("lane", answer(plan), 0)
        plan = core.plan("lane", 0)
    assert emissions == [
        Tokens("a", 1),
        Tokens("a", 1),
        Finished("a", Reason.LENGTH, Usage(5, delivered=2, discarded=0, prefill_chunks=1), Phase.DECODE),
    ]


@pytest.mark.parametrize(
    ("submission", "error", "field", "message"),
    [
        (ask("a", 0), InvalidSubmission, "prompt_len", "the prompt is empty; at least 1 token is needed"),
        (ask("a", 1, 0), InvalidSubmission, "max_tokens", "max_tokens is 0; at least 1 is needed"),
        (
            ask("a", 1, 2, output_len=2),
            InvalidSubmission,
            "output_len",
            "2 resumed tokens leave nothing of max_tokens 2",
        ),
        (ask("a", 64), DoesNotFit, "prompt_len", "64 tokens leave no room for output in the context of 64"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    core: SchedulerCore, submission: Submission, error: type[Exception], field: str, message: str
) -> None:
    with pytest.raises(error) as refusal:
        core.submit(submission, 0)
    assert (refusal.value.field, refusal.value.message) == (field, message)  # type: ignore[attr-defined]
    assert core.totals().submitted == 0


def test_max_tokens_beyond_the_context_is_clipped_and_absent_means_the_context(core: SchedulerCore) -> None:
    assert core.submit(ask("a", 60, 1000), 0) == Accepted(0, 4)
    assert core.submit(ask("b", 60, None), 0) == Accepted(1, 4)


def test_outcomes_that_answer_something_else_are_refused_and_change_nothing(core: SchedulerCore) -> None:
    core.submit(ask("a", 2), 0)
    with pytest.raises(OutOfStep, match="none is in flight"):
        core.apply("lane", StepOutcome(1, ()), 0)
    plan = core.plan("lane", 0)
    for outcome, story in (
        (StepOutcome(2, ()), "step 1 is next"),
        (StepOutcome(1, ()), r"sampled slots \[0\]"),
        (StepOutcome(1, (SequenceOutcome(1, 1),)), r"sampled slots \[0\]"),
        (StepOutcome(1, (SequenceOutcome(0, 2),)), "drew 2 tokens"),
        (StepOutcome(1, (SequenceOutcome(0, 1, failed=True),)), "drew 1 tokens"),
    ):
        with pytest.raises(OutOfStep, match=story):
            core.apply("lane", outcome, 0)
    assert core.apply("lane", answer(plan), 0) == [Tokens("a", 1)]
    assert core.apply("lane", answer(plan), 0) == []  # a repeated step is ignored


def test_an_invariant_error_tells_the_calls_that_led_to_it(cores: list[SchedulerCore]) -> None:
    core = SchedulerCore(CoreConfig())
    core.attach("lane", SPEC, 0)
    core.submit(ask("a", 2), 7)
    core.plan("lane", 8)
    core._lanes["lane"].running[0].placed().blocks.append(9)
    with pytest.raises(InvariantError) as broken:
        core.check()
    story = str(broken.value)
    assert "block 9 is owned and FREE" in story
    assert "submit(Submission(key='a'" in story
    assert story.index("submit(") < story.index("plan('lane', 8)") < story.index("check()")


@pytest.mark.parametrize(
    ("field", "value"),
    [("steps_in_flight", 3), ("steps_in_flight", 0), ("watermark", float("nan")), ("prefill_chunk", 0)],
)
def test_a_config_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        CoreConfig(**{field: value})  # type: ignore[arg-type]


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="policy 'lifo' is unknown; there are fcfs"):
        SchedulerCore(CoreConfig(policy="lifo"))
