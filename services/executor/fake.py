"""A runner without a model: real block tables and a real (small) store, invented tokens.

Owns the fake paged store with an ownership tag on every entry, and the fault points. Must not know gRPC, nor torch.
Invariant: in mode "hash" a drawn token depends on the whole history as read back through the slot's block table, so
a lost, doubled, foreign or stale entry changes every later token and is written down in `violations`.

Bad steps are refused as by the real runner (`BadStep`); `violations` holds what a real pool could not notice.
"""

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import log
from types import MappingProxyType
from typing import Final

from executor.step import (
    Capacity,
    NewSequence,
    RowError,
    RowErrorCode,
    Slice,
    SliceResult,
    Step,
    StepResult,
    StepTimings,
    TokenLogprobs,
)
from services.executor.fake_tokens import MODES, Draw, fake_prompt_logprobs

SMALL: Final = Capacity(
    block_size=4, total_blocks=64, max_batched_tokens=64, max_sequences=8, max_model_len=128, vocab_size=1000
)
KEPT_STEPS: Final = 10_000


class BadStep(ValueError):
    """A step that breaks the contract."""


class InjectedFault(RuntimeError):
    """The fault point `crash`."""


@dataclass(frozen=True, slots=True)
class At:
    """When a fault happens: at the step with this id (of any epoch), or at the count-th run, from 1, of the process."""

    step_id: int | None = None
    count: int | None = None

    def now(self, step_id: int, count: int) -> bool:
        return step_id == self.step_id or count == self.count


@dataclass(frozen=True, slots=True)
class Faults:
    """Fault points of the runner. Replace the runner's `faults` at any time.

    hang: the step waits for `FakeRunner.release`. die: `on_die` is called in mid-step. crash: InjectedFault. nan:
    the rows of these slots fail, in every step or at `nan_at`. delay_s, delay_per_token_s: how long a step takes.
    """

    hang: At | None = None
    die: At | None = None
    crash: At | None = None
    nan_slots: frozenset[int] = frozenset()
    nan_at: At | None = None
    delay_s: float = 0.0
    delay_per_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Entry:
    """What one position of a block holds: the token, its position, who wrote it, and what came before it."""

    slot: int
    generation: int  # counts the sequences that the runner has seen
    position: int
    token_id: int
    history: int = 0  # a hash of all tokens up to this one: keys and values depend on each of them


@dataclass(frozen=True, slots=True)
class Violation:
    """An access that would have been silent corruption. found: what lay there instead."""

    kind: str  # "missing", "foreign", "wrong position", "other history", "written twice"
    step_id: int
    slot: int
    position: int
    block_id: int
    found: Entry | None


@dataclass(slots=True)
class _Slot:
    generation: int
    new: NewSequence
    cached: list[int]  # hashes of the history at the positions that others wrote
    block_table: list[int] = field(default_factory=list)
    computed: int = 0  # positions written, here or for others
    history: int = 0  # hash of the tokens of those
    drawn: int | None = None  # the token drawn last, not yet computed
    error: RowError | None = None  # of the last draw: a step already in flight fails in this row again

    def scores(self, piece: Slice) -> bool:
        return piece.scores(self.new.sampling, self.new.prompt_len)


class FakeRunner:
    """A `services.executor.worker.StepRunner`.

    mode: a key of MODES. scripts: ids to play per prompt; the empty prompt's are for all others. eos_every: in mode
    "hash" one draw in so many is a stop id; None: never. on_die: what the fault point `die` calls.

    For tests, safe to read from other threads: `violations`, `steps` (the last KEPT_STEPS), `resets`, `count`;
    `entered` is set while a step hangs, `release()` lets it go on.
    """

    def __init__(
        self,
        mode: str = "hash",
        capacity: Capacity = SMALL,
        *,
        scripts: Mapping[tuple[int, ...], Sequence[int]] = MappingProxyType({}),
        eos_every: int | None = None,
        faults: Faults = Faults(),
        on_die: Callable[[], None] | None = None,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} is none of {', '.join(MODES)}")
        self.faults = faults
        self.violations: list[Violation] = []
        self.steps: deque[Step] = deque(maxlen=KEPT_STEPS)
        self.resets = 0
        self.count = 0
        self.entered = threading.Event()
        self._mode = mode
        self._capacity = capacity
        self._scripts = dict(scripts)
        self._eos_every = eos_every
        self._on_die = on_die
        self._released = threading.Event()
        self._generations = 0
        self._slots: dict[int, _Slot] = {}
        self._store: dict[int, dict[int, Entry]] = {}

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def numerics(self) -> str:
        parts = (self._mode, self._capacity.vocab_size, self._eos_every, sorted(self._scripts.items()))
        return f"fake-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"

    @property
    def entries(self) -> int:
        """Positions that the pool holds."""
        return sum(len(block) for block in self._store.values())

    def release(self) -> None:
        """Let the hanging step, and later ones, go on until `rearm`."""
        self._released.set()

    def rearm(self) -> None:
        """The next fault `hang` hangs again."""
        self._released.clear()
        self.entered.clear()

    def reset(self) -> None:
        self._slots.clear()
        self._store.clear()
        self.resets += 1

    def run(self, step: Step) -> StepResult:
        started = time.monotonic_ns()
        self.count += 1
        self.steps.append(step)
        self._check(step)
        self._play_faults(step)
        prepared = time.monotonic_ns()
        written: set[tuple[int, int]] = set()
        for piece in step.slices:
            self._enter(piece)
        # Every write comes before every read, as within a layer: a step that gives one block to two sequences shows.
        for piece in step.slices:
            self._write(step.step_id, piece, written)
        forward = time.monotonic_ns()
        results = tuple(
            self._result(step.step_id, piece)
            for piece in step.slices
            if piece.samples or self._slots[piece.slot].scores(piece)
        )
        return StepResult(
            step.step_id,
            results,
            StepTimings(0, prepared - started, forward - prepared, time.monotonic_ns() - forward),
        )

    def _check(self, step: Step) -> None:
        """Everything that can be wrong, before anything is changed."""
        capacity = self._capacity
        total = sum(piece.count for piece in step.slices)
        _require(total <= capacity.max_batched_tokens, f"{total} tokens; the limit is {capacity.max_batched_tokens}")
        slots = [piece.slot for piece in step.slices]
        _require(bool(slots), "the step has no slices")
        _require(len(set(slots)) == len(slots), "a slot comes twice")
        for piece in step.slices:
            self._check_slice(piece)

    def _check_slice(self, piece: Slice) -> None:
        capacity = self._capacity
        where = f"slot {piece.slot}"
        _require(piece.slot < capacity.max_sequences, f"{where}: there are {capacity.max_sequences} slots")
        _require(piece.count >= 1, f"{where}: count is 0")
        slot = None if piece.new is not None else self._slots.get(piece.slot)
        _require(piece.new is not None or slot is not None, f"{where} holds no sequence")
        cached = 0 if piece.new is None else len(piece.new.cached_token_ids)
        computed = cached if slot is None else slot.computed
        _require(piece.start == computed, f"{where}: start is {piece.start}, {computed} positions are computed")
        end = piece.start + piece.count
        _require(end <= capacity.max_model_len, f"{where}: position {end} is beyond {capacity.max_model_len}")
        if piece.token_ids:
            _require(len(piece.token_ids) == piece.count, f"{where}: {len(piece.token_ids)} ids for {piece.count}")
        else:
            fed = slot is not None and (slot.drawn is not None or slot.error is not None)
            _require(piece.count == 1 and fed, f"{where}: no ids, and no drawn token to go on with")
        if piece.new is not None:
            self._check_new(where, piece.new)
        new = piece.new or (slot.new if slot is not None else None)
        if new is not None and piece.samples:
            _require(end >= new.prompt_len, f"{where}: a draw at {end}, inside the prompt of {new.prompt_len}")
        for token_id in piece.token_ids:
            _require(token_id < capacity.vocab_size, f"{where}: token {token_id} of {capacity.vocab_size}")
        for block_id in piece.new_block_ids:
            _require(block_id < capacity.total_blocks, f"{where}: block {block_id} of {capacity.total_blocks}")
        table = [*(() if slot is None else slot.block_table), *piece.new_block_ids]
        _require(len(set(table)) == len(table), f"{where}: a block comes twice in its table")
        room = len(table) * capacity.block_size
        _require(end <= room, f"{where}: position {end} is beyond the {room} of its blocks")

    def _check_new(self, where: str, new: NewSequence) -> None:
        vocab_size = self._capacity.vocab_size
        cached, block_size = new.cached_token_ids, self._capacity.block_size
        _require(not len(cached) % block_size, f"{where}: {len(cached)} cached ids in blocks of {block_size}")
        for token_id in cached:
            _require(token_id < vocab_size, f"{where}: cached token {token_id} of {vocab_size}")
        scores = new.sampling.prompt_logprobs is not None
        _require(not (scores and cached), f"{where}: prompt logprobs, and {len(cached)} positions are cached")
        _require(new.prompt_len >= 1, f"{where}: prompt_len is {new.prompt_len}")
        named = [*new.sampling.stop_token_ids, *(token_id for token_id, _ in new.sampling.logit_bias)]
        for token_id in named:
            _require(token_id < vocab_size, f"{where}: sampling names token {token_id} of {vocab_size}")

    def _play_faults(self, step: Step) -> None:
        faults = self.faults
        tokens = sum(piece.count for piece in step.slices)
        delay_s = faults.delay_s + faults.delay_per_token_s * tokens
        if delay_s > 0:
            time.sleep(delay_s)
        if faults.hang is not None and faults.hang.now(step.step_id, self.count):
            self.entered.set()
            self._released.wait()
        if faults.die is not None and faults.die.now(step.step_id, self.count) and self._on_die is not None:
            self._on_die()
        if faults.crash is not None and faults.crash.now(step.step_id, self.count):
            raise InjectedFault(f"step {step.step_id}")

    def _enter(self, piece: Slice) -> None:
        if piece.new is not None:
            self._generations += 1
            cached = list(accumulate(piece.new.cached_token_ids, _extended, initial=0))
            history = cached[-1]
            self._slots[piece.slot] = _Slot(
                self._generations, piece.new, cached[1:], computed=len(cached) - 1, history=history
            )
        self._slots[piece.slot].block_table.extend(piece.new_block_ids)

    def _write(self, step_id: int, piece: Slice, written: set[tuple[int, int]]) -> None:
        slot = self._slots[piece.slot]
        token_ids: Sequence[int] = piece.token_ids or (slot.drawn or 0,)
        for position, token_id in enumerate(token_ids, piece.start):
            block_id, offset = self._place(slot, position)
            block = self._store.setdefault(block_id, {})
            if (block_id, offset) in written:
                found = block.get(offset)
                self.violations.append(Violation("written twice", step_id, piece.slot, position, block_id, found))
            written.add((block_id, offset))
            slot.history = _extended(slot.history, token_id)
            block[offset] = Entry(piece.slot, slot.generation, position, token_id, slot.history)
        slot.computed = piece.start + piece.count
        slot.drawn = None
        if piece.token_ids:
            slot.error = None

    def _result(self, step_id: int, piece: Slice) -> SliceResult:
        """A draw, logprobs of the prompt, or both."""
        slot = self._slots[piece.slot]
        scores: tuple[TokenLogprobs, ...] = ()
        if slot.scores(piece):
            first, end = max(piece.start, 1), min(slot.computed, slot.new.prompt_len)
            history = [self._read(step_id, piece.slot, slot, position) for position in range(end)]
            top = slot.new.sampling.prompt_logprobs or 0
            scores = tuple(fake_prompt_logprobs(history[:at], history[at], top) for at in range(first, end))
        if piece.samples:
            return replace(self._sample(step_id, piece), prompt_logprobs=scores)
        if self._is_nan(step_id, piece.slot):
            return SliceResult(piece.slot, (), error=RowError(RowErrorCode.NAN_LOGITS, "the logits hold NaN"))
        return SliceResult(piece.slot, (), prompt_logprobs=scores)

    def _sample(self, step_id: int, piece: Slice) -> SliceResult:
        slot = self._slots[piece.slot]
        history = [self._read(step_id, piece.slot, slot, position) for position in range(slot.computed)]
        if self._is_nan(step_id, piece.slot):
            slot.error = RowError(RowErrorCode.NAN_LOGITS, "the logits hold NaN")
        if slot.error is not None:
            return SliceResult(piece.slot, (), error=slot.error)
        sampling = slot.new.sampling
        token_id = MODES[self._mode](
            Draw(
                history,
                slot.new.prompt_len,
                slot.computed,
                sampling,
                self._capacity.vocab_size,
                self._eos_every,
                self._scripts,
            )
        )
        slot.drawn = token_id
        return SliceResult(piece.slot, (token_id,), self._logprobs(token_id, sampling.logprobs))

    def _read(self, step_id: int, slot_index: int, slot: _Slot, position: int) -> int:
        block_id, offset = self._place(slot, position)
        found = self._store.get(block_id, {}).get(offset)
        kind = None
        if found is None:
            kind = "missing"
        elif position < len(slot.cached):
            if found.position != position:
                kind = "wrong position"
            elif found.history != slot.cached[position]:
                kind = "other history"
        elif (found.slot, found.generation) != (slot_index, slot.generation):
            kind = "foreign"
        elif found.position != position:
            kind = "wrong position"
        if kind is not None:
            self.violations.append(Violation(kind, step_id, slot_index, position, block_id, found))
        return 0 if found is None else found.token_id

    def _place(self, slot: _Slot, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self._capacity.block_size)
        return slot.block_table[index], offset

    def _is_nan(self, step_id: int, slot: int) -> bool:
        faults = self.faults
        return slot in faults.nan_slots and (faults.nan_at is None or faults.nan_at.now(step_id, self.count))

    def _logprobs(self, token_id: int, top: int | None) -> tuple[TokenLogprobs, ...]:
        """The drawn id has probability 1/2, the ids after it 1/4, 1/8, ..."""
        if top is None:
            return ()
        vocab_size = self._capacity.vocab_size
        ranked = tuple(((token_id + rank) % vocab_size, -(rank + 1) * log(2)) for rank in range(min(top, vocab_size)))
        return (TokenLogprobs(-log(2), ranked),)


def _extended(history: int, token_id: int) -> int:
    return hash((history, token_id))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BadStep(message)
