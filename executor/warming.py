"""Steps that between them launch every form of a kernel that serving launches.

Owns: which sizes and which draws. Must not know: what a form is; a back end says which sizes differ for it.
Invariant: each step stands alone, in an epoch of its own.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from executor.step import Capacity, NewSequence, SamplingParams, Slice, Step

_GREEDY: Final = SamplingParams(temperature=0.0)
_DRAWN: Final = SamplingParams(presence_penalty=0.5)


def warming_steps(capacity: Capacity, classes: Sequence[int]) -> Iterator[Step]:
    """classes: numbers of rows, of sequences, of blocks of a sequence and of top logprobs, one of each kind that the
    back end tells apart."""
    size = capacity.block_size
    longest = min(capacity.max_model_len, capacity.total_blocks * size)
    for rows in classes:
        if rows <= min(capacity.max_batched_tokens, longest):
            yield Step(1, (_slice(0, 0, rows, range(-(-rows // size)), _GREEDY),))
    for sequences in classes:
        if sequences <= min(capacity.max_sequences, capacity.max_batched_tokens, capacity.total_blocks):
            for sampling in (_GREEDY, _DRAWN):
                yield Step(1, tuple(_slice(slot, 0, 1, (slot,), sampling) for slot in range(sequences)))
    if classes:
        for blocks in {*(each for each in classes if each * size <= longest), -(-longest // size)}:
            yield Step(1, (_slice(0, (blocks - 1) * size, 1, range(blocks), _GREEDY),))
    for top in classes:
        if top <= capacity.vocab_size:
            yield Step(1, (_slice(0, 0, 1, (0,), SamplingParams(logprobs=top)),))


def _slice(slot: int, start: int, count: int, blocks: Sequence[int], sampling: SamplingParams) -> Slice:
    new = NewSequence(sampling, prompt_len=start + count, cached_token_ids=(0,) * start)
    return Slice(slot, start, count, (0,) * count, tuple(blocks), samples=True, new=new)
