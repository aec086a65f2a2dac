"""A stretch of quiet steps: when each ends, and how many have by now."""

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.cost import StepFit
from services.simulate.cost import CostModel, StepWork
from services.simulate.stretch import LONGEST, Stretch, stretch_of


@given(
    st.integers(1, 10**15),
    st.integers(1, LONGEST + 5),
    st.one_of(st.none(), st.integers(0, 10**10)),
    st.integers(1, 300),
    st.integers(1, 10**6),
    st.floats(1, 1e8),
    st.floats(0, 1e4),
)
def test_its_times_are_those_of_steps_one_after_the_other(
    first: int, most: int, within: int | None, rows: int, context: int, base: float, decode_context: float
) -> None:
    cost = CostModel(base, 1e4, 3e4, 7.0, decode_context, free_tokens=11)
    before = None if within is None else first + within
    made = stretch_of(
        first,
        most,
        before,
        joinable=True,
        rows=rows,
        context=context,
        fixed_ns=cost.rows_ns(rows),
        context_ns=decode_context,
    )
    at, ends = first, [first]
    while len(ends) <= min(most, LONGEST) and (before is None or at < before):
        context += rows
        at += cost.step_ns(StepWork(0, rows, 0, context))
        ends.append(at)
    assert made.ends == ends
    assert before is None or all(end < before for end in made.ends[: made.steps])


def test_ended_counts_what_is_gone_over_and_never_the_last() -> None:
    stretch = Stretch([10, 20, 30, 40], None, joinable=True)
    assert [stretch.ended(now, also_now=True) for now in (9, 10, 25, 30, 40, 99)] == [0, 1, 2, 3, 3, 3]
    assert [stretch.ended(now, also_now=False) for now in (9, 10, 11, 30, 99)] == [0, 0, 1, 2, 3]
    stretch.told = 2
    assert stretch.ended(30, also_now=False) == 2


@given(st.lists(st.integers(1, 10**9), max_size=40), st.integers(1, 500))
def test_steps_observed_at_once_leave_what_steps_observed_one_by_one_leave(times: list[int], tokens: int) -> None:
    one, all_at_once = StepFit(), StepFit()
    for fit in (one, all_at_once):
        fit.observe(3, 700)
    for elapsed in times:
        one.observe(tokens, elapsed)
    before = all_at_once.estimate()
    assert before is not None
    all_at_once.observe_each(tokens, times)
    assert all_at_once.estimate() == one.estimate()
    assert all_at_once.estimate(5) != before
