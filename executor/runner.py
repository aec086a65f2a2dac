"""Runs steps: batch, forward, sample.

Owns: the model, the pool and the slots; one thread calls it. Must not know: the wire, clocks other than the one that
times a step, who owns the executor.
Invariant: a step that raises StepError has changed nothing; a step's tokens depend on its sequences alone.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from executor.batch import Batch, build_batch
from executor.cache import KvPool, MemoryPlan
from executor.grammar.grammars import Grammars
from executor.grammar.masks import Masks
from executor.models.model import Model
from executor.prompt_scores import Chunk, carried, score
from executor.sampling import Draw, sample
from executor.slots import Slot, Slots, StepError
from executor.step import (
    Capacity,
    NewSequence,
    RowError,
    RowErrorCode,
    SamplingParams,
    Slice,
    SliceResult,
    Step,
    StepResult,
    StepTimings,
    TokenLogprobs,
)
from executor.warming import warming_steps
from kernels.ops import Ops

__all__ = ["Runner", "StepError"]


class Runner:
    """Made by `executor.loading.load.load_runner`."""

    def __init__(
        self,
        *,
        model: Model,
        ops: Ops,
        pool: KvPool,
        capacity: Capacity,
        memory: MemoryPlan,
        model_hash: str,
        numerics: str,
        grammars: Grammars | None = None,
    ) -> None:
        self.backend = ops.name
        self.kv_format = ops.kv_format  # of the pages: bf16, fp8, ...
        self.capacity = capacity
        self.memory = memory
        self.model_hash = model_hash  # SHA-256 of the file, hexadecimal
        self.numerics = numerics  # equal on executors whose results are equal bit for bit; hexadecimal
        self.weight_bytes = model.weight_bytes
        self.pool = pool
        self._model = model
        self._ops = ops
        self.grammars = grammars  # None: sequences with a grammar are refused
        self._masks = Masks()
        self._slots = Slots(capacity, grammars)

    def run(self, step: Step) -> StepResult:
        """Raises StepError, before any state changes, for a step that does not follow from the ones before.

        After any other exception the slots are ahead of the pages: only `reset` makes the runner usable again.
        """
        with torch.inference_mode():
            started = time.perf_counter_ns()
            self._slots.check(step)
            sequences = self._slots.advance(step)
            batch = build_batch(sequences, self.capacity.block_size)
            finish_masks = self._begin_masks(step)
            prepared = time.perf_counter_ns()
            hidden = self._model.forward(batch, self.pool)
            computed = time.perf_counter_ns()
            results = self._results(step, hidden, batch, finish_masks())
            ended = time.perf_counter_ns()
        timings = StepTimings(prepare_ns=prepared - started, forward_ns=computed - prepared, sample_ns=ended - computed)
        return StepResult(step.step_id, results, timings)

    def reset(self) -> None:
        """A new epoch: no sequences. What the pool holds means nothing any more."""
        self._slots.clear()

    @property
    def model(self) -> Model:
        return self._model

    @property
    def ops(self) -> Ops:
        return self._ops

    def late_kernels(self) -> int:
        """How many were compiled since `warm_up`, each of which stopped a step."""
        return self._ops.late()

    @property
    def live_sequences(self) -> int:
        return self._slots.live

    def warm_up(self) -> None:
        """Run a small step, and one of every size that the back end tells apart, so that real ones find everything in
        place. Leaves no sequences.

        Raises RuntimeError where there are sequences, or if the model's answer is not a number.
        """
        self._require_idle("warm_up")
        size = min(2, self.capacity.max_batched_tokens, self.capacity.max_model_len, self.capacity.block_size)
        new = NewSequence(SamplingParams(temperature=0.0), prompt_len=size)
        part = Slice(slot=0, start=0, count=size, token_ids=(0,) * size, new_block_ids=(0,), samples=True, new=new)
        result = self.run(Step(step_id=1, slices=(part,)))
        self.reset()
        if result.results[0].error is not None:
            raise RuntimeError(f"the model does not compute: {result.results[0].error.message}")
        for step in warming_steps(self.capacity, self._ops.size_classes()):
            self.run(step)
            self.reset()
        self._ops.prepared()

    def score(self, token_ids: Sequence[int], first: int) -> list[float]:
        """ln p(token_ids[i] | those before it) for i from `first` on, by the code that serves. Leaves no sequences.

        Never holds more rows of logits than a serving step. Raises RuntimeError where there are sequences, StepError
        where the ids do not fit the model or the pool, ValueError for `first` outside [1, number of ids].
        """
        self._require_idle("score")
        if not 1 <= first <= len(token_ids):
            raise ValueError(f"first must be from 1 to {len(token_ids)}, got {first}")
        size = self.capacity.block_size
        blocks = tuple(range(-(-len(token_ids) // size)))
        scores: list[float] = []
        for start in range(0, len(token_ids), self.capacity.max_batched_tokens):
            chunk = tuple(token_ids[start : start + self.capacity.max_batched_tokens])
            new = NewSequence(SamplingParams(), prompt_len=len(token_ids)) if start == 0 else None
            part = Slice(0, start, len(chunk), chunk, blocks if start == 0 else (), samples=False, new=new)
            step = Step(1, (part,))
            self._slots.check(step)
            with torch.inference_mode():
                batch = build_batch(self._slots.advance(step), size)
                hidden = self._model.forward(batch, self.pool)
                low = max(first - 1 - start, 0)
                high = min(len(chunk), len(token_ids) - 1 - start)
                targets = torch.tensor(token_ids[start + low + 1 : start + high + 1])
                scores += self._score_rows(hidden[low:high], targets)
        self.reset()
        return scores

    def _begin_masks(self, step: Step) -> Callable[[], dict[int, str]]:
        """What is returned waits until the masks of the slices that sample are written, and gives the slots whose
        grammar allows nothing any more, with the reason."""
        wanted = {}
        for part in step.slices:
            slot = self._slots[part.slot]
            if part.samples and slot.matching is not None and slot.error is None:
                wanted[part.slot] = (slot.matching, slot.tokens[slot.prompt_len :])
        if not wanted:
            return dict
        filled = self._masks.begin(tuple(wanted.values()))
        return lambda: {
            index: problem for index, problem in zip(wanted, filled.result(), strict=True) if problem is not None
        }

    def _results(
        self, step: Step, hidden: Tensor, batch: Batch, dead_ends: Mapping[int, str]
    ) -> tuple[SliceResult, ...]:
        """hidden: of all rows of the step. dead_ends: slots whose grammar allows nothing, with the reason."""
        sampled = [self._slots[part.slot].sequence for part in step.slices if part.samples]
        draws = iter(sample(self._model, self._ops, hidden[batch.sample_rows], sampled))
        results = []
        for part, row in zip(step.slices, batch.rows.query_start.tolist(), strict=False):  # the last one is the end
            slot = self._slots[part.slot]
            scores = self._score_prompt(part, slot, hidden[row : row + part.count])
            if part.samples:
                draw = _outcome(slot, next(draws), dead_ends.get(part.slot))
                slot.drawn, slot.error = draw.token_id, draw.error
                results.append(_result(part.slot, draw, scores or ()))
            elif scores is not None:
                results.append(SliceResult(part.slot, (), error=slot.error, prompt_logprobs=scores))
        return tuple(results)

    def _score_prompt(self, part: Slice, slot: Slot, hidden: Tensor) -> tuple[TokenLogprobs, ...] | None:
        """None where the slice gives none. hidden: its rows. A failure is the slot's."""
        top = slot.scores
        if top is None or part.start >= slot.prompt_len:
            return None
        chunk = Chunk(part.start, hidden, slot.carried, slot.tokens, slot.prompt_len)
        scores = score(self._model, self._ops, chunk, top, self.capacity.max_sequences)
        slot.carried = carried(chunk)
        if isinstance(scores, RowError):
            slot.error = scores
            return ()
        return scores

    def _score_rows(self, hidden: Tensor, targets: Tensor) -> list[float]:
        scores: list[float] = []
        step = self.capacity.max_sequences
        for start in range(0, hidden.shape[0], step):
            logits = self._model.logits(hidden[start : start + step]).to(torch.float64)
            chosen = logits.gather(1, targets[start : start + step].unsqueeze(1)).squeeze(1)
            scores += (chosen - torch.logsumexp(logits, dim=1)).tolist()
        return scores

    def _require_idle(self, action: str) -> None:
        if self._slots.live:
            raise RuntimeError(f"{action} needs an idle executor; {self._slots.live} sequences are live")


def _outcome(slot: Slot, drawn: Draw, dead_end: str | None) -> Draw:
    """An earlier error stands; after it a grammar without a way on. dead_end: why it has none."""
    if slot.error is not None:
        return Draw(error=slot.error)
    if dead_end is None:
        return drawn
    text = f"the grammar allows nothing at position {slot.sequence.position}: {dead_end}"
    return Draw(error=RowError(RowErrorCode.GRAMMAR_DEAD_END, text))


def _result(slot: int, draw: Draw, scores: tuple[TokenLogprobs, ...]) -> SliceResult:
    if draw.token_id is None:
        return SliceResult(slot, (), error=draw.error)
    logprobs = () if draw.logprobs is None else (draw.logprobs,)
    return SliceResult(slot, (draw.token_id,), logprobs, prompt_logprobs=scores)
