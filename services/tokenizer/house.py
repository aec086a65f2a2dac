"""How many requests are at this edge, whether one more may come, and when the last has gone.

Invariant: never more than `most` at once.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from services.errors import ResourceExhausted

SHARE: Final = 0.1  # of the latest time between two ends in the average
RETRY_S: Final = (0.05, 30.0)  # the shortest and the longest advice
UNKNOWN_S: Final = 1.0  # before a second request has ended


class House:
    """most: requests at once. clock: seconds, monotonic."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._guests = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._left_at: float | None = None
        self._gap_s: float | None = None  # between two ends, on average
        self._refused = 0  # since the last end

    @contextmanager
    def guest(self) -> Iterator[None]:
        """Around a request's whole life. Raises ResourceExhausted with the time after which there may be room."""
        if self._guests >= self._most:
            self._refused += 1
            raise ResourceExhausted(
                f"{self._most} requests are at this server already",
                reason="EDGE_FULL",
                limit=self._most,
                retry_after_s=self._advice_s(),
            )
        self._guests += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._leave()

    async def empty(self) -> None:
        """Returns when nobody is here."""
        await self._empty.wait()

    def _leave(self) -> None:
        self._guests -= 1
        self._refused = 0
        now = self._clock()
        if self._left_at is not None:
            gap_s = now - self._left_at
            self._gap_s = gap_s if self._gap_s is None else self._gap_s + SHARE * (gap_s - self._gap_s)
        self._left_at = now
        if not self._guests:
            self._empty.set()

    def _advice_s(self) -> float:
        """Ends come one after the other, and whoever was refused before is to have the first place."""
        if self._gap_s is None:
            return UNKNOWN_S
        return min(max(self._gap_s * self._refused, RETRY_S[0]), RETRY_S[1])
