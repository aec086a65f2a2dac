"""One timer at the next of many times: the shell's side of the core's deadlines."""

import asyncio
from collections.abc import Callable


class Alarm:
    """ring: called on the event loop when the time that was set last has come."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, delay_ns: int | None) -> None:
        """Replaces the time set before. None: none."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if delay_ns is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0, delay_ns) / 1e9, self._ring)
