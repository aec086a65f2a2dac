"""The mutable state of one sequence. The core owns it; nothing outside the scheduler's pure modules sees it.

Knows lengths, never ids. Ranges of positions, for a placed sequence:

    [0, computed)       K and V are written, or will be by a step in flight
    [0, confirmed)      K and V are written: found in the cache, or the step that computed them was applied
    [computed, length)  known or in flight, to be computed: what a slice takes from
    [0, known)          ids are in the shell's hands: prompt, resumed output, delivered tokens
    [known, length)     placeholders: drawn by steps in flight, at most one a step
    [0, limit)          what it may ever reach; the token at limit - 1 is drawn and never computed
"""

from dataclasses import dataclass, field

from services.scheduler.core.calls import (
    BlockKey,
    InvariantError,
    LaneId,
    Phase,
    SequenceKey,
    SequenceView,
    Submission,
    Tokens,
    Usage,
)


@dataclass(slots=True, eq=False)
class Placement:
    """A sequence's stay in one lane, from admission until it ends, is preempted or loses the lane."""

    sequence: "Sequence"
    lane: LaneId
    slot: int
    rank: tuple[int, int]  # lower is better protected: (policy.protection, number of the admission)
    settled: int  # known tokens at admission: computing them is prefill
    reserved: bool = False  # blocks hold its whole need since admission; so it is never a victim
    blocks: list[int] = field(default_factory=list)  # cover [0, computed); exactly, unless reserved
    computed: int = 0
    confirmed: int = 0
    published: int = 0  # blocks at the head of the table that the prefix cache knows of
    expected: int = 0  # blocks that it will never hold more than, if its output is as long as is expected
    pending: int = 0  # draws in flight; while there are any, computed >= known
    last_step: int = 0  # the last planned step with a slice of it

    @property
    def alive(self) -> bool:
        """Whether the sequence is still here. It may have ended, or have another placement."""
        return self.sequence.placement is self


@dataclass(slots=True, eq=False)
class Sequence:
    submission: Submission
    arrival: int  # rank in the order of submission, kept through preemption
    submitted_at: int
    queued_at: int  # since when it waits, or waited last
    limit: int | None  # tokens, prompt and output. None: no lane was attached since submission. Never grows
    placement: Placement | None = None  # None: it waits
    delivered: int = 0  # tokens drawn here and given out
    last_token_at: int | None = None  # None until the first token drawn here
    admitted: bool = False  # ever
    sibling: bool = False  # of a sequence with the same prompt, which pays for that
    preemptions: int = 0
    recomputed: int = 0  # positions
    expected_output: int | None = None  # tokens, where max_tokens is absent and its tenant's past says something
    charged: bool = False  # somebody began to compute it, so its tenant pays for the prompt
    paid: int = 0  # positions of the prompt that its tenant was charged for, or had in a cache
    deposit: int = 0  # of its tenant, for a running sequence: what it is about to cost
    aged: int = 0  # how often waiting bettered its class
    aged_at: int = 0  # when it did last, or when the wait began
    passed: int = 0  # admissions of others that it stood before in the queue
    claimed: LaneId | None = None  # the lane that made room for it
    left: int = 0  # plans of lanes that could take it and left it to a better one, since it last ran
    prefill_chunks: int = 0
    cached: int | None = None  # prompt tokens found in the cache at the first admission
    given_up: int = 0  # positions computed when it lost its last placement
    block_keys: list[BlockKey] = field(default_factory=list)  # of the full blocks of what is known; may lag behind
    key: SequenceKey = field(init=False)
    token: Tokens = field(init=False)  # what is told when one is delivered
    known: int = field(init=False)  # tokens: prompt, resumed output, delivered

    def __post_init__(self) -> None:
        self.block_keys = list(self.submission.block_keys)
        self.aged_at = self.queued_at
        self.key = self.submission.key
        self.token = Tokens(self.key, 1)
        self.known = self.submission.prompt_len + self.submission.output_len

    def deliver(self, tokens: int, now: int) -> None:
        self.delivered += tokens
        self.known += tokens
        self.last_token_at = now

    @property
    def bound(self) -> int:
        """The limit, of a sequence that may be planned."""
        if self.limit is None:
            raise InvariantError(f"{self.key} is looked at for a lane before its limit is known")
        return self.limit

    @property
    def length(self) -> int:
        return self.known + (0 if self.placement is None else self.placement.pending)

    @property
    def target(self) -> int:
        """Positions to be computed, as far as is known now."""
        return min(self.length, self.bound - 1)

    @property
    def missing(self) -> int:
        """The one idea: computed chases the length."""
        placement, limit = self.placement, self.limit
        if placement is None or limit is None:
            return min(self.known, self.bound - 1)
        length = self.known + placement.pending
        return (length if length < limit else limit - 1) - placement.computed

    @property
    def phase(self) -> Phase:
        if self.placement is None:
            return Phase.QUEUE
        return Phase.PREFILL if self.placement.computed < self.placement.settled else Phase.DECODE

    @property
    def scores(self) -> bool:
        """Whether its prompt's logprobs are still to come, so that nothing of it may be taken from a cache. The first
        token comes with the last of them."""
        submission = self.submission
        return submission.scores_prompt and not self.delivered and not submission.output_len

    @property
    def continues(self) -> bool:
        """Whether it is a turn of a session: it found a third of its prompt or more when it first came in. One that
        found nothing may begin a session, or never be heard of again: there is no way to tell."""
        return 3 * (self.cached or 0) >= self.submission.prompt_len

    def placed(self) -> Placement:
        if self.placement is None:
            raise InvariantError(f"{self.key} has no placement")
        return self.placement

    def ahead(self, cached: int) -> tuple[int, int]:
        """Of a waiting one: tokens of its prompt to be paid for, with `cached` found, and of output, as expected."""
        given = self.submission.prompt_len + self.submission.output_len
        left = self.bound - self.known
        if self.submission.max_tokens is None and self.expected_output is not None:
            left = max(1, min(left, self.expected_output - self.delivered))
        return max(0, given - max(cached, self.paid)), left

    def pay(self, start: int, end: int) -> int:
        """[start, end) is computed: how much of it is to be charged. What is computed again was paid for."""
        given = self.submission.prompt_len + self.submission.output_len
        due = min(end, given) - max(start, self.paid)
        self.paid = max(self.paid, min(end, given))
        return max(0, due)

    def start_from_cache(self, start: int) -> None:
        """Placed with [0, start) found in the cache."""
        placement = self.placed()
        placement.computed = placement.confirmed = start
        if self.cached is None:
            self.cached = min(start, self.submission.prompt_len)
        self.recomputed -= min(start, self.given_up)
        self.given_up = 0

    def displace(self, now: int) -> int:
        """Back to waiting; the caller has seen to blocks and slot. Returns the positions to be computed again."""
        recompute = self.placed().computed
        self.placement = None
        self.recomputed += recompute
        self.given_up = recompute
        self.queued_at = self.aged_at = now
        return recompute

    def usage(self, kept: int) -> Usage:
        """At its end, with `kept` of the delivered tokens standing."""
        pending = 0 if self.placement is None else self.placement.pending
        return Usage(
            prompt_tokens=self.submission.prompt_len,
            delivered=kept,
            discarded=self.delivered - kept + pending,
            cached_tokens=self.cached or 0,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed,
            prefill_chunks=self.prefill_chunks,
        )

    def view(self) -> SequenceView:
        placement = self.placement
        return SequenceView(
            key=self.key,
            tenant=self.submission.tenant,
            priority=self.submission.priority,
            phase=self.phase,
            lane=None if placement is None else placement.lane,
            submitted_ns=self.submitted_at,
            prompt_len=self.submission.prompt_len,
            delivered=self.delivered,
            computed=0 if placement is None else placement.computed,
            blocks=0 if placement is None else len(placement.blocks),
            preemptions=self.preemptions,
        )
