"""Which limit is next, and a heap that forgets what is over."""

import pytest

from services.scheduler.core.calls import InvariantError, Limits, TimeLimit
from services.scheduler.core.deadlines import Deadlines, earliest
from services.scheduler.core.keyed_heap import KeyedHeap

ALL = Limits(queue_ns=10, first_token_ns=20, between_tokens_ns=5, total_ns=100)


@pytest.mark.parametrize(
    ("admitted", "last_token_at", "expected"),
    [
        (False, None, (1010, TimeLimit.QUEUE)),
        (True, None, (1020, TimeLimit.FIRST_TOKEN)),
        (True, 1030, (1035, TimeLimit.BETWEEN_TOKENS)),
        (True, 1098, (1100, TimeLimit.TOTAL)),
    ],
)
def test_the_limits_follow_the_phases(admitted: bool, last_token_at: int | None, expected: object) -> None:
    assert earliest(ALL, 1000, admitted=admitted, last_token_at=last_token_at) == expected


def test_without_limits_there_is_no_deadline() -> None:
    assert earliest(Limits(), 0, admitted=False, last_token_at=None) is None
    assert earliest(Limits(queue_ns=1), 0, admitted=True, last_token_at=None) is None
    assert earliest(Limits(between_tokens_ns=1), 0, admitted=True, last_token_at=None) is None


def test_of_two_limits_at_once_the_earlier_phase_is_named() -> None:
    assert earliest(Limits(queue_ns=7, total_ns=7), 0, admitted=False, last_token_at=None) == (7, TimeLimit.QUEUE)


def test_due_ones_leave_earliest_first_and_a_deadline_passes_when_reached() -> None:
    deadlines = Deadlines()
    deadlines.set("late", (30, TimeLimit.TOTAL))
    deadlines.set("early", (10, TimeLimit.QUEUE))
    deadlines.set("tie", (10, TimeLimit.TOTAL))
    assert deadlines.next() == 10
    assert deadlines.pop_due(9) == []
    assert deadlines.pop_due(10) == [("early", TimeLimit.QUEUE), ("tie", TimeLimit.TOTAL)]
    assert deadlines.next() == 30
    assert not deadlines.passed("late", 29)
    assert deadlines.passed("late", 30)
    assert not deadlines.passed("early", 30)


def test_a_deadline_moves_both_ways_and_goes() -> None:
    deadlines = Deadlines()
    deadlines.set("a", (10, TimeLimit.QUEUE))
    deadlines.set("a", (50, TimeLimit.TOTAL))
    assert deadlines.next() == 50
    deadlines.set("a", (20, TimeLimit.BETWEEN_TOKENS))
    assert deadlines.pop_due(49) == [("a", TimeLimit.BETWEEN_TOKENS)]
    deadlines.set("a", (60, TimeLimit.TOTAL))
    deadlines.set("a", None)
    assert deadlines.next() is None
    assert len(deadlines) == 0


def test_a_key_used_again_is_not_ended_by_its_past() -> None:
    deadlines = Deadlines()
    deadlines.set("a", (10, TimeLimit.QUEUE))
    deadlines.drop("a")
    deadlines.set("a", (90, TimeLimit.QUEUE))
    assert deadlines.pop_due(89) == []


def test_c07_entries_of_the_finished_do_not_pile_up() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.set(f"s{number}", (1_000_000 + number, TimeLimit.TOTAL))
        deadlines.check()
        deadlines.drop(f"s{number}")
    deadlines.set("one", (0, TimeLimit.TOTAL))
    for when in range(10_000):  # the between-tokens limit moves with every token
        deadlines.set("one", (when, TimeLimit.BETWEEN_TOKENS))
    deadlines.check()
    assert deadlines.next() == 9_999
    assert len(deadlines) == 1


def test_the_heap_check_sees_a_lost_entry() -> None:
    heap = KeyedHeap()
    heap.set("a", (1,))
    heap._entries.clear()
    with pytest.raises(InvariantError, match="no heap entry"):
        heap.check()
