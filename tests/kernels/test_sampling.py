"""Sampling, step by step: exact small cases, properties, and the draw's distribution at fixed seeds."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor.step import SamplingParams
from kernels.philox import gumbel
from kernels.sampling import (
    Candidates,
    Drawn,
    Fault,
    SampledSequence,
    adjust,
    allowed,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    sample,
    scale,
    token_logprobs,
)

GREEDY = SamplingParams(temperature=0.0)


def row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def sequence(sampling: SamplingParams, tokens: Sequence[int] = (0,), prompt_len: int = 1) -> SampledSequence:
    return SampledSequence(sampling, array("i", tokens), prompt_len)


def one(logits: Tensor, sampling: SamplingParams, tokens: Sequence[int] = (0,), prompt_len: int = 1) -> int:
    drawn = sample(logits.unsqueeze(0), [sequence(sampling, tokens, prompt_len)])[0]
    assert drawn.fault is None
    return drawn.token_id


def candidates(*scores: float) -> Candidates:
    return Candidates(torch.arange(len(scores)), torch.tensor(scores, dtype=torch.float64))


# -- greedy ------------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    assert one(row(1, 3, 3, 3), GREEDY) == 1
    assert one(row(1, 3, 3, 3), replace(GREEDY, logit_bias=((1, -1.0),))) == 2
    wide = torch.zeros(50_000)
    wide[[40_000, 777, 49_999]] = 2.0
    assert one(wide, GREEDY) == 777


def test_no_sequences_no_draws() -> None:
    assert sample(torch.zeros(0, 5), []) == []


# -- adjusting ---------------------------------------------------------------------------------------------------------


def test_nothing_asked_is_nothing_copied() -> None:
    logits = row(1, 2, 3)
    assert adjust(logits, sequence(GREEDY)) is logits


def test_steps_leave_the_logits_that_they_are_given_alone() -> None:
    logits, before = row(1, 2, 3, 4), row(1, 2, 3, 4)
    sampling = SamplingParams(((0, 1.0),), 1.5, 0.5, 0.5, 9, (3,), temperature=0.5, top_k=2, top_p=0.9, min_p=0.1)
    sample(logits.unsqueeze(0), [sequence(sampling, [0, 1, 1], 1)])
    assert torch.equal(logits, before)


def test_logit_bias_adds_up() -> None:
    biased = adjust(row(0, 0, 0), sequence(replace(GREEDY, logit_bias=((1, 2.5), (2, -1.0), (1, 0.5)))))
    assert biased.tolist() == [0, 3, -1]


def test_repetition_penalty_counts_a_token_once_and_flips_with_the_sign() -> None:
    sampling = replace(GREEDY, repetition_penalty=2.0)
    adjusted = adjust(row(4, -4, 0, 3), sequence(sampling, [0, 0, 0, 1, 2] * 2000, prompt_len=2))
    assert adjusted.tolist() == [2, -8, 0, 3]


def test_presence_and_frequency_look_at_output_alone() -> None:
    sampling = replace(GREEDY, presence_penalty=0.5, frequency_penalty=0.25)
    tokens = [0, 0, 3, 1, 1, 1, 2]  # the prompt is the first three
    adjusted = adjust(row(1, 1, 1, 1), sequence(sampling, tokens, prompt_len=3))
    assert adjusted.tolist() == [1, 1 - 0.5 - 0.75, 1 - 0.5 - 0.25, 1]
    assert adjust(row(1, 1), sequence(sampling, [0, 1], prompt_len=2)).tolist() == [1, 1]


def test_stops_are_banned_before_min_tokens() -> None:
    sampling = replace(GREEDY, min_tokens=2, stop_token_ids=(1, 2))
    logits = row(0, 5, 4, 3)
    assert one(logits, sampling, [7], prompt_len=1) == 3  # this would be output token 1
    assert one(logits, sampling, [7, 3], prompt_len=1) == 3
    assert one(logits, sampling, [7, 3, 3], prompt_len=1) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_extreme_penalties_overflow_to_no_infinity(temperature: float) -> None:
    sampling = SamplingParams(repetition_penalty=1e-38, frequency_penalty=-1e38, temperature=temperature)
    assert adjust(row(20, 30, 0), sequence(sampling, [0, 2, 2, 2, 2, 2], 1)).isfinite().all()
    assert one(row(20, 30, -1), sampling, [0, 1], 2) in ((0,) if temperature == 0 else (0, 1))  # equals at the end


def test_steps_are_applied_in_the_order_of_the_fields() -> None:
    sampling = replace(GREEDY, logit_bias=((0, -3.0),), repetition_penalty=2.0, presence_penalty=1.0)
    adjusted = adjust(row(1, 0), sequence(sampling, [1, 0], prompt_len=1))
    assert adjusted.tolist() == [(1 - 3) * 2 - 1, 0]  # biased below zero first, so multiplied


def test_all_banned_is_that_row_s_error() -> None:
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, min_tokens=1, stop_token_ids=(0, 1))
        bad, good = sample(row(1, 2).expand(2, 2), [sequence(sampling), sequence(GREEDY)])
        assert bad.fault is Fault.NOTHING_ALLOWED
        assert (good.fault, good.token_id) == (None, 1)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_fail_their_row_alone(poison: float, temperature: float) -> None:
    logits = torch.zeros(3, 4)
    logits[:, 2] = 50
    if poison == -math.inf:
        logits[1] = poison
    else:
        logits[1, 3] = poison
    sampling = SamplingParams(temperature=temperature)
    first, bad, last = sample(logits, [sequence(sampling)] * 3)
    assert (first.token_id, last.token_id) == (2, 2)
    assert bad.fault is Fault.NOT_FINITE


# -- filtering ---------------------------------------------------------------------------------------------------------


def test_scale_survives_every_temperature() -> None:
    for temperature in (1e-300, 1e-5, 1.0, 1e300):
        scores = scale(allowed(row(3, 1, 3)), temperature).scores
        assert scores.max() == 0
        assert not scores.isnan().any()
    assert one(row(1, 2, 1), SamplingParams(temperature=1e-300)) == 1


def test_top_k_keeps_the_lowest_ids_of_equals() -> None:
    assert keep_top_k(candidates(0, -1, -1, -1, -2), 3).token_ids.tolist() == [0, 1, 2]
    assert keep_top_k(candidates(0, -1), 5).token_ids.tolist() == [0, 1]


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    scores = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    assert keep_top_p(candidates(*scores), 0.69).token_ids.tolist() == [1, 3]
    assert keep_top_p(candidates(*scores), 0.71).token_ids.tolist() == [1, 2, 3]
    assert keep_top_p(candidates(*scores), 1e-9).token_ids.tolist() == [1]
    assert keep_top_p(candidates(0, 0, 0, 0), 0.5).token_ids.tolist() == [0, 1]


def test_min_p_is_relative_to_the_likeliest() -> None:
    scores = [math.log(p) for p in (1.0, 0.5, 0.21, 0.19)]
    assert keep_min_p(candidates(*scores), 0.2).token_ids.tolist() == [0, 1, 2]
    assert keep_min_p(candidates(*scores), 1.0).token_ids.tolist() == [0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-40, 0).map(lambda x: round(x, 1)), min_size=1, max_size=60),
    st.integers(1, 60),
    st.floats(0.01, 0.99),
)
def test_filters_equal_a_plain_sort(values: list[float], k: int, p: float) -> None:
    values = [value - max(values) for value in values]
    order = sorted(range(len(values)), key=lambda index: (-values[index], index))
    pool = candidates(*values)
    assert keep_top_k(pool, k).token_ids.tolist() == sorted(order[:k])
    probabilities = torch.softmax(pool.scores, 0).tolist()
    kept, reached = [], 0.0
    for index in order:
        if reached >= p - 1e-12:
            break
        kept.append(index)
        reached += probabilities[index]
    nucleus = keep_top_p(pool, p).token_ids.tolist()
    assert nucleus == sorted(nucleus)
    assert set(nucleus) in (set(kept), set(order[: len(kept) + 1]))  # a sum within 1e-12 of p may go either way


# -- the draw ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.floats(0.05, 60))
def test_the_shortcut_draws_what_all_the_noise_would(seed: int, position: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed % 2**63)
    scores = torch.randn(500, generator=generator, dtype=torch.float64) * spread
    pool = Candidates(torch.arange(500) * 3, scores - scores.max())
    sums = pool.scores + gumbel(pool.token_ids, seed=seed, position=position, choice=0)
    assert draw(pool, seed=seed, position=position, choice=0) == int(pool.token_ids[sums.argmax()])


def test_draws_follow_the_distribution() -> None:
    """Chi-squared of 4,000 draws at fixed seeds against softmax; 99.9th percentile at 5 degrees of freedom."""
    logits = row(2, 1, 0, -1, 0.5, 1.5)
    temperature = 0.8
    expected = torch.softmax(logits.double() / temperature, 0) * 4000
    counts = torch.zeros(6, dtype=torch.float64)
    for seed in range(4000):
        drawn = one(logits, SamplingParams(temperature=temperature, seed=seed * 0x9E3779B97F4A7C15 % 2**64))
        counts[drawn] += 1
    assert ((counts - expected) ** 2 / expected).sum() < 20.5


def test_positions_and_choices_draw_afresh() -> None:
    logits = torch.zeros(1000)
    by_position = [one(logits, SamplingParams(seed=1), [0] * length) for length in range(1, 30)]
    by_choice = [one(logits, SamplingParams(seed=1, choice=choice)) for choice in range(30)]
    assert len(set(by_position)) > 25
    assert len(set(by_choice)) > 25
    assert by_position == [one(logits, SamplingParams(seed=1), [5] * length) for length in range(1, 30)]


VARIED = [
    GREEDY,
    SamplingParams(seed=3),
    SamplingParams(temperature=0.7, top_p=0.8, seed=9),
    SamplingParams(temperature=1.3, top_k=5, min_p=0.05, seed=2**63),
    SamplingParams(((3, 4.0),), 1.3, 0.4, 0.2, 4, (1, 2), temperature=0.0),
    SamplingParams(frequency_penalty=1.05, temperature=0.0, logprobs=3),
]


def test_a_row_draws_the_same_alone_and_in_any_company() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(len(VARIED), 400, generator=generator) * 4
    sequences = [sequence(sampling, list(range(5 + index)), 3) for index, sampling in enumerate(VARIED)]
    together = sample(logits, sequences)
    backwards = sample(logits.flip(0), sequences[::-1])[::-1]
    alone = [sample(logits[index : index + 1], [one_of])[0] for index, one_of in enumerate(sequences)]
    assert together == backwards == alone


# -- logprobs ----------------------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = row(1, 2, 3, 2)
    sampling = replace(GREEDY, logit_bias=((0, 100.0),), repetition_penalty=3.0, logprobs=3)
    drawn = sample(logits.unsqueeze(0), [sequence(sampling)])[0]
    expected = torch.log_softmax(logits.double(), 0)
    assert drawn.token_id == 0
    assert drawn.logprobs is not None
    assert drawn.logprobs.drawn == pytest.approx(float(expected[0]), abs=1e-12)
    assert [token for token, _ in drawn.logprobs.top] == [2, 1, 3]  # ties by id
    assert [value for _, value in drawn.logprobs.top] == pytest.approx([float(expected[i]) for i in (2, 1, 3)])


def test_logprobs_of_none_and_of_more_than_there_are() -> None:
    assert token_logprobs(row(0, 0), 1, 0).top == ()
    assert len(token_logprobs(row(0, 0), 1, 20).top) == 2
    assert sample(torch.zeros(1, 3), [sequence(GREEDY)])[0].logprobs is None


def test_a_greedy_sequence_asks_for_nothing_else() -> None:
    asking = [
        replace(GREEDY, logit_bias=((1, 1.0),)),
        replace(GREEDY, repetition_penalty=1.1),
        replace(GREEDY, presence_penalty=0.1),
        replace(GREEDY, frequency_penalty=-0.1),
        replace(GREEDY, min_tokens=1, stop_token_ids=(3,)),
        replace(GREEDY, logprobs=0),
        SamplingParams(temperature=0.1),
    ]
    assert not any(sequence(sampling).greedy for sampling in asking)
    harmless = replace(GREEDY, top_k=5, top_p=0.5, min_p=0.1, seed=7, min_tokens=3, choice=1)
    assert sequence(harmless).greedy
    assert adjust(row(1, 2), sequence(harmless)).tolist() == [1, 2]


# -- a mask ------------------------------------------------------------------------------------------------------------


def masked(logits: Tensor, sampling: SamplingParams, *words: int) -> Drawn:
    masked = SampledSequence(sampling, array("i", (0,)), 1, array("I", words))
    return sample(logits.unsqueeze(0), [masked])[0]


def test_a_mask_lets_only_its_tokens_be_drawn() -> None:
    logits = torch.arange(70, dtype=torch.float32)
    assert masked(logits, GREEDY, 1 << 5 | 1 << 31, 1 << 3).token_id == 35
    assert masked(logits, GREEDY, 1 << 5 | 1 << 31).token_id == 31, "none behind the last word"
    assert masked(logits, GREEDY, *[2**32 - 1] * 3).token_id == 69
    found = {masked(torch.zeros(70), SamplingParams(seed=seed), 0b1010).token_id for seed in range(40)}
    assert found == {1, 3}


def test_a_mask_comes_before_the_filters_and_behind_the_penalties() -> None:
    logits = row(5.0, 4.0, 3.0, 2.0)
    assert masked(logits, SamplingParams(top_k=1), 0b1100).token_id == 2
    assert masked(logits, replace(GREEDY, logit_bias=((0, 100.0), (3, 50.0))), 0b1110).token_id == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_of_nothing_is_a_dead_end(temperature: float) -> None:
    assert masked(torch.zeros(40), SamplingParams(temperature=temperature), 0, 0).fault is Fault.NOTHING_ALLOWED
    assert masked(torch.zeros(40), SamplingParams(temperature=temperature)).fault is Fault.NOTHING_ALLOWED


def test_logprobs_do_not_see_the_mask() -> None:
    logits = row(5.0, 4.0, 3.0)
    drawn = masked(logits, replace(GREEDY, logprobs=1), 0b100)
    assert drawn.logprobs == token_logprobs(logits, 2, 1)


def test_a_row_with_a_mask_needs_its_logits() -> None:
    assert SampledSequence(GREEDY, array("i", (0,)), 1).greedy
    assert not SampledSequence(GREEDY, array("i", (0,)), 1, array("I", (1,))).greedy
