"""The figures, from times that are written down: no clock, no server."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench.record import Failure, Outcome, Piece, Reply, checked, reply_of
from services.bench.summary import band, figures, keeps, knee, window
from services.simulate.summary import Objectives, percentile

MS = 1_000_000


def outcome(
    due: int, arrivals: tuple[int, ...], ended: int, *, tokens: int | None = None, started: int | None = None
) -> Outcome:
    """Times in ms. tokens: of the answer; else one a message."""
    count = len(arrivals) if tokens is None else tokens
    reply = Reply(ended * MS, tuple(at * MS for at in arrivals), (), 10, count)
    return Outcome(due * MS, (due if started is None else started) * MS, 10, reply)


def failed(due: int, ended: int, failure: Failure) -> Outcome:
    return Outcome(due * MS, due * MS, 10, Reply(ended * MS, failure=failure, detail="why"))


def test_the_figures_of_a_closed_loop_are_those_of_its_times() -> None:
    found = figures(
        [
            outcome(0, (100, 120, 140, 160, 180), 190),
            outcome(0, (300, 340, 380), 400),
            outcome(190, (250, 250, 270), 1000),
            failed(400, 900, Failure.REFUSED),
        ],
        Objectives(ttft_ms=150, tpot_ms=25),
        client_cpu_ns=250 * MS,
    )
    assert (found.requests, found.served, found.failures) == (4, 3, {"refused": 1})
    assert found.seconds == 1.0
    assert (found.ttft.p50, found.ttft.p99) == (100, 300)  # of 60, 100, 300
    assert (found.tpot.p50, found.tpot.p99) == (20, 40)  # of 10, 20, 40
    assert (found.itl.p50, found.itl.p99) == (20, 40)  # of 0, 20 x5, 40 x2
    assert (found.e2e.p50, found.e2e.p99) == (400, 810)
    assert found.output_tokens_per_s == 11
    assert found.total_tokens_per_s == 11 + 30
    assert found.requests_per_s == 3
    assert found.goodput_per_s == 2
    assert found.tokens_per_message == 1
    assert found.client_share == 0.25
    assert found.late_ms is None


def test_an_open_loop_counts_what_ended_while_requests_arrived() -> None:
    late = outcome(500, (600,), 700, started=530)
    found = figures(
        [outcome(0, (100, 200), 300), late, outcome(1000, (1100, 1200), 1300)], Objectives(), open_loop=True
    )
    assert found.seconds == 1.0
    assert found.requests_per_s == 2
    assert found.output_tokens_per_s == 3
    assert found.late_ms == 30
    assert found.ttft.p50 == 100  # from when it was due, not from when it was sent


def test_an_open_loop_that_came_at_once_lasts_until_its_end() -> None:
    both = [outcome(5, (10,), 20), outcome(5, (10,), 30)]
    assert window(both, open_loop=True) == (5 * MS, 30 * MS)


def test_a_message_of_several_tokens_is_one_gap_and_several_tokens() -> None:
    one = outcome(0, (100, 180, 260), 300, tokens=9)
    assert one.tpot_ns == 160 * MS / 8
    assert one.gaps_ns == [80 * MS, 80 * MS]
    assert figures([one], Objectives()).tokens_per_message == 3


@pytest.mark.parametrize("arrivals", [(), (100,)])
def test_without_a_second_token_there_is_no_time_per_token(arrivals: tuple[int, ...]) -> None:
    assert outcome(0, arrivals, 200).tpot_ns is None
    assert keeps(outcome(0, arrivals, 200), Objectives(tpot_ms=0.001))


def test_nothing_served_gives_figures_too() -> None:
    found = figures([failed(0, 0, Failure.REFUSED)], Objectives())
    assert (found.output_tokens_per_s, found.ttft.p50, found.tokens_per_message) == (0, None, None)


def test_tokens_are_counted_by_the_server_where_it_counts_each_message() -> None:
    pieces = [
        Piece(10, has_text=False, counted=0),
        Piece(20, has_text=False, counted=1),  # half of a character
        Piece(30, has_text=True, counted=4),
        Piece(40, has_text=True, counted=4),  # text that was held back
    ]
    found = reply_of(pieces, 50, 7, 4)
    assert (found.arrivals, found.tokens, found.output) == ((20, 30), (1, 3), 4)


def test_else_a_message_with_text_carries_tokens() -> None:
    pieces = [Piece(10, has_text=False), Piece(20, has_text=True), Piece(30, has_text=True)]
    assert reply_of(pieces, 50, 7, 2).tokens == (1, 1)
    several = reply_of(pieces, 50, 7, 6)
    assert (several.arrivals, several.tokens, several.output) == ((20, 30), (), 6)
    assert reply_of(pieces, 50, None, None).output == 2


def test_an_answer_of_another_length_is_none() -> None:
    reply = Reply(9, (1, 2), (1, 1), 10, 2)
    assert checked(reply, 10, 2) is reply
    assert checked(reply, 10, None) is reply
    assert checked(reply, 10, 3).failure is Failure.WRONG_COUNT
    assert checked(reply, 11, 2).detail == "10 tokens in, 11 were sent"
    assert checked(replace(reply, failure=Failure.CUT), 11, 2).failure is Failure.CUT


values = st.lists(st.floats(0, 1e9), min_size=1, max_size=60)


@given(values, st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_a_percentile_is_the_least_value_that_enough_dont_exceed(listed: list[float], share: float) -> None:
    found = percentile(sorted(listed), share)
    assert found in listed
    assert sum(one <= found for one in listed) >= share * len(listed)
    below = [one for one in listed if one < found]
    assert len(below) < share * len(listed)


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=10), st.sampled_from([0.0, 0.05, 0.5]))
def test_nothing_beyond_the_knee_gives_more_and_everything_before_it_is_beaten(rates: list[float], gain: float) -> None:
    points = [(2**index, rate) for index, rate in enumerate(rates)]
    found = knee(points, gain)

    def beaten(index: int) -> bool:
        return any(later > rates[index] * (1 + gain) for later in rates[index + 1 :])

    if found is None:
        assert all(beaten(index) for index in range(len(rates) - 1))
    else:
        at = round(math.log2(found))
        assert not beaten(at)
        assert all(beaten(index) for index in range(at))


def test_knees() -> None:
    assert knee([(1, 40), (2, 78), (4, 140), (8, 146), (16, 144)]) == 4
    assert knee([(1, 40), (2, 78), (4, 140)]) is None
    assert knee([(1, 40)]) is None
    assert knee([(1, 0.0), (2, 0.0)]) is None
    assert knee([(1, 40), (2, 41), (4, 80), (8, 81)]) == 4  # a dent is no knee


times = st.integers(0, 5000)


@given(
    st.lists(st.tuples(times, st.lists(times, min_size=1, max_size=5), times), min_size=1, max_size=20),
    st.integers(1, 5000),
    st.integers(1, 5000),
)
def test_goodput_is_a_part_of_what_was_served_and_grows_with_the_limits(
    shapes: list[tuple[int, list[int], int]], low: int, more: int
) -> None:
    outcomes = []
    for due, gaps, rest in shapes:
        arrivals = tuple(due + sum(gaps[: index + 1]) for index in range(len(gaps)))
        outcomes.append(outcome(due, arrivals, arrivals[-1] + rest))
    tight = figures(outcomes, Objectives(low, low, low)).goodput_per_s
    loose = figures(outcomes, Objectives(low + more, low + more, low + more)).goodput_per_s
    every = figures(outcomes, Objectives())
    assert 0 <= tight <= loose <= every.goodput_per_s == every.requests_per_s


def test_a_band() -> None:
    assert band([3, 1, 2]) == band([2, 3, 1])
    assert (band([3, 1, 2]).median, band([3, 1, 2]).low, band([3, 1, 2]).high) == (2, 1, 3)
