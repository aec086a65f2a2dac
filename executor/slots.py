"""What each sequence on the executor is: its tokens, its block table, its sampling parameters.

Owns: the check of a step against this state, and its advance. Must not know: models, the wire.
Invariant: a step is checked whole before any of it changes a slot; a step that raises has changed nothing.

Of a slot with `computed` positions in the cache:
    tokens[0 : computed)    inputs whose keys and values are in the pages; the first of them may have been written for
                            another sequence with the same start
    drawn                   the token at position `computed`, if the last slice sampled; not yet an input
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from executor.batch import SequenceRows
from executor.grammar.grammars import Grammars
from executor.grammar.masks import Matching
from executor.step import Capacity, NewSequence, RowError, SamplingParams, Slice, Step
from kernels.sampling import SampledSequence


class StepError(ValueError):
    """A step that the sender must not have sent: the message names the field and the limit. No state changed."""


@dataclass(slots=True)
class Slot:
    sequence: SampledSequence
    block_table: "array[int]"  # type code "i"
    drawn: int | None = None
    error: RowError | None = None  # of the last draw: a step sent before that was known fails in this row again
    matching: Matching | None = None  # its place in its grammar
    scores: int | None = None  # prompt logprobs are to be given, with so many of the likeliest
    carried: Tensor | None = None  # hidden row of the last position, where the prompt's next token is to be scored

    @property
    def tokens(self) -> "array[int]":
        return self.sequence.tokens

    @property
    def prompt_len(self) -> int:
        return self.sequence.prompt_len


class Slots:
    def __init__(self, capacity: Capacity, grammars: Grammars | None = None) -> None:
        self._capacity = capacity
        self._grammars = grammars
        self._slots: list[Slot | None] = [None] * capacity.max_sequences

    def __getitem__(self, index: int) -> Slot:
        slot = self._slots[index]
        if slot is None:
            raise StepError(f"slot {index} holds no sequence")
        return slot

    def clear(self) -> None:
        self._slots = [None] * self._capacity.max_sequences

    @property
    def live(self) -> int:
        return sum(slot is not None for slot in self._slots)

    def check(self, step: Step) -> None:
        """Raises StepError."""
        limit = self._capacity.max_batched_tokens
        tokens = sum(part.count for part in step.slices)
        if tokens > limit:
            raise StepError(f"step {step.step_id} has {tokens} tokens, max_batched_tokens is {limit}")
        if not step.slices:
            raise StepError(f"step {step.step_id} has no slices")
        seen: set[int] = set()
        written: dict[int, int] = {}
        cached: dict[int, int] = {}
        for part in step.slices:
            if part.slot in seen:
                raise StepError(f"slot {part.slot} occurs twice in step {step.step_id}")
            seen.add(part.slot)
            table = self._check_slice(part)
            size = self._capacity.block_size
            for block in table[part.start // size : -(-(part.start + part.count) // size)]:
                if block in written:
                    raise StepError(f"slots {written[block]} and {part.slot} both write to block {block}")
                written[block] = part.slot
            if part.new is not None:
                cached.update(dict.fromkeys(table[: part.start // size], part.slot))
        for block in cached.keys() & written.keys():
            raise StepError(f"slot {written[block]} writes to block {block}, which slot {cached[block]} brings cached")

    def advance(self, step: Step) -> list[SequenceRows]:
        """Apply a checked step; the rows that it computes."""
        rows = []
        for part in step.slices:
            if part.new is not None:
                self._slots[part.slot] = self._entered(part.new)
            slot = self[part.slot]
            token_ids: Sequence[int] = part.token_ids or (slot.drawn or 0,)
            slot.tokens.extend(token_ids)
            slot.block_table.extend(part.new_block_ids)
            slot.drawn = None
            if part.token_ids:
                slot.error = None
            rows.append(SequenceRows(token_ids, part.start, slot.block_table, part.samples))
        return rows

    def _entered(self, new: NewSequence) -> Slot:
        grammar = new.sampling.grammar
        if grammar is None or self._grammars is None:
            return _started(new)
        return _started(new, Matching(self._grammars.get(grammar), self._capacity.vocab_size))

    def _check_slice(self, part: Slice) -> "array[int]":
        """The slot's block table as the step leaves it."""
        capacity, index = self._capacity, part.slot
        if not 0 <= index < capacity.max_sequences:
            raise StepError(f"slot {index} is out of range, max_sequences is {capacity.max_sequences}")
        slot = _started(part.new) if part.new is not None else self._slots[index]
        if slot is None:
            raise StepError(f"slot {index} holds no sequence and its slice brings none")
        if part.count < 1:
            raise StepError(f"slot {index}: count must be at least 1, got {part.count}")
        if part.start != len(slot.tokens):
            raise StepError(f"slot {index}: start is {part.start}, {len(slot.tokens)} positions are computed")
        end = part.start + part.count
        if end > capacity.max_model_len:
            raise StepError(f"slot {index}: {end} tokens exceed max_model_len {capacity.max_model_len}")
        self._check_tokens(part, slot)
        if part.new is not None:
            self._check_new(index, part.new)
        if part.samples and end < slot.prompt_len:
            raise StepError(f"slot {index}: a draw at position {end} lies inside the prompt of {slot.prompt_len}")
        table = slot.block_table
        if part.new_block_ids:
            table = table + self._new_blocks(part)
        if end > len(table) * capacity.block_size:
            raise StepError(f"slot {index}: {end} tokens need more than {len(table)} blocks of {capacity.block_size}")
        if part.new_block_ids and len(set(table)) != len(table):
            raise StepError(f"slot {index}: a block occurs twice in the block table")
        return table

    def _new_blocks(self, part: Slice) -> "array[int]":
        limit = self._capacity.total_blocks
        for block in part.new_block_ids:
            if not 0 <= block < limit:
                raise StepError(f"slot {part.slot}: block {block} is out of range, total_blocks is {limit}")
        return array("i", part.new_block_ids)

    def _check_tokens(self, part: Slice, slot: Slot) -> None:
        if not part.token_ids:
            if part.count != 1 or (slot.drawn is None and slot.error is None):
                raise StepError(f"slot {part.slot}: token_ids are absent, and the slot has not just drawn one token")
            return
        if len(part.token_ids) != part.count:
            raise StepError(f"slot {part.slot}: {len(part.token_ids)} token_ids for count {part.count}")
        self._check_vocabulary(part.slot, part.token_ids)

    def _check_vocabulary(self, index: int, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if not 0 <= token < self._capacity.vocab_size:
                raise StepError(
                    f"slot {index}: token id {token} is out of range, vocab_size is {self._capacity.vocab_size}"
                )

    def _check_new(self, index: int, new: NewSequence) -> None:
        vocab_size, sampling = self._capacity.vocab_size, new.sampling
        if len(new.cached_token_ids) % self._capacity.block_size:
            raise StepError(
                f"slot {index}: {len(new.cached_token_ids)} cached_token_ids do not fill blocks of "
                f"{self._capacity.block_size}"
            )
        self._check_vocabulary(index, new.cached_token_ids)
        if new.cached_token_ids and sampling.prompt_logprobs is not None:
            raise StepError(f"slot {index}: prompt_logprobs need a start at 0, not at {len(new.cached_token_ids)}")
        if new.prompt_len < 1:
            raise StepError(f"slot {index}: prompt_len must be at least 1, got {new.prompt_len}")
        named = [("stop_token_ids", token) for token in sampling.stop_token_ids]
        named += [("logit_bias", token) for token, _ in sampling.logit_bias]
        for name, token in named:
            if not 0 <= token < vocab_size:
                raise StepError(f"slot {index}: {name} has token id {token}, vocab_size is {vocab_size}")
        if sampling.grammar is not None and self._grammars is None:
            raise StepError(f"slot {index}: this executor serves no grammars")
        problem = sampling_problem(sampling)
        if problem:
            raise StepError(f"slot {index}: {problem}")


def _started(new: NewSequence, matching: Matching | None = None) -> Slot:
    mask = None if matching is None else matching.mask
    sequence = SampledSequence(new.sampling, array("i", new.cached_token_ids), new.prompt_len, mask)
    return Slot(sequence, array("i"), matching=matching, scores=new.sampling.prompt_logprobs)


def sampling_problem(sampling: SamplingParams) -> str | None:
    """What is out of the ranges that `SamplingParams` states, or None. NaN is out of every range."""
    infinity = float("inf")
    ranges = (
        ("repetition_penalty", 0 < sampling.repetition_penalty < infinity, "above 0 and finite"),
        ("presence_penalty", -infinity < sampling.presence_penalty < infinity, "finite"),
        ("frequency_penalty", -infinity < sampling.frequency_penalty < infinity, "finite"),
        ("min_tokens", sampling.min_tokens >= 0, "at least 0"),
        ("temperature", 0 <= sampling.temperature < infinity, "at least 0 and finite"),
        ("top_k", sampling.top_k >= 0, "at least 0"),
        ("top_p", 0 < sampling.top_p <= 1, "in (0, 1]"),
        ("min_p", 0 <= sampling.min_p <= 1, "in [0, 1]"),
        ("seed", 0 <= sampling.seed < 1 << 64, "an unsigned number of 64 bits"),
        ("choice", 0 <= sampling.choice < 1 << 32, "an unsigned number of 32 bits"),
        ("logprobs", sampling.logprobs is None or sampling.logprobs >= 0, "at least 0"),
        ("prompt_logprobs", sampling.prompt_logprobs is None or sampling.prompt_logprobs >= 0, "at least 0"),
    )
    for name, holds, range_text in ranges:
        if not holds:
            return f"{name} must be {range_text}, got {getattr(sampling, name)}"
    if not all(-infinity < bias < infinity for _, bias in sampling.logit_bias):
        return "logit_bias must be finite"
    return None
