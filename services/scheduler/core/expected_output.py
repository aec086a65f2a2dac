"""How long a tenant's answers are, learned from those that ended.

Knows tenants as names. Of each, the last answers' lengths, in order of length and of time: finding a place is a binary
search.
"""

from bisect import bisect_left, insort
from collections import deque
from typing import Final

WINDOW: Final = 128  # answers remembered of a tenant
ENOUGH: Final = 16  # fewer say nothing
_TENANTS: Final = 1024  # remembered; the one whose last answer is oldest goes first


class OutputHistory:
    def __init__(self) -> None:
        self._answers: dict[str, tuple[deque[int], list[int]]] = {}

    def observe(self, tenant: str, tokens: int) -> None:
        """An answer that ended by itself or by its limit."""
        recent, ranked = self._answers.pop(tenant, (deque(), []))
        self._answers[tenant] = (recent, ranked)  # the last now
        if len(self._answers) > _TENANTS:
            del self._answers[next(iter(self._answers))]
        recent.append(tokens)
        insort(ranked, tokens)
        if len(recent) > WINDOW:
            del ranked[bisect_left(ranked, recent.popleft())]

    def expected(self, tenant: str) -> int | None:
        """P90: nine of ten answers were no longer. None: too few are known."""
        ranked = self._answers.get(tenant, ((), []))[1]
        return None if len(ranked) < ENOUGH else ranked[-(-9 * len(ranked) // 10) - 1]
