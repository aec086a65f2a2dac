"""Perplexity of a text under a model, by the rule of llama.cpp's tool of that name.

Owns: the windows, which tokens of them count, and the sum. Must not know: models, files.
The rule: the ids are cut into windows of `context`, an incomplete last one is dropped. Each window is computed by
itself from an empty cache; where the vocabulary wants BOS it replaces the window's first id. Scored are the tokens of
the second half, but for its first: those at places context // 2 + 1 to context - 1.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

MIN_CONTEXT = 4

Score = Callable[[Sequence[int], int], Sequence[float]]
"""(ids, first) -> ln p(ids[i] | ids before it) for i from `first` on."""


class TextTooShort(ValueError):
    """There is not one whole window."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """value: e to the mean negative logarithm. standard_error: of value, taking tokens as independent."""

    value: float
    standard_error: float
    windows: int
    scored_tokens: int


def windows(token_ids: Sequence[int], context: int, bos_id: int | None) -> Iterator[list[int]]:
    """bos_id: what replaces each window's first id; None where the vocabulary wants no BOS."""
    for start in range(0, len(token_ids) - context + 1, context):
        window = list(token_ids[start : start + context])
        if bos_id is not None:
            window[0] = bos_id
        yield window


def measure(
    score: Score,
    token_ids: Sequence[int],
    context: int,
    bos_id: int | None,
    report: Callable[[int, float], None] = lambda done, value: None,
) -> Perplexity:
    """`report` is called after each window with their number and the perplexity so far.

    Raises ValueError for a context below MIN_CONTEXT, TextTooShort.
    """
    if context < MIN_CONTEXT:
        raise ValueError(f"context must be at least {MIN_CONTEXT}, got {context}")
    if len(token_ids) < context:
        raise TextTooShort(f"the text has {len(token_ids)} tokens, one window takes {context}")
    first = context // 2 + 1
    losses: list[float] = []
    for done, window in enumerate(windows(token_ids, context, bos_id), start=1):
        losses += [-value for value in score(window, first)]
        report(done, math.exp(math.fsum(losses) / len(losses)))
    return _summary(losses, len(token_ids) // context)


def _summary(losses: Sequence[float], count: int) -> Perplexity:
    mean = math.fsum(losses) / len(losses)
    spread = math.fsum((loss - mean) ** 2 for loss in losses) / max(len(losses) - 1, 1)
    value = math.exp(mean)
    return Perplexity(value, value * math.sqrt(spread / len(losses)), count, len(losses))
