"""Writes of one turn leave together, in order, and never pile up."""

import asyncio
from collections.abc import Callable

from services.gateway.joined_writes import MOST_BYTES, JoinedWrites


class Under(asyncio.Transport):
    """Notes what reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes | str] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.seen.append(bytes(data))

    def close(self) -> None:
        self.seen.append("close")

    def abort(self) -> None:
        self.seen.append("abort")


def joined() -> tuple[JoinedWrites, Under, list[Callable[[], None]]]:
    under, turn = Under(), list[Callable[[], None]]()
    return JoinedWrites(under, turn.append), under, turn


def end(turn: list[Callable[[], None]]) -> None:
    while turn:
        turn.pop(0)()


def test_a_turns_writes_leave_at_its_end_and_in_order() -> None:
    transport, under, turn = joined()
    for data in (b"head", b"", b"one", b"two"):
        transport.write(data)
    assert under.seen == []
    end(turn)
    assert under.seen == [b"headonetwo"]
    transport.write(b"next")
    end(turn)
    assert under.seen == [b"headonetwo", b"next"]


def test_nothing_is_sent_or_asked_for_where_nothing_is_written() -> None:
    transport, under, turn = joined()
    transport.write(b"")
    assert (turn, under.seen) == ([], [])


def test_much_leaves_at_once_so_that_the_writer_is_told_to_pause() -> None:
    transport, under, turn = joined()
    transport.write(b"a")
    transport.write(b"b" * MOST_BYTES)
    assert under.seen == [b"a" + b"b" * MOST_BYTES]
    transport.write(b"c")
    end(turn)
    assert under.seen[1:] == [b"c"]


def test_closing_sends_what_is_held_and_aborting_drops_it() -> None:
    transport, under, turn = joined()
    transport.write(b"last")
    transport.close()
    end(turn)
    assert under.seen == [b"last", "close"]
    transport, under, turn = joined()
    transport.write(b"lost")
    transport.abort()
    end(turn)
    assert under.seen == ["abort"]
