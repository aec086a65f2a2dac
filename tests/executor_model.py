"""What a model of the scheduler's core believes of users and executors; `scheduler_model` drives them.

Tokens are a hash of all that was before them, and an entry of the KV memory is that hash up to its own position. So who
reads what another wrote, from a cache or by mistake, reads the right thing or is caught.
"""

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.scheduler.core.calls import Finished, LaneSpec, Plan, PlannedSlice, StepOutcome, Submission


def grown(digest: int, token: int) -> int:
    """Of a history and one token more."""
    return (digest * 1_000_003 + token + 7) % ((1 << 61) - 1)


def drawn_from(digest: int) -> int:
    """The token that follows a history: of two, so that answers collide."""
    return (digest >> 7) & 1


def key_of(tenant: str, size: int, ids: Sequence[int]) -> bytes:
    return hashlib.sha1(repr((tenant, size, tuple(ids))).encode()).digest()[:8]


@dataclass(eq=False)
class User:
    """What one submission was promised and given."""

    submission: Submission
    ids: list[int]  # all that are known: prompt, resumed, given
    submitted_at: int = 0
    given: int = 0
    admitted: bool = False  # ever; or its answer had begun elsewhere
    last_token_at: int | None = None
    preempted: int = 0
    keyed: int = 0  # blocks whose keys the core was given
    finished: Finished | None = None

    def deliver(self, token: int, now: int) -> None:
        digest = 0
        for known in self.ids:
            digest = grown(digest, known)
        assert token == drawn_from(digest), "a token that its history does not demand"
        self.ids.append(token)
        self.given += 1
        self.last_token_at = now

    def new_keys(self) -> tuple[bytes, ...]:
        """Of blocks that became full since the last call."""
        size, full = self.submission.key_block_size, self.keyed
        self.keyed = len(self.ids) // size if size else 0
        return tuple(
            key_of(self.submission.tenant, size, self.ids[: (index + 1) * size]) for index in range(full, self.keyed)
        )

    def out_of_time(self, now: int) -> bool:
        limits, begun = self.submission.limits, self.last_token_at is not None
        return any(
            limit is not None and counts and since + limit <= now
            for limit, counts, since in (
                (limits.queue_ns, not self.admitted, self.submitted_at),
                (limits.first_token_ns, not begun, self.submitted_at),
                (limits.between_tokens_ns, begun, self.last_token_at or 0),
                (limits.total_ns, True, self.submitted_at),
            )
        )


@dataclass
class Slot:
    user: User
    next: int = 0  # position of the next slice
    table: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)  # of the history up to each position that was fed

    def feed(self, token: int) -> None:
        self.digests.append(grown(self.digests[-1] if self.digests else 0, token))


@dataclass
class Flight:
    """A step in flight: whose slices they are (a key may be used again meanwhile), and every block they reference."""

    plan: Plan
    owners: list[User]
    tables: list[list[int]]
    drawn: dict[str, int]  # tokens, by key


@dataclass
class Executor:
    """Runs steps when they come, answers them in order. `cells` is the KV memory, tagged with who wrote it."""

    spec: LaneSpec
    slots: dict[int, Slot] = field(default_factory=dict)
    cells: dict[tuple[int, int], int] = field(default_factory=dict)  # (block, offset) -> digest
    in_flight: deque[Flight] = field(default_factory=deque)
    steps: int = 0
    answered: StepOutcome | None = None  # the last one

    def run(self, plan: Plan, users: dict[str, User]) -> None:
        assert plan.slices
        assert plan.step_id == self.steps + 1
        self.steps = plan.step_id
        assert sum(piece.count for piece in plan.slices) + plan.padding <= self.spec.max_batched_tokens
        assert len({piece.slot for piece in plan.slices}) == len(plan.slices)
        assert len({piece.key for piece in plan.slices}) == len(plan.slices)
        if plan.preempted:
            assert all(piece.admitted for piece in plan.slices) or not plan.admitted, "preempted for an admission"
        assert [one.key for one in plan.admitted] == [piece.key for piece in plan.slices if piece.admitted]
        for preempted in plan.preempted:
            victim = users[preempted.key]
            assert all(victim not in flight.owners for flight in self.in_flight), "preempted while in flight"
            self.forget(victim)
        for piece in plan.slices:
            if piece.admitted:  # before anything of this step is written: what it finds is there already
                self.slots[piece.slot] = self._admit(users[piece.key], piece)
        drawn: dict[str, int] = {}
        for piece in plan.slices:
            assert 0 <= piece.slot < self.spec.max_sequences
            assert piece.count >= 1
            user = users[piece.key]
            assert user.finished is None
            slot = self.slots[piece.slot]
            assert slot.user is user, "a slot was taken over without being replaced"
            assert piece.start == slot.next, "a slice starts elsewhere than the last one ended"
            found = piece.start // self.spec.block_size if piece.admitted else 0
            for block in piece.new_block_ids[found:]:
                self._reassign(block)
            slot.table += piece.new_block_ids[found:]
            self._compute(slot, piece.start, piece.count)
            slot.next = piece.start + piece.count
            self._check_length(user, piece.start, piece.count, samples=piece.samples)
            if piece.samples:
                drawn[piece.key] = drawn_from(slot.digests[-1])
        owners = [users[piece.key] for piece in plan.slices]
        tables = [list(self.slots[piece.slot].table) for piece in plan.slices]
        self.in_flight.append(Flight(plan, owners, tables, drawn))

    def _admit(self, user: User, piece: PlannedSlice) -> Slot:
        size = self.spec.block_size
        assert piece.start % size == 0
        assert piece.start < len(user.ids), "nothing is left to draw from"
        if user.submission.scores_prompt and len(user.ids) == user.submission.prompt_len:
            assert piece.start == 0, "what is found gives no logprobs"
        assert not piece.start or user.submission.key_block_size == size, "found, and nothing was looked for"
        slot = Slot(user, piece.start, list(piece.new_block_ids[: piece.start // size]))
        for position, token in enumerate(user.ids[: piece.start]):
            slot.feed(token)
            self._read(slot, position)
        return slot

    def forget(self, user: User) -> None:
        for number in [number for number, slot in self.slots.items() if slot.user is user]:
            del self.slots[number]

    def _reassign(self, block: int) -> None:
        assert 0 <= block < self.spec.total_blocks
        for slot in self.slots.values():
            assert block not in slot.table, f"block {block} has a living owner"
        for flight in self.in_flight:
            for table in flight.tables:
                assert block not in table, f"block {block} is given away while step {flight.plan.step_id} uses it"

    def _compute(self, slot: Slot, start: int, count: int) -> None:
        size = self.spec.block_size
        assert start + count <= len(slot.table) * size, "positions without a block"
        for position in range(start, start + count):
            block = slot.table[position // size]
            for other in self.slots.values():
                assert other is slot or block not in other.table, f"block {block} is written while others read it"
            own = drawn_from(slot.digests[-1]) if slot.digests else 0
            slot.feed(slot.user.ids[position] if position < len(slot.user.ids) else own)
            self.cells[block, position % size] = slot.digests[position]
        for position in range(start + count):
            self._read(slot, position)

    def _read(self, slot: Slot, position: int) -> None:
        block = slot.table[position // self.spec.block_size]
        written = self.cells.get((block, position % self.spec.block_size))
        assert written == slot.digests[position], f"{slot.user} would read something else at position {position}"

    def _check_length(self, user: User, start: int, count: int, *, samples: bool) -> None:
        draws = sum(
            1
            for flight in self.in_flight
            for owner, piece in zip(flight.owners, flight.plan.slices, strict=True)
            if owner is user and piece.samples
        )
        length = len(user.ids) + draws
        assert start + count <= length
        assert samples == (start + count == length), "samples exactly at the last position"
        if start + count > len(user.ids):
            assert count == 1, "more than one id is not known to the shell"
        most = self.spec.max_model_len
        if user.submission.max_tokens is not None:
            most = min(most, user.submission.prompt_len + user.submission.max_tokens)
        assert length + int(samples) <= most, "a draw beyond max_tokens or the context"
