"""From logits to tokens: one row, one sequence, a list of small pure steps.

Owns: what a draw is, on every back end: the order of the steps, which is the order of the fields of `Sampling`, and the
draw; and the torch code that does it where a back end has none of its own. Must not know: slots, models, the wire.
Invariants: a row's token depends on that row's logits and sequence alone; a step that a row does not ask for costs it
nothing; every choice among equals goes to the lowest token id; the results are the same bits on every back end.

Adjusting steps map logits (float32 [V]) to new ones; the last of them is a grammar's mask. Filtering steps map
candidates, token ids in ascending order with their scores, to fewer of them.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from kernels.philox import GUMBEL_RANGE, gumbel
from kernels.written_out import WEIGHT_BITS, weights


class Sampling(Protocol):
    """How a token is drawn; `executor.step.SamplingParams` says what each field means and its range."""

    @property
    def logit_bias(self) -> Sequence[tuple[int, float]]: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def stop_token_ids(self) -> Sequence[int]: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def seed(self) -> int: ...
    @property
    def choice(self) -> int: ...
    @property
    def logprobs(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """What the draws of a sequence need to know beside its logits.

    mask: which tokens may be drawn at all: token t where bit t % 32 of word t // 32 is set, none behind the last word.
    Whoever owns the sequence rewrites it for each draw. None: all.
    """

    sampling: Sampling
    tokens: "array[int]"  # type code "i": inputs so far, positions [0, position); it grows
    prompt_len: int
    mask: "array[int] | None" = None  # type code "I"
    greedy: bool = field(init=False)  # every token is that of the largest logit, and nothing else is asked for

    def __post_init__(self) -> None:
        sampling = self.sampling
        likeliest = sampling.temperature == 0 and sampling.logprobs is None
        object.__setattr__(self, "greedy", likeliest and self.mask is None and not may_adjust(sampling))

    @property
    def position(self) -> int:
        """Of the token that is drawn."""
        return len(self.tokens)

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def bans_stops(self) -> bool:
        return self.output_len < self.sampling.min_tokens and bool(self.sampling.stop_token_ids)


class Fault(IntEnum):
    """Why a row has no token."""

    NOT_FINITE = 1  # its largest logit is NaN or infinite
    NOTHING_ALLOWED = 2


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of the raw distribution."""

    drawn: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), likeliest first; ties by id


@dataclass(frozen=True, slots=True)
class Drawn:
    token_id: int = 0
    logprobs: Logprobs | None = None
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class Greedy:
    """token_ids int64 [rows]: of the largest logit, the lowest of equals; highest float32 [rows]: that logit. Where a
    logit of the row is NaN, highest is NaN and the token means nothing."""

    token_ids: Tensor
    highest: Tensor


def greedy(logits: Tensor) -> Greedy:
    """logits float32 [rows, V]."""
    token_ids = logits.argmax(dim=1)  # the first of equals; NaN counts as the largest
    return Greedy(token_ids, logits.gather(1, token_ids.unsqueeze(1)).squeeze(1))


def sample(logits: Tensor, sequences: Sequence[SampledSequence]) -> list[Drawn]:
    """logits float32 [rows, V], row i of sequence i."""
    if not sequences:
        return []
    found = greedy(logits)
    rows = zip(logits, sequences, found.token_ids.tolist(), found.highest.tolist(), strict=True)
    return [_sample_row(row, sequence, token_id, value) for row, sequence, token_id, value in rows]


def _sample_row(logits: Tensor, sequence: SampledSequence, likeliest: int, highest: float) -> Drawn:
    if not math.isfinite(highest):
        return Drawn(fault=Fault.NOT_FINITE)
    sampling = sequence.sampling
    adjusted = adjust(logits, sequence)
    if adjusted is logits and sampling.temperature == 0:
        token_id = likeliest
    else:
        token_id = int(adjusted.argmax())
        if adjusted[token_id] == float("-inf"):
            return Drawn(fault=Fault.NOTHING_ALLOWED)
        if sampling.temperature != 0:
            token_id = _draw(adjusted, sequence)
    wanted = sampling.logprobs
    return Drawn(token_id, None if wanted is None else token_logprobs(logits, token_id, wanted))


# -- adjusting steps ---------------------------------------------------------------------------------------------------


def adjust(logits: Tensor, sequence: SampledSequence) -> Tensor:
    """The logits after all steps that the sequence asks for; the very same tensor if it asks for none.

    What a step makes larger than float32 can hold stays at its end, so that no infinity wins or becomes NaN.
    """
    adjusted = logits
    for asked, step in ADJUSTING:
        if asked(sequence):
            adjusted = step(adjusted, sequence).clamp_(max=_LARGEST)
    return adjusted


def may_adjust(sampling: Sampling) -> bool:
    """Whether some step of ADJUSTING may be asked for, at some position."""
    return bool(
        sampling.logit_bias
        or sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
        or (sampling.min_tokens and sampling.stop_token_ids)
    )


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
    return logits.index_put((seen,), logits[seen] - penalty.clamp_(-_LARGEST, _LARGEST))


def ban_stops(logits: Tensor, sequence: SampledSequence) -> Tensor:
    return logits.index_fill(0, torch.tensor(sequence.sampling.stop_token_ids), float("-inf"))


def forbid_masked(logits: Tensor, sequence: SampledSequence) -> Tensor:
    forbidden = torch.ones_like(logits, dtype=torch.bool)
    if sequence.mask:
        words = torch.tensor(sequence.mask, dtype=torch.int64)
        bits = (words.unsqueeze(1) >> torch.arange(32) & 1).flatten()[: logits.shape[0]]
        forbidden[: bits.shape[0]] = bits == 0
    return logits.masked_fill(forbidden, float("-inf"))


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
    (lambda s: s.bans_stops, ban_stops),
    (lambda s: s.mask is not None, forbid_masked),
)

_LARGEST = torch.finfo(torch.float32).max

# -- filtering steps ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that may be drawn. scores: float64, logits; after `scale` at most 0."""

    token_ids: Tensor  # int64, ascending
    scores: Tensor

    def keep(self, mask: Tensor) -> "Candidates":
        return Candidates(self.token_ids[mask], self.scores[mask])


def allowed(logits: Tensor) -> Candidates:
    candidates = Candidates(torch.arange(logits.shape[0]), logits.to(torch.float64))
    return candidates if logits.isfinite().all() else candidates.keep(logits > float("-inf"))


def keep_top_k(candidates: Candidates, k: int) -> Candidates:
    scores = candidates.scores
    if k >= scores.shape[0]:
        return candidates
    smallest = torch.topk(scores, k).values[-1]
    mask = scores > smallest
    ties = torch.nonzero(scores == smallest).squeeze(1)
    mask[ties[: k - int(mask.sum())]] = True
    return candidates.keep(mask)


def scale(candidates: Candidates, temperature: float) -> Candidates:
    """Subtracting before dividing keeps the largest score at 0 however small the temperature."""
    return Candidates(candidates.token_ids, (candidates.scores - candidates.scores.max()) / temperature)


def keep_top_p(candidates: Candidates, p: float) -> Candidates:
    """The fewest likeliest tokens whose probabilities reach p together (arXiv:1904.09751).

    Probabilities are whole numbers (`weights`), so that no order of summing changes what reaches p. A first look at the
    tokens near the top mostly suffices: they are a prefix of the sorted order, ties included.
    """
    mass = weights(candidates.scores)
    needed = p * float(mass.sum())
    for depth in (6.0, 12.0, float("inf")):
        near = torch.nonzero(candidates.scores >= -depth).squeeze(1)
        order = torch.sort(candidates.scores[near], descending=True, stable=True).indices
        masses = mass[near[order]]
        reached = masses.cumsum(0)
        if float(reached[-1]) >= needed:
            break
    mask = torch.zeros_like(candidates.scores, dtype=torch.bool)
    mask[near[order[(reached - masses).to(torch.float64) < needed]]] = True
    return candidates.keep(mask)


def keep_min_p(candidates: Candidates, p: float) -> Candidates:
    """Tokens at least p times as likely as the likeliest (arXiv:2407.01082)."""
    return candidates.keep(candidates.scores >= math.log(p))


# -- the draw ----------------------------------------------------------------------------------------------------------


def _draw(logits: Tensor, sequence: SampledSequence) -> int:
    sampling = sequence.sampling
    candidates = allowed(logits)
    if sampling.top_k:
        candidates = keep_top_k(candidates, sampling.top_k)  # the same before dividing by the temperature as after
    candidates = scale(candidates, sampling.temperature)
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


def token_logprobs(logits: Tensor, token_id: int, count: int) -> Logprobs:
    """Of the raw logits, of which the largest is finite."""
    values = logits.to(torch.float64)
    highest = values.max()
    total = total_logit(float(highest), int(weights(values - highest).sum()))
    top: tuple[tuple[int, float], ...] = ()
    if count:
        likeliest = keep_top_k(Candidates(torch.arange(logits.shape[0]), values), count)
        order = torch.sort(likeliest.scores, descending=True, stable=True)
        ids = likeliest.token_ids[order.indices].tolist()
        top = tuple((token, value - total) for token, value in zip(ids, order.values.tolist(), strict=True))
    return Logprobs(drawn=float(values[token_id]) - total, top=top)


def total_logit(highest: float, mass: int) -> float:
    """ln of the sum of exp(logit), from the largest logit and the sum of all weights."""
    return highest + math.log(mass / (1 << WEIGHT_BITS))
