"""From hidden rows to tokens: which of the back end's two ways a step takes, and what came of each row.

Owns: the choice between them, and the errors of rows. Must not know: slots, the wire, how a token is drawn
(`kernels.sampling`).
Invariant: a row's outcome does not depend on the way: what `Ops.head_greedy` finds is what `Ops.sample` would.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from executor.models.model import Model
from executor.step import RowError, RowErrorCode, TokenLogprobs
from kernels.ops import Ops
from kernels.sampling import Drawn, Fault, SampledSequence


@dataclass(frozen=True, slots=True)
class Draw:
    """A token, or the reason why there is none."""

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    error: RowError | None = None


def sample(model: Model, ops: Ops, hidden: Tensor, sequences: Sequence[SampledSequence]) -> list[Draw]:
    """hidden float32 [rows, hidden], row i of sequence i. Without rows nothing is computed.

    If no row needs more than its largest logit, none of the logits is kept. Else all are: the head's weights are read
    once, and that is what it costs.
    """
    if not sequences:
        return []
    if all(sequence.greedy for sequence in sequences):
        found = model.greedy(hidden)
        rows = zip(sequences, found.token_ids.tolist(), found.highest.tolist(), strict=True)
        return [
            Draw(token_id) if math.isfinite(highest) else _failed(sequence, Fault.NOT_FINITE)
            for sequence, token_id, highest in rows
        ]
    drawn = ops.sample(model.logits(hidden), sequences)
    return [_draw(sequence, one) for sequence, one in zip(sequences, drawn, strict=True)]


def _draw(sequence: SampledSequence, drawn: Drawn) -> Draw:
    if drawn.fault is not None:
        return _failed(sequence, drawn.fault)
    found = drawn.logprobs
    return Draw(drawn.token_id, None if found is None else TokenLogprobs(found.drawn, found.top))


_FAULTS: Final = {
    Fault.NOT_FINITE: (RowErrorCode.NAN_LOGITS, "the logits at position {} are not finite"),
    Fault.NOTHING_ALLOWED: (RowErrorCode.GRAMMAR_DEAD_END, "no token is allowed at position {}"),
}


def _failed(sequence: SampledSequence, fault: Fault) -> Draw:
    code, message = _FAULTS[fault]
    return Draw(error=RowError(code, message.format(sequence.position)))
