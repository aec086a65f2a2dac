"""From logits to tokens: one row, one sequence, a list of small pure steps.

Owns: the order of the steps, which is the order of the fields of `SamplingParams`, and the draw. Must not know: slots,
models, the wire.
Invariants: a row's token depends on that row's logits and sequence alone; a step that a row does not ask for costs it
nothing; every choice among equals goes to the lowest token id.

Adjusting steps map logits (float32 [V]) to new ones. Filtering steps map candidates, token ids in ascending order with
their scaled logits, to fewer of them. A grammar's mask belongs between the two.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.philox import GUMBEL_RANGE, gumbel
from executor.step import RowError, RowErrorCode, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """What the draw of one row needs to know beside its logits."""

    sampling: SamplingParams
    tokens: Sequence[int]  # inputs so far: positions [0, position)
    prompt_len: int

    @property
    def position(self) -> int:
        """Of the token that is drawn."""
        return len(self.tokens)

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len


@dataclass(frozen=True, slots=True)
class Draw:
    """A token, or the reason why there is none."""

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    error: RowError | None = None


def sample(logits: Tensor, sequences: Sequence[SampledSequence]) -> list[Draw]:
    """logits float32 [rows, V], row i of sequence i."""
    if not sequences:
        return []
    likeliest = logits.argmax(dim=1)  # the first of equals; NaN counts as the largest
    highest = logits.gather(1, likeliest.unsqueeze(1)).squeeze(1)
    draws = []
    for row, sequence, token_id, value in zip(logits, sequences, likeliest.tolist(), highest.tolist(), strict=True):
        draws.append(_sample_row(row, sequence, token_id, value))
    return draws


def _sample_row(logits: Tensor, sequence: SampledSequence, likeliest: int, highest: float) -> Draw:
    if not math.isfinite(highest):
        return Draw(
            error=RowError(RowErrorCode.NAN_LOGITS, f"the logits at position {sequence.position} are not finite")
        )
    sampling = sequence.sampling
    adjusted = adjust(logits, sequence)
    if adjusted is logits and sampling.temperature == 0:
        token_id = likeliest
    else:
        token_id = int(adjusted.argmax()) if sampling.temperature == 0 else _draw(adjusted, sequence)
        if adjusted[token_id] == float("-inf"):
            return Draw(error=RowError(RowErrorCode.GRAMMAR_DEAD_END, "no token is allowed"))
    wanted = sampling.logprobs
    return Draw(token_id, None if wanted is None else token_logprobs(logits, token_id, wanted))


# -- adjusting steps ---------------------------------------------------------------------------------------------------


def adjust(logits: Tensor, sequence: SampledSequence) -> Tensor:
    """The logits after all steps that the sequence asks for; the very same tensor if it asks for none.

    What a step makes larger than float32 can hold stays at its end, so that no infinity wins or becomes NaN.
    """
    adjusted = logits
    for asked, step in ADJUSTING:
        if asked(sequence):
            adjusted = step(adjusted, sequence).clamp_(max=torch.finfo(logits.dtype).max)
    return adjusted


def add_logit_bias(logits: Tensor, sequence: SampledSequence) -> Tensor:
    ids, biases = zip(*sequence.sampling.logit_bias, strict=True)
    return logits.index_add(0, torch.tensor(ids), torch.tensor(biases, dtype=logits.dtype))


def penalize_repetition(logits: Tensor, sequence: SampledSequence) -> Tensor:
    """Of every token seen, once however often: positive logits divided, others multiplied (arXiv:1909.05858)."""
    seen = torch.unique(torch.tensor(sequence.tokens))
    penalty = sequence.sampling.repetition_penalty
    values = logits[seen]
    return logits.index_put((seen,), torch.where(values > 0, values / penalty, values * penalty))


def penalize_presence_and_frequency(logits: Tensor, sequence: SampledSequence) -> Tensor:
    seen, counts = torch.unique(torch.tensor(sequence.tokens[sequence.prompt_len :]), return_counts=True)
    sampling = sequence.sampling
    penalty = sampling.presence_penalty + sampling.frequency_penalty * counts.to(logits.dtype)
    return logits.index_put((seen,), logits[seen] - penalty)


def ban_stops(logits: Tensor, sequence: SampledSequence) -> Tensor:
    return logits.index_fill(0, torch.tensor(sequence.sampling.stop_token_ids), float("-inf"))


ADJUSTING: tuple[
    tuple[Callable[[SampledSequence], bool], Callable[[Tensor, SampledSequence], Tensor]],
    ...,
] = (
    (lambda s: bool(s.sampling.logit_bias), add_logit_bias),
    (lambda s: s.sampling.repetition_penalty != 1, penalize_repetition),
    (
        lambda s: (s.sampling.presence_penalty != 0 or s.sampling.frequency_penalty != 0) and s.output_len > 0,
        penalize_presence_and_frequency,
    ),
    (lambda s: s.output_len < s.sampling.min_tokens and bool(s.sampling.stop_token_ids), ban_stops),
)

# -- filtering steps ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that may be drawn. scores: float64, logits over temperature less the largest, so at most 0."""

    token_ids: Tensor  # int64, ascending
    scores: Tensor

    def keep(self, mask: Tensor) -> "Candidates":
        return Candidates(self.token_ids[mask], self.scores[mask])


def scale(logits: Tensor, temperature: float) -> Candidates:
    """Subtracting before dividing keeps the largest score at 0 however small the temperature."""
    scores = (logits.to(torch.float64) - logits.max().to(torch.float64)) / temperature
    candidates = Candidates(torch.arange(logits.shape[0]), scores)
    return candidates if scores.isfinite().all() else candidates.keep(scores > float("-inf"))


def keep_top_k(candidates: Candidates, k: int) -> Candidates:
    scores = candidates.scores
    if k >= scores.shape[0]:
        return candidates
    smallest = torch.topk(scores, k).values[-1]
    mask = scores > smallest
    ties = torch.nonzero(scores == smallest).squeeze(1)
    mask[ties[: k - int(mask.sum())]] = True
    return candidates.keep(mask)


def keep_top_p(candidates: Candidates, p: float) -> Candidates:
    """The fewest likeliest tokens whose probabilities reach p together (arXiv:1904.09751).

    A first look at the tokens near the top mostly suffices: they are a prefix of the sorted order, ties included.
    """
    probabilities = torch.softmax(candidates.scores, dim=0)
    for depth in (6.0, 12.0, float("inf")):
        near = torch.nonzero(candidates.scores >= -depth).squeeze(1)
        descending = torch.sort(probabilities[near], descending=True, stable=True)
        reached = descending.values.cumsum(0)
        if depth == float("inf") or reached[-1] >= p:
            break
    needed = reached - descending.values < p
    mask = torch.zeros_like(candidates.scores, dtype=torch.bool)
    mask[near[descending.indices[needed]]] = True
    return candidates.keep(mask)


def keep_min_p(candidates: Candidates, p: float) -> Candidates:
    """Tokens at least p times as likely as the likeliest (arXiv:2407.01082)."""
    return candidates.keep(candidates.scores >= math.log(p))


# -- the draw ----------------------------------------------------------------------------------------------------------


def _draw(logits: Tensor, sequence: SampledSequence) -> int:
    sampling = sequence.sampling
    candidates = scale(logits, sampling.temperature)
    if candidates.token_ids.shape[0] == 0:
        return 0  # all are banned, which the caller sees in the logits
    if sampling.top_k:
        candidates = keep_top_k(candidates, sampling.top_k)
    if sampling.top_p < 1:
        candidates = keep_top_p(candidates, sampling.top_p)
    if sampling.min_p:
        candidates = keep_min_p(candidates, sampling.min_p)
    return draw(candidates, seed=sampling.seed, position=sequence.position, choice=sampling.choice)


def draw(candidates: Candidates, *, seed: int, position: int, choice: int) -> int:
    """Gumbel-max: the largest of score + noise is distributed as softmax(scores).

    Noise is bounded, so once one sum is known, tokens too far below it need no noise: the result is the same.
    """

    def best(group: Candidates) -> tuple[float, int]:
        sums = group.scores + gumbel(group.token_ids, seed=seed, position=position, choice=choice)
        index = int(sums.argmax())
        return float(sums[index]), int(group.token_ids[index])

    near = candidates.scores >= -_NEAR
    found, token_id = best(candidates.keep(near))
    rest = candidates.keep(~near & (candidates.scores + GUMBEL_RANGE[1] >= found))
    if rest.token_ids.shape[0] == 0:
        return token_id
    rest_found, rest_token = best(rest)
    if (rest_found, -rest_token) > (found, -token_id):
        return rest_token
    return token_id


_NEAR = 5.0  # where the first look for the winner ends; any value gives the same token


def token_logprobs(logits: Tensor, token_id: int, count: int) -> TokenLogprobs:
    """Of the raw logits, in float64."""
    values = logits.to(torch.float64)
    total = float(torch.logsumexp(values, dim=0))
    top: tuple[tuple[int, float], ...] = ()
    if count:
        smallest = torch.topk(logits, min(count, logits.shape[0])).values[-1]
        ids = torch.nonzero(logits >= smallest).squeeze(1)
        order = torch.sort(values[ids], descending=True, stable=True)
        chosen = order.indices[:count]
        top = tuple(
            (token, value - total)
            for token, value in zip(ids[chosen].tolist(), order.values[:count].tolist(), strict=True)
        )
    return TokenLogprobs(drawn=float(values[token_id]) - total, top=top)
