"""What goes into the scheduler core and what comes out of it: frozen values of the standard library only.

The core knows lengths, never token ids: the shell keeps those. Times are nanoseconds of one monotonic clock that the
caller owns; the core only compares and subtracts them. A recording of these calls holds no text.
"""

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
    max_model_len: int  # tokens of one sequence


@dataclass(frozen=True, slots=True)
class CoreConfig:
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1_000_000
    steps_in_flight: int = 2
    prefill_chunk: int = 256  # tokens of one sequence in one step, while others wait or run
    watermark: float = 0.02  # share of the pool that admission leaves free; running sequences may use it
    preemption_cap: int = 3  # after so many, a sequence is admitted only with its whole need reserved
    default_output_estimate: int = 1024  # tokens assumed where max_tokens is absent


class Reason(Enum):
    """Why a sequence ended. One terminal reason each."""

    STOP = "stop"  # stop id, or stop string found by the edge
    LENGTH = "length"  # max_tokens, or the model's context is full
    TIME_LIMIT = "time_limit"  # a limit passed after the first token: what there is stands
    DEADLINE = "deadline"  # a limit passed before the first token
    CANCELLED = "cancelled"
    ERROR = "error"  # the sequence's own failure on the executor


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
    max_tokens: int  # effective


@dataclass(frozen=True, slots=True)
class PlannedSlice:
    """Positions [start, start + count) of one sequence. The shell adds the ids it knows.

    The last position's input may be a token still in flight: then count is 1 and the executor feeds it itself.
    """

    key: SequenceKey
    slot: int
    start: int
    count: int
    new_block_ids: tuple[int, ...]
    samples: bool
    admitted: bool  # first slice since (re-)admission: the executor is told everything


@dataclass(frozen=True, slots=True)
class Plan:
    step_id: int  # 1, 2, 3, ... within a lane
    slices: tuple[PlannedSlice, ...]
    preempted: tuple[SequenceKey, ...] = ()  # victims of this plan, already back in the queue


@dataclass(frozen=True, slots=True)
class SequenceOutcome:
    """What a step did for one sequence that sampled."""

    slot: int
    tokens: int  # drawn
    ended: bool = False  # the last of them is a stop id
    failed: bool = False  # the sequence's own error


@dataclass(frozen=True, slots=True)
class StepOutcome:
    step_id: int
    outcomes: tuple[SequenceOutcome, ...]  # in the order of the plan's sampling slices


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one sequence, at its end. sampled = delivered + discarded."""

    prompt_tokens: int
    delivered: int
    discarded: int
    cached_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
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
    key: SequenceKey
    recompute_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    key: SequenceKey
    reason: Reason
    usage: Usage
    phase: str  # where it was: "queue", "prefill", "decode"
    limit: TimeLimit | None = None  # which time limit, for TIME_LIMIT and DEADLINE


Emission = Admitted | Tokens | Preempted | Finished


class SubmitError(Exception):
    """The request can't be taken. Names the field and the limit."""

    def __init__(self, field_name: str, message: str) -> None:
        super().__init__(message)
        self.field = field_name
        self.message = message


class DoesNotFit(SubmitError):
    """It never can: the shell answers INVALID_ARGUMENT."""


class QueueFull(SubmitError):
    """It can't now: the shell answers RESOURCE_EXHAUSTED."""


class DuplicateKey(SubmitError):
    """A live sequence has this key: the shell answers ALREADY_EXISTS."""


@dataclass(frozen=True, slots=True)
class LaneLoad:
    running: int
    steps_in_flight: int
    blocks_total: int
    blocks_live: int
    blocks_cached: int
    blocks_fenced: int  # released, still written by a step in flight
    blocks_free: int


@dataclass(frozen=True, slots=True)
class Load:
    waiting: int
    waiting_tokens: int
    lanes: dict[LaneId, LaneLoad] = field(default_factory=dict)
