"""In which order blocks that nobody holds are given away: idle blocks of a cache, or of one tenant in it.

Knows numbers of blocks only. Four lines, each by how long its blocks rest, longest first. *Loose* ones and those whose
lease is *expired* go first, both together in one order; then the *leased* ones; then the *pinned* ones. All operations
are O(1), `first` is linear in what it gives.
"""

from collections.abc import Iterator, Mapping
from enum import IntEnum
from heapq import merge
from itertools import islice


class Line(IntEnum):
    LOOSE = 0
    EXPIRED = 1
    LEASED = 2
    PINNED = 3


class IdleBlocks:
    def __init__(self) -> None:
        self._lines: tuple[dict[int, int], ...] = tuple({} for _ in Line)  # block -> since when it rests
        self._line_of: dict[int, Line] = {}

    def __len__(self) -> int:
        return len(self._line_of)

    def __contains__(self, block: int) -> bool:
        return block in self._line_of

    def __iter__(self) -> Iterator[int]:
        """In the order in which they are reclaimed."""
        loose, expired, leased, pinned = self._lines
        for _, block in merge(_by_rest(loose), _by_rest(expired)):
            yield block
        yield from leased
        yield from pinned

    def first(self, count: int) -> list[int]:
        """The next ones to be reclaimed; they stay."""
        return list(islice(self, count))

    def line(self, block: int) -> Line:
        return self._line_of[block]

    def leased(self) -> Mapping[int, int]:
        """Since when each rests, longest first."""
        return self._lines[Line.LEASED]

    def count(self, line: Line) -> int:
        return len(self._lines[line])

    def add(self, block: int, line: Line, since: int) -> None:
        """Of one line, `since` never falls from one call to the next."""
        self._lines[line][block] = since
        self._line_of[block] = line

    def discard(self, block: int) -> bool:
        """Whether it was there."""
        line = self._line_of.pop(block, None)
        if line is None:
            return False
        del self._lines[line][block]
        return True

    def expire(self, block: int) -> None:
        """A leased one; the one that rests longest."""
        since = self._lines[Line.LEASED].pop(block)
        self.add(block, Line.EXPIRED, since)


def _by_rest(line: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    return ((since, block) for block, since in line.items())
