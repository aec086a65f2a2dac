"""Aborts that came before their requests: each is remembered for a while, since an Abort can overtake its Generate.

Pure: time is an argument. Invariant: there are never more than MOST, the oldest are forgotten first.
"""

from dataclasses import dataclass
from typing import Final

KEPT_NS: Final = 30_000_000_000
MOST: Final = 10_000

RequestName = tuple[str, str]  # tenant, request id


@dataclass(frozen=True, slots=True)
class _Tombstone:
    """attempt: of the request; None: whichever."""

    until_ns: int
    attempt: int | None


class Tombstones:
    def __init__(self) -> None:
        self._stones: dict[RequestName, _Tombstone] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._stones)

    def put(self, name: RequestName, attempt: int | None, now: int) -> None:
        """Replaces the name's earlier one."""
        self._stones.pop(name, None)
        self._stones[name] = _Tombstone(now + KEPT_NS, attempt)
        if len(self._stones) > MOST:
            del self._stones[next(iter(self._stones))]

    def take(self, name: RequestName, attempt: int, now: int) -> bool:
        """Whether this attempt was aborted before it came. The name's tombstone is gone then in any case."""
        stone = self._stones.pop(name, None)
        return stone is not None and stone.until_ns > now and (stone.attempt is None or attempt <= stone.attempt)

    def forget(self, now: int) -> None:
        """Those whose time is over."""
        self._stones = {name: stone for name, stone in self._stones.items() if stone.until_ns > now}
