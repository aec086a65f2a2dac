"""What goes into the scheduler core and what comes out of it: frozen values of the standard library only.

The core knows lengths, never token ids: the shell keeps those. Times are nanoseconds of one monotonic clock that the
caller owns; the core only compares and subtracts them. A recording of these calls holds no text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from services.scheduler.core.limits import LadderConfig, Rung, SessionLease, TenantQuota, require

SequenceKey = str  # unique among live sequences; the shell derives it from (tenant, request id, attempt, index)
LaneId = str  # one executor lease: a new epoch is a new lane
BlockKey = bytes  # stands for a full block's tokens, all tokens before them, and whose they are


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
            require(name, getattr(self, name), at_least=1)
        require("max_model_len", self.max_model_len, at_least=2)

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
    learn_output: bool = False  # what each tenant's answers used to be (P90) instead, once there are enough
    max_queued_bytes: int = 1 << 30
    aging_ns: int = 15_000_000_000  # wait after which a class is bettered; four of them lead to the best
    max_passes: int = 16  # admissions that may go by a waiting sequence which can't be afforded, or has little cached
    long_prompt_tokens: int = 2048  # a prompt with more to compute is long
    long_prompt_share: float = 0.5  # of the tokens of a step that prompts get, what long ones share
    default_quota: TenantQuota = field(default_factory=TenantQuota)
    quotas: Mapping[str, TenantQuota] = field(default_factory=dict)  # by tenant
    ladder: LadderConfig = field(default_factory=LadderConfig)
    tenant_cache_share: float = 1.0  # of a pool: cached blocks that nobody holds, and pinned ones, of one tenant
    session_lease_ns: int = 0  # most for which a session that pauses keeps its blocks by itself; 0: it does not
    session_lease_full_below: float = 0.5  # pressure on a pool from which on that time shrinks
    kv_events: bool = False  # whether `take_kv_events` has something to give; who sets it must take them

    def __post_init__(self) -> None:
        for name in (
            *("max_queued_requests", "max_queued_tokens", "max_queued_bytes", "steps_in_flight", "prefill_chunk"),
            *("aging_ns", "long_prompt_tokens"),
        ):
            require(name, getattr(self, name), at_least=1)
        require("steps_in_flight", self.steps_in_flight, at_least=1, at_most=2)
        require("watermark", self.watermark, at_least=0, at_most=0.5)
        require("long_prompt_share", self.long_prompt_share, at_least=0.01, at_most=1)
        require("max_passes", self.max_passes, at_least=0)
        require("preemption_cap", self.preemption_cap, at_least=0)
        require("preemption_cooldown", self.preemption_cooldown, at_least=0)
        require("default_output_estimate", self.default_output_estimate, at_least=1)
        require("tenant_cache_share", self.tenant_cache_share, at_least=0, at_most=1)
        require("session_lease_ns", self.session_lease_ns, at_least=0)
        require("session_lease_full_below", self.session_lease_full_below, at_least=0, at_most=0.99)

    @property
    def session_lease(self) -> SessionLease:
        return SessionLease(self.session_lease_ns, self.session_lease_full_below)


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
class Sibling:
    """A further answer to the same prompt. output_len, block_keys: as in Submission."""

    key: SequenceKey
    output_len: int = 0
    block_keys: tuple[BlockKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Submission:
    """A request: one sequence, or several that share a prompt. They come in together or not at all, and then each goes
    its own way; the prefix cache is how they share what is computed."""

    key: SequenceKey
    tenant: str
    prompt_len: int  # tokens, >= 1
    max_tokens: int | None  # output tokens, >= 1; None: up to the context
    limits: Limits = Limits()
    priority: int = 0  # higher is sooner
    output_len: int = 0  # tokens already produced elsewhere and resumed here; they count against max_tokens
    size_bytes: int = 0  # memory that the caller's message takes while it waits
    others: tuple[Sibling, ...] = ()
    resumed: bool = False  # its caller was told how many answers come
    scores_prompt: bool = False  # of the first: logprobs of the prompt's tokens, so it computes all of them itself
    # Keys of the full blocks of what is known, in order, for blocks of `key_block_size` tokens. A lane with blocks of
    # another size makes nothing of them. Without keys nothing is looked up and nothing published.
    block_keys: tuple[BlockKey, ...] = ()
    key_block_size: int = 0

    def each(self) -> "tuple[Submission, ...]":
        """One for each sequence. The message's memory is the first's."""
        if not self.others:
            return (self,)
        first = replace(self, others=())
        rest = replace(first, size_bytes=0, scores_prompt=False)
        others = (replace(rest, key=o.key, output_len=o.output_len, block_keys=o.block_keys) for o in self.others)
        return (first, *others)


@dataclass(frozen=True, slots=True)
class Accepted:
    position: int  # sequences ahead of it in the queue
    max_tokens: int | None  # effective; None: no lane is attached, so nothing is known of the context yet
    degraded: tuple[Rung, ...] = ()  # what it goes without, mildest first
    answers: int = 1  # sequences that came in: the first so many


class PlannedSlice(NamedTuple):  # one for each row of each step: a frozen dataclass takes three times as long to make
    """Positions [start, start + count) of one sequence. The shell adds the ids it knows.

    Where the shell does not know the id at `start`, that token is still in flight: then count is 1 and the executor
    feeds it itself. `new_block_ids` may reach beyond this slice (a whole need reserved at once). An admitted slice that
    starts at s > 0 begins with s // block_size blocks that hold positions [0, s) already.
    """

    key: SequenceKey
    slot: int
    start: int
    count: int  # type: ignore[assignment]  # nobody asks how often a value is in this tuple
    new_block_ids: tuple[int, ...]
    samples: bool
    admitted: bool  # first slice since (re-)admission: the executor is told everything


class SequenceOutcome(NamedTuple):
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
    cached_tokens: int = 0  # of the prompt, found in the prefix cache at the first admission
    preemptions: int = 0
    # Positions computed, then thrown away by preemption or the loss of a lane, and not found again in the cache.
    recomputed_tokens: int = 0
    prefill_chunks: int = 0


@dataclass(frozen=True, slots=True)
class Admitted:
    key: SequenceKey
    lane: LaneId
    waited_ns: int  # since it was (re-)queued
    cached_tokens: int = 0  # positions found in the prefix cache, at this admission


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


@dataclass(frozen=True, slots=True)
class KvStored:
    """Blocks of a lane that can now be found, in chain order behind `parent` (empty: they start a sequence)."""

    lane: LaneId
    keys: tuple[BlockKey, ...]
    parent: BlockKey
    block_size: int  # tokens


@dataclass(frozen=True, slots=True)
class KvRemoved:
    """Blocks of a lane that can't be found any more."""

    lane: LaneId
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class KvCleared:
    """A lane is gone, and all its blocks."""

    lane: LaneId


KvEvent = KvStored | KvRemoved | KvCleared
Emission = Admitted | Tokens | Preempted | Displaced | Finished


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, never without slices: at most one a sequence, protected sequences first, admitted ones last."""

    step_id: int  # 1, 2, 3, ... within a lane
    slices: tuple[PlannedSlice, ...]
    admitted: tuple[Admitted, ...] = ()
    preempted: tuple[Preempted, ...] = ()
    padding: int = 0  # rows of a padded batch that have ended: a padded executor would compute a token for each


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
    blocks_cached: int = 0  # held by nobody, found by the prefix cache; they count as available
    blocks_leased: int = 0  # of them, kept for sessions that pause


@dataclass(frozen=True, slots=True)
class Load:
    waiting: int
    waiting_tokens: int
    lanes: Mapping[LaneId, LaneLoad] = field(default_factory=dict)
    policy: str = "fcfs"
    rungs: tuple[Rung, ...] = ()  # of the ladder, in force


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
    recomputed_tokens: int = 0  # positions given up by preemption or loss, found again later or not
    cached_tokens: int = 0  # positions found in the prefix cache, of all admissions
    looked_up_tokens: int = 0  # positions of those admissions, found or not
    rungs_taken: int = 0  # of the ladder
    rungs_released: int = 0
