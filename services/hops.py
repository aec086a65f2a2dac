"""What each hop keeps back of a call's time, so that its answer still arrives before the caller gives up. Pure."""

from typing import Final

MARGIN_NS: Final = 50_000_000
MARGIN_SHARE: Final = 0.02


def keep_margin(left_ns: int) -> int:
    """Nanoseconds of the caller's time that are left for what is behind this hop; 0 or below: nothing."""
    return left_ns - max(MARGIN_NS, int(left_ns * MARGIN_SHARE))
