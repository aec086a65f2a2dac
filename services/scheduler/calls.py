"""What goes into the scheduler core and what comes out of it: frozen values of the standard library only.

The core knows lengths, never token ids: the shell keeps those. Times are nanoseconds of one monotonic clock that the
caller owns; the core only compares and subtracts them. A recording of these calls holds no text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

SequenceKey = str  # unique among live sequences; the shell derives it from (tenant, request id, attempt, index)
LaneId = str  # one executor lease: a new epoch is a new lane


@dataclass(frozen=True, slots=True)
class LaneSpec:
    """What one executor can hold and do in a step."""

    block_size: int  # tokens
    total_blocks: int
    max_batched_tokens: int  # a step
    max_sequences: int
    max_model_len: int  # tokens of one sequence, prompt and output together

    def __post_init__(self) -> None:
        for name in ("block_size", "total_blocks", "max_batched_tokens", "max_sequences"):
            _require(name, getattr(self, name), at_least=1)
        _require("max_model_len", self.max_model_len, at_least=2)

    def blocks_for(self, positions: int) -> int:
        """Blocks that hold so many positions."""
        return -(-positions // self.block_size)


@dataclass(frozen=True, slots=True)
class CoreConfig:
    policy: str = "fcfs"  # a row of policy.POLICIES
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1_000_000
    steps_in_flight: int = 2  # 1 or 2, a lane
    prefill_chunk: int = 256  # tokens of one sequence in one step, while others wait or run
    watermark: float = 0.02  # share of the pool that admission leaves free; running sequences may use it
    preemption_cap: int = 3  # after so many, a sequence is admitted only with its whole need reserved
    preemption_cooldown: int = 4  # steps after one that preempted in which a busy lane admits nobody
    default_output_estimate: int = 1024  # tokens assumed where max_tokens is absent

    def __post_init__(self) -> None:
        for name in ("max_queued_requests", "max_queued_tokens", "steps_in_flight", "prefill_chunk"):
            _require(name, getattr(self, name), at_least=1)
        _require("steps_in_flight", self.steps_in_flight, at_least=1, at_most=2)
        _require("watermark", self.watermark, at_least=0, at_most=0.5)
        _require("preemption_cap", self.preemption_cap, at_least=0)
        _require("preemption_cooldown", self.preemption_cooldown, at_least=0)
        _require("default_output_estimate", self.default_output_estimate, at_least=1)


class Reason(Enum):
    """Why a sequence ended. One terminal reason each."""

    STOP = "stop"  # stop id, or stop string found by the edge
    LENGTH = "length"  # max_tokens, or the model's context is full
    TIME_LIMIT = "time_limit"  # a limit passed after the first token: what there is stands
    DEADLINE = "deadline"  # a limit passed before the first token
    CANCELLED = "cancelled"
    ERROR = "error"  # the sequence's own failure on the executor
    DOES_NOT_FIT = "does_not_fit"  # the lanes changed while it waited, and none that is left can ever hold it


class Phase(Enum):
    QUEUE = "queue"  # waits for a lane, for the first time or again
    PREFILL = "prefill"  # computes what was known when it was (re-)admitted
    DECODE = "decode"


class TimeLimit(Enum):
    QUEUE = "queue"
    FIRST_TOKEN = "first_token"
    BETWEEN_TOKENS = "between_tokens"
    TOTAL = "total"


@dataclass(frozen=True, slots=True)
class Limits:
    """Durations in ns from submission (`between_tokens_ns`: from the last token). None: no limit."""

    queue_ns: int | None = None
    first_token_ns: int | None = None
    between_tokens_ns: int | None = None
    total_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Submission:
    key: SequenceKey
    tenant: str
    prompt_len: int  # tokens, >= 1
    max_tokens: int | None  # output tokens, >= 1; None: up to the context
    limits: Limits = Limits()
    priority: int = 0  # higher is sooner
    output_len: int = 0  # tokens already produced elsewhere and resumed here; they count against max_tokens


@dataclass(frozen=True, slots=True)
class Accepted:
    position: int  # sequences ahead of it in the queue
    max_tokens: int | None  # effective; None: no lane is attached, so nothing is known of the context yet


@dataclass(frozen=True, slots=True)
class PlannedSlice:
    """Positions [start, start + count) of one sequence. The shell adds the ids it knows.

    Where the shell does not know the id at `start`, that token is still in flight: then count is 1 and the executor
    feeds it itself. `new_block_ids` may reach beyond this slice (a whole need reserved at once).
    """

    key: SequenceKey
    slot: int
    start: int
    count: int
    new_block_ids: tuple[int, ...]
    samples: bool
    admitted: bool  # first slice since (re-)admission: the executor is told everything


@dataclass(frozen=True, slots=True)
class SequenceOutcome:
    """What a step did for one sequence that sampled."""

    slot: int
    tokens: int  # drawn: 1, or 0 where it failed
    ended: bool = False  # the last of them is a stop id
    failed: bool = False  # the sequence's own error


@dataclass(frozen=True, slots=True)
class StepOutcome:
    step_id: int
    outcomes: tuple[SequenceOutcome, ...]  # in the order of the plan's sampling slices


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one sequence, at its end. sampled = delivered + discarded.

    A draw in flight when the sequence ends counts as sampled and discarded: no one can call it back.
    """

    prompt_tokens: int
    delivered: int
    discarded: int
    cached_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0  # positions computed and thrown away by preemption or the loss of a lane
    prefill_chunks: int = 0


@dataclass(frozen=True, slots=True)
class Admitted:
    key: SequenceKey
    lane: LaneId
    waited_ns: int  # since it was (re-)queued
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """The sequence's drawn tokens of this step are to be delivered, `count` of them."""

    key: SequenceKey
    count: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """It made room for another and is back in the queue, at its arrival rank."""

    key: SequenceKey
    recompute_tokens: int


@dataclass(frozen=True, slots=True)
class Displaced:
    """Its lane was lost; it is back in the queue, at its arrival rank."""

    key: SequenceKey
    recompute_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    key: SequenceKey
    reason: Reason
    usage: Usage
    phase: Phase  # where it was
    limit: TimeLimit | None = None  # which time limit, for TIME_LIMIT and DEADLINE
    detail: str = ""  # the numbers, for DOES_NOT_FIT


Emission = Admitted | Tokens | Preempted | Displaced | Finished


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, never without slices: at most one a sequence, protected sequences first, admitted ones last."""

    step_id: int  # 1, 2, 3, ... within a lane
    slices: tuple[PlannedSlice, ...]
    admitted: tuple[Admitted, ...] = ()
    preempted: tuple[Preempted, ...] = ()


class SubmitError(Exception):
    """The request can't be taken. Names the field and the limit."""

    def __init__(self, field_name: str, message: str) -> None:
        super().__init__(message)
        self.field = field_name
        self.message = message


class InvalidSubmission(SubmitError):
    """A number makes no sense: the shell answers INVALID_ARGUMENT."""


class DoesNotFit(SubmitError):
    """It never can: the shell answers INVALID_ARGUMENT."""


class QueueFull(SubmitError):
    """It can't now: the shell answers RESOURCE_EXHAUSTED."""


class DuplicateKey(SubmitError):
    """A live sequence has this key: the shell answers ALREADY_EXISTS."""


class OutOfStep(Exception):
    """The lane's outcome answers no step that is next, or not the rows of that step: the lane is to be lost."""


class InvariantError(AssertionError):
    """The scheduler's own state is wrong. `story` holds the last calls that led here."""

    def __init__(self, message: str, story: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.story = story

    def __str__(self) -> str:
        return "\n  ".join((self.message, *self.story))


@dataclass(frozen=True, slots=True)
class LaneLoad:
    running: int
    steps_in_flight: int
    blocks_total: int
    blocks_live: int
    blocks_fenced: int  # released, still written by a step in flight
    blocks_free: int
    blocks_cached: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    waiting: int
    waiting_tokens: int
    lanes: Mapping[LaneId, LaneLoad] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One live sequence, as ListRequests shows it."""

    key: SequenceKey
    tenant: str
    priority: int
    phase: Phase
    lane: LaneId | None
    submitted_ns: int
    prompt_len: int
    delivered: int
    computed: int  # positions, those of steps in flight included
    blocks: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters since the start; each only grows. sampled = delivered + discarded + what live sequences delivered."""

    submitted: int = 0  # accepted ones
    finished: Mapping[Reason, int] = field(default_factory=dict)
    sampled: int = 0
    delivered: int = 0  # of finished sequences, as in their usage
    discarded: int = 0  # likewise
    steps: int = 0
    planned_tokens: int = 0  # positions in slices
    admissions: int = 0
    preemptions: int = 0
    displacements: int = 0
    recomputed_tokens: int = 0


def _require(name: str, value: float, *, at_least: float, at_most: float | None = None) -> None:
    if not value >= at_least:
        raise ValueError(f"{name} is {value}, below {at_least}")
    if at_most is not None and not value <= at_most:
        raise ValueError(f"{name} is {value}, above {at_most}")
