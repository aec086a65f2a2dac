"""Draws on the device against `kernels.sampling`, which says what a draw is: the same results, bit for bit."""

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from draw_cases import KINDS, MASKS, PARAMS, rows, sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.step import SamplingParams
from kernels import sampling
from kernels.gpu import draws
from kernels.gpu.backend import GpuOps
from kernels.gpu.device.written_out import philox_word
from kernels.gpu.target import Target, present_target
from kernels.philox import philox4x32
from kernels.sampling import Fault

SIZES = (61, 64, 300, 1000, 4097)


class SmallBlocks(Target):
    """Several blocks to a row, as on a GPU; the interpreter's own choice is one."""

    def draw_block(self, vocab: int) -> int:
        return 1024


def ops(*, blocks: bool = False) -> GpuOps:
    target = present_target()
    if not blocks:
        return GpuOps(target)
    return GpuOps(SmallBlocks(target.device, target.arch, target.processors, target.operand))


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.sampled_from(SIZES),
    st.integers(0, 2**31),
    st.lists(
        st.tuples(PARAMS, st.lists(st.integers(0, 60), min_size=1, max_size=30), st.integers(1, 30), MASKS),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)
def test_any_row_draws_as_the_definition_says(
    kind: str,
    vocab: int,
    seed: int,
    drawn: list[tuple[SamplingParams, list[int], int, list[int] | None]],
    blocks: bool,
) -> None:
    logits = rows(kind, len(drawn), vocab, seed)
    sequences = [
        sequence(replace(one, logprobs=None if one.logprobs is None else min(one.logprobs, 20)), tokens, at, mask)
        for one, tokens, prompt_len, mask in drawn
        for at in (min(prompt_len, len(tokens)),)
    ]
    assert ops(blocks=blocks).sample(logits, sequences) == sampling.sample(logits, sequences)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_row_with_every_filter(kind: str) -> None:
    chosen = [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9, seed=2**64 - 1, choice=2**32 - 1),
        SamplingParams(temperature=2.5, top_p=0.999, logprobs=3),
        SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
        SamplingParams(temperature=100.0, top_p=0.5),
        SamplingParams(top_k=3000),
        SamplingParams(min_p=0.02, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.25),
    ]
    logits = rows(kind, 1, 4097, seed=3).expand(len(chosen), -1).contiguous()
    sequences = [sequence(one, [7, 7, 1, 60, 7], 2) for one in chosen]
    assert ops(blocks=True).sample(logits, sequences) == sampling.sample(logits, sequences)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_no_numbers_fails_alone(poison: float, temperature: float) -> None:
    for place in (0, 99):
        logits = torch.zeros(3, 100)
        logits[:, 2] = 50
        if poison == -math.inf:
            logits[1] = poison
        else:
            logits[1, place] = poison
        found = ops().sample(logits, [sequence(SamplingParams(temperature=temperature))] * 3)
        assert [one.fault for one in found] == [None, Fault.NOT_FINITE, None]
        assert (found[0].token_id, found[2].token_id) == (2, 2)


def test_nothing_allowed_is_a_fault_of_its_row() -> None:
    sequences = [sequence(SamplingParams(), mask=[0]), sequence(SamplingParams(), mask=[4])]
    found = ops().sample(torch.zeros(2, 40), sequences)
    assert [one.fault for one in found] == [Fault.NOTHING_ALLOWED, None]
    assert found[1].token_id == 2


def test_greedy_takes_the_first_of_equals_and_shows_nan() -> None:
    logits = rows("ties", 5, 3000, seed=4)
    logits[4, 1500] = math.nan
    expected = sampling.greedy(logits)
    found = draws.greedy(ops(blocks=True).target, logits)
    assert torch.equal(found.token_ids[:4], expected.token_ids[:4])
    assert torch.equal(found.highest.nan_to_num(7e7), expected.highest.nan_to_num(7e7))


def test_rows_need_not_lie_together() -> None:
    wide = rows("model", 3, 600, seed=6)
    sequences = [sequence(SamplingParams(seed=index, top_p=0.8)) for index in range(3)]
    assert ops().sample(wide[:, 40:540], sequences) == sampling.sample(wide[:, 40:540], sequences)


@triton.jit
def words(out, position, choice, low, high, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.arange(0, BLOCK)
    zero = (token ^ token).to(tl.uint32)
    place, which = zero + tl.load(position).to(tl.uint32), zero + tl.load(choice).to(tl.uint32)
    key_low, key_high = zero + tl.load(low).to(tl.uint32), zero + tl.load(high).to(tl.uint32)
    word = philox_word(place, token.to(tl.uint32), which, key_low, key_high)
    tl.store(out + token, word.to(tl.int64))


def test_random_words_are_those_of_philox() -> None:
    """At tokens and seeds whose words fill 32 bits; the draw itself would hide a wrong low bit for long."""
    position, choice, low, high = 131_071, 2**32 - 1, 0xDEADBEEF, 0xFFFFFFFF
    out = torch.empty(256, dtype=torch.int64)
    words[(1,)](out, *(torch.tensor([each]) for each in (position, choice, low, high)), BLOCK=256)
    zero = torch.zeros(1, dtype=torch.int64)
    expected = philox4x32((zero + position, torch.arange(256), zero + choice, zero), (low, high))[0]
    assert torch.equal(out, expected)


def test_more_tokens_than_masses_can_be_added_of_are_refused() -> None:
    orders = draws.orders_of([sequence(SamplingParams())], 2**18 + 1)
    with pytest.raises(ValueError, match="262145 tokens"):
        draws.draw(present_target(), torch.zeros(1, 2**18 + 1), orders)
