"""Which of several lanes takes a waiting sequence.

There is one queue, and whichever lane plans next looks at it. Left alone, a sequence goes to the lane that happens to
wake first: a slow or a full one as readily as a fast or an empty one. So a lane that could take a sequence first asks
whether another one that has room is expected to finish it sooner, and leaves it there.

The forecast: what is in flight there, the prompt tokens that are still to be computed there (what its cache holds is
not), then the expected output at the pace of a batch of that size. Paces are measured by the core itself, from the
times of its calls. Where they are equal, or not known yet, the lane with fewer active requests has it: connections
say nothing about work.

Pure: time is an argument. Invariants: a sequence is left at most LEFT_AT_MOST times between two stays, so nobody waits
for ever for a better place; with one open lane nothing is ever left. Of many lanes CHOICES are looked at, in turn:
a few choices balance almost as well as all of them (M. Mitzenmacher, The Power of Two Choices in Randomized Load
Balancing, 2001), at a bounded price.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from services.scheduler.core.calls import LaneId
from services.scheduler.core.cost import CostEstimate, StepFit
from services.scheduler.core.lane import Lane
from services.scheduler.core.sequence import Sequence

LEFT_AT_MOST: Final = 8
CHOICES: Final = 8
SOON_NS: Final = 1_000_000_000
CLEARLY: Final = 0.9  # of two forecasts that are nearer than that, the active requests decide


@dataclass(slots=True)
class _Pace:
    """What was measured of one lane."""

    fit: StepFit = field(default_factory=StepFit)
    in_flight: deque[tuple[int, int]] = field(default_factory=deque)  # tokens, planned at
    freed_at: int = 0  # when its last step was applied
    backlog: int | None = 0  # prompt tokens of its running sequences to be computed; None: to be counted anew


class Binding:
    """The paces of all lanes."""

    def __init__(self) -> None:
        self._paces: dict[LaneId, _Pace] = {}
        self._open: list[LaneId] = []  # that take what is new
        self._closed: dict[LaneId, None] = {}  # the others
        self._turn = 0

    def attach(self, lane: LaneId) -> None:
        self._paces[lane] = _Pace()
        self._open.append(lane)

    def lose(self, lane: LaneId) -> None:
        del self._paces[lane]
        if lane in self._closed:
            del self._closed[lane]
        else:
            self._open.remove(lane)

    def close(self, lane: LaneId) -> None:
        """Nothing new goes there from now on."""
        if lane not in self._closed:
            self._closed[lane] = None
            self._open.remove(lane)

    def closed(self, lane: LaneId) -> bool:
        return lane in self._closed

    def planned(self, lane: LaneId, tokens: int, now: int) -> None:
        pace = self._paces[lane]
        pace.in_flight.append((tokens, now))
        pace.backlog = None

    def applied(self, lane: LaneId, now: int) -> None:
        pace = self._paces[lane]
        tokens, planned_at = pace.in_flight.popleft()
        pace.fit.observe(tokens, now - max(planned_at, pace.freed_at))
        pace.freed_at = now
        pace.backlog = None

    def choice(self, lane: Lane, lanes: Mapping[LaneId, Lane], max_passes: int, now: int) -> "Choice":
        """For one plan of `lane`. Others are looked at once somebody could come in: most plans admit nobody."""
        return Choice(self, lane, lanes, max_passes, now)

    def others(self, lane: Lane, lanes: Mapping[LaneId, Lane]) -> list[Lane]:
        """Whom a choice of `lane` is made among, besides itself: of many the next CHOICES."""
        names = self._open
        if len(names) > CHOICES + 1:
            self._turn = (self._turn + CHOICES) % len(names)
            names = [names[(self._turn + step) % len(names)] for step in range(CHOICES)]
        return [lanes[name] for name in names if name != lane.id]

    def ready_in(self, lane: Lane, estimate: CostEstimate, now: int) -> int:
        """Nanoseconds until what is in flight is expected to be done. A step that is late is expected to be as late
        again: so a lane that hangs looks worse the longer it does."""
        pace = self._paces[lane.id]
        if not pace.in_flight:
            return 0
        first, planned_at = pace.in_flight[0]
        running = now - max(planned_at, pace.freed_at)
        rest = sum([_step(estimate, tokens) for tokens, _ in pace.in_flight]) - _step(estimate, first)
        return abs(_step(estimate, first) - running) + rest

    def backlog(self, lane: Lane) -> int:
        pace = self._paces[lane.id]
        if pace.backlog is None:
            pace.backlog = sum(missing for other in lane.running if (missing := other.missing) > 1)
        return pace.backlog

    def soon(self, lane: LaneId) -> int:
        """Tokens that a sequence draws there in SOON_NS at the pace of the last steps."""
        mean = self._paces[lane].fit.mean_ns
        return 64 if mean is None else min(1024, max(4, int(SOON_NS / max(mean, 1.0))))

    def estimate(self, lane: LaneId) -> CostEstimate | None:
        return self._paces[lane].fit.estimate()


@dataclass(slots=True)
class _Standing:
    """A lane during one plan, with what was left to it in this plan."""

    lane: Lane
    active: int
    slots: int
    blocks: int
    backlog: int


class Choice:
    def __init__(self, binding: Binding, lane: Lane, lanes: Mapping[LaneId, Lane], max_passes: int, now: int) -> None:
        self._binding = binding
        self._lanes = lanes
        self._now = now
        self._max_passes = max_passes
        self._here = lane
        self._others: list[Lane] | None = None  # nobody was looked at yet
        self._standings: dict[LaneId, _Standing] = {}
        self.closed = binding.closed(lane.id)

    def leaves(self, sequence: Sequence) -> bool:
        """Whether a sequence that this lane could take is for another one; that is counted."""
        if sequence.left >= LEFT_AT_MOST or sequence.passed >= self._max_passes or not self._looked_at():
            return False
        best = here = self._standing(self._here)
        soonest = self._ends_in(here, sequence)
        for other in self._looked_at():
            there = self._standing(other)
            if not self._has_room(there, sequence):
                continue
            ends = self._ends_in(there, sequence)
            if _beats(there, ends, best, soonest):
                best, soonest = there, ends
        if best is here:
            return False
        best.active += 1
        best.slots -= 1
        best.blocks -= _blocks(best.lane, sequence)
        best.backlog += sequence.known
        sequence.left += 1
        return True

    def has_room_elsewhere(self, sequence: Sequence) -> bool:
        """Whether another lane can take it as it is, so that nobody need make room here; that is counted too."""
        if sequence.left >= LEFT_AT_MOST or not any(
            self._has_room(self._standing(other), sequence) for other in self._looked_at()
        ):
            return False
        sequence.left += 1
        return True

    def took(self, sequence: Sequence) -> None:
        """This lane has taken it."""
        sequence.left = 0
        here = self._standings.get(self._here.id)
        if here is not None:
            here.active += 1
            here.backlog += sequence.missing

    def _looked_at(self) -> list[Lane]:
        if self._others is None:
            self._others = self._binding.others(self._here, self._lanes)
        return self._others

    def _standing(self, lane: Lane) -> _Standing:
        standing = self._standings.get(lane.id)
        if standing is None:
            standing = self._standings[lane.id] = _Standing(
                lane, len(lane.running), len(lane.free_slots), lane.cache.available, self._binding.backlog(lane)
            )
        return standing

    def _has_room(self, there: _Standing, sequence: Sequence) -> bool:
        spec = there.lane.spec
        if there.slots < 1 or sequence.bound > spec.max_model_len:
            return False
        return (
            spec.blocks_for(sequence.bound - 1) <= spec.total_blocks and _blocks(there.lane, sequence) <= there.blocks
        )

    def _ends_in(self, standing: _Standing, sequence: Sequence) -> int | None:
        """Nanoseconds until the sequence is expected to end there; None while its pace is not known."""
        lane = standing.lane
        estimate = self._binding.estimate(lane.id)
        if estimate is None:
            return None
        cached = len(lane.find(sequence)) * lane.spec.block_size
        prompts = standing.backlog + sequence.known - cached
        steps = -(-prompts // lane.spec.max_batched_tokens)
        begins = (
            self._binding.ready_in(lane, estimate, self._now) + steps * estimate.step_ns + prompts * estimate.token_ns
        )
        return begins + _output_left(sequence) * _step(estimate, standing.active + 1)


def _beats(there: _Standing, ends: int | None, best: _Standing, soonest: int | None) -> bool:
    if ends is not None and soonest is not None:
        if ends < CLEARLY * soonest:
            return True
        if soonest < CLEARLY * ends:
            return False
    return there.active < best.active


def _step(estimate: CostEstimate, tokens: int) -> int:
    return estimate.step_ns + tokens * estimate.token_ns


def _blocks(lane: Lane, sequence: Sequence) -> int:
    return lane.spec.blocks_for(sequence.known) - len(lane.find(sequence))


def _output_left(sequence: Sequence) -> int:
    """Tokens, expected. Where nothing is known it is as long as what is known of it: both lanes get the same."""
    left = sequence.bound - sequence.known
    if sequence.submission.max_tokens is not None:
        return left
    if sequence.expected_output is not None:
        return max(1, min(left, sequence.expected_output - sequence.delivered))
    return min(left, sequence.known)
