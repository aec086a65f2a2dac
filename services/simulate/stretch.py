"""A stretch of quiet steps: a lane decodes, and nobody has to look until it ends, or until somebody interrupts it.

The times of all its steps are known when it begins, since each follows from the step before. So the clock need not
visit them: the core is told, as late as anybody looks, of those that have ended by then. Pure.

Invariant: `ends` are the times at which a stepping clock would visit the lane, to the nanosecond.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

LONGEST: Final = 512  # steps of one stretch: what is interrupted early was not worth computing to its end


@dataclass(slots=True)
class Stretch:
    """ends: of the steps that are gone over, then of the first that is not. The step that runs when it begins is the
    first of them. before_ns: a deadline of one of its sequences; all that is gone over ends before. joinable: whoever
    waits can end it. seen: steps that the paces know of; told: that the core knows
    of. peek: when the clock visits it next, in between."""

    ends: list[int]
    before_ns: int | None
    joinable: bool
    seen: int = 0
    told: int = 0
    peek: int | None = None

    @property
    def steps(self) -> int:
        """Gone over in all."""
        return len(self.ends) - 1

    @property
    def over_at(self) -> int:
        return self.ends[-1]

    def ended(self, now: int, *, also_now: bool) -> int:
        """Steps gone over that ended before `now`; also_now: or at it."""
        find = bisect_right if also_now else bisect_left
        return find(self.ends, now, self.seen, len(self.ends) - 1)


def stretch_of(
    first_end: int,
    most: int,
    before_ns: int | None,
    *,
    joinable: bool,
    rows: int,
    context: int,
    fixed_ns: float,
    context_ns: float,
) -> Stretch:
    """At most `most` quiet steps that end before `before_ns`, of so many rows each. `context` is that of the step that
    ends at `first_end`; each further step looks at a position more for each row."""
    steps = min(most, LONGEST)
    took = [int(fixed_ns + context_ns * at) for at in range(context + rows, context + rows * steps + 1, rows)]
    ends = list(accumulate(took, initial=first_end))
    if before_ns is not None:
        del ends[bisect_left(ends, before_ns, hi=steps) + 1 :]
    return Stretch(ends, before_ns, joinable)
