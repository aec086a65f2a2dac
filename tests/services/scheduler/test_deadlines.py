"""Which limit is next, and a heap that forgets what is over."""

import pytest

from services.scheduler.core.calls import InvariantError, Limits, TimeLimit
from services.scheduler.core.deadlines import Deadline, Deadlines, earliest
from services.scheduler.core.keyed_heap import KeyedHeap


class Book:
    """Deadlines over a table of how they really are."""

    def __init__(self) -> None:
        self.true: dict[str, Deadline | None] = {}
        self.kept = Deadlines(lambda key: self.true[key])

    def set(self, key: str, deadline: Deadline | None) -> None:
        self.true[key] = deadline
        self.kept.set(key, deadline)


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
    book = Book()
    book.set("late", (30, TimeLimit.TOTAL))
    book.set("early", (10, TimeLimit.QUEUE))
    book.set("tie", (10, TimeLimit.TOTAL))
    deadlines = book.kept
    assert deadlines.next() == 10
    assert deadlines.pop_due(9) == []
    assert deadlines.pop_due(10) == [("early", TimeLimit.QUEUE), ("tie", TimeLimit.TOTAL)]
    assert deadlines.next() == 30
    assert not deadlines.passed("late", 29)
    assert deadlines.passed("late", 30)
    assert not deadlines.passed("early", 30)


def test_a_deadline_moves_both_ways_and_goes() -> None:
    book = Book()
    book.set("a", (10, TimeLimit.QUEUE))
    book.set("a", (50, TimeLimit.TOTAL))
    assert book.kept.next() == 50
    book.set("a", (20, TimeLimit.BETWEEN_TOKENS))
    assert book.kept.pop_due(49) == [("a", TimeLimit.BETWEEN_TOKENS)]
    book.set("a", (60, TimeLimit.TOTAL))
    book.set("a", None)
    assert book.kept.next() is None
    assert len(book.kept) == 0


def test_a_deadline_that_moved_on_untold_is_found_when_its_entry_is_reached() -> None:
    book = Book()
    book.set("a", (10, TimeLimit.BETWEEN_TOKENS))
    book.set("b", (11, TimeLimit.TOTAL))
    book.true["a"] = (15, TimeLimit.BETWEEN_TOKENS)  # a token came
    assert book.kept.get("a") == (15, TimeLimit.BETWEEN_TOKENS)
    assert not book.kept.passed("a", 12)
    assert book.kept.entry("a") == 15
    assert book.kept.next() == 11
    assert book.kept.pop_due(16) == [("b", TimeLimit.TOTAL), ("a", TimeLimit.BETWEEN_TOKENS)]


def test_a_key_used_again_is_not_ended_by_its_past() -> None:
    book = Book()
    book.set("a", (10, TimeLimit.QUEUE))
    book.kept.drop("a")
    book.set("a", (90, TimeLimit.QUEUE))
    assert book.kept.pop_due(89) == []


def test_c07_entries_of_the_finished_do_not_pile_up() -> None:
    book = Book()
    for number in range(10_000):
        book.set(f"s{number}", (1_000_000 + number, TimeLimit.TOTAL))
        book.kept.check()
        book.kept.drop(f"s{number}")
    book.set("one", (0, TimeLimit.TOTAL))
    for when in range(10_000):
        book.set("one", (when, TimeLimit.BETWEEN_TOKENS))
    book.kept.check()
    assert book.kept.next() == 9_999
    assert len(book.kept) == 1


def test_the_heap_check_sees_a_lost_entry() -> None:
    heap = KeyedHeap()
    heap.set("a", (1,))
    heap._entries.clear()
    with pytest.raises(InvariantError, match="no heap entry"):
        heap.check()
