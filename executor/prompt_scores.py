"""Logprobs of the prompt's own tokens: the head at every position, a few rows at a time.

Owns: which hidden row tells of which token, over the borders of chunks. Must not know: the wire, who asks.
Invariants: never more rows of logits at once than a step that draws has; a token's logprob is, to the bit, what it
would be if it were drawn there.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from executor.models.model import Model
from executor.step import RowError, RowErrorCode, SamplingParams, TokenLogprobs
from kernels.ops import Ops
from kernels.sampling import SampledSequence

# Greedy drawing takes the token with this bias, whatever the logits: so the back end's own code gives its logprob,
# which is of the raw distribution.
_FORCED: Final = 3e38


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions [start, start + len(hidden)) of a prompt. hidden float32 [count, hidden]; before: that of the position
    before, None at the start. token_ids: the inputs up to the chunk's end, from position 0."""

    start: int
    hidden: Tensor
    before: Tensor | None
    token_ids: "array[int]"
    prompt_len: int


def score(model: Model, ops: Ops, chunk: Chunk, top: int, rows: int) -> tuple[TokenLogprobs, ...] | RowError:
    """Of the prompt's tokens in the chunk, given all before them; the prompt's first has none.

    top: how many of the likeliest besides. rows: of logits at once.
    """
    first = max(chunk.start, 1)
    end = min(chunk.start + chunk.hidden.shape[0], chunk.prompt_len)
    own = chunk.hidden[: max(0, end - 1 - chunk.start)]
    hidden = own if chunk.before is None else torch.cat((chunk.before, own))
    targets = chunk.token_ids[first:end]
    scores: list[TokenLogprobs] = []
    for at in range(0, len(targets), rows):
        found = _score_rows(model, ops, hidden[at : at + rows], targets[at : at + rows], top)
        for offset, row in enumerate(found):
            if row is None:
                message = f"the logits at position {first + at + offset} are not finite"
                return RowError(RowErrorCode.NAN_LOGITS, message)
            scores.append(row)
    return tuple(scores)


def carried(chunk: Chunk) -> Tensor | None:
    """The hidden row that the next chunk's first token needs; None where the prompt is at its end."""
    if chunk.start + chunk.hidden.shape[0] >= chunk.prompt_len:
        return None
    return chunk.hidden[-1:].clone()  # a view would keep all rows of the step alive


def _score_rows(model: Model, ops: Ops, hidden: Tensor, targets: Sequence[int], top: int) -> list[TokenLogprobs | None]:
    asked = [
        SampledSequence(SamplingParams(logit_bias=((token, _FORCED),), temperature=0.0, logprobs=top), array("i"), 0)
        for token in targets
    ]
    scores: list[TokenLogprobs | None] = []
    for token, drawn in zip(targets, ops.sample(model.logits(hidden), asked), strict=True):
        found = drawn.logprobs
        if drawn.fault is not None or found is None:
            scores.append(None)
        else:  # a logit of minus infinity is what no bias lifts
            scores.append(TokenLogprobs(found.drawn if drawn.token_id == token else float("-inf"), found.top))
    return scores
