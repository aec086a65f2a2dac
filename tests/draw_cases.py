"""Rows of logits and ways to draw from them, for every sampler that must equal `kernels.sampling`."""

import math
from array import array

import torch
from hypothesis import strategies as st
from torch import Tensor

from executor.step import SamplingParams
from kernels.sampling import SampledSequence


def sequence(
    sampling: SamplingParams, tokens: list[int] | None = None, prompt_len: int = 1, mask: list[int] | None = None
) -> SampledSequence:
    words = None if mask is None else array("I", mask)
    return SampledSequence(sampling, array("i", tokens or [0]), prompt_len, words)


def rows(kind: str, count: int, vocab: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, vocab, generator=generator)
    match kind:
        case "model":  # most far below a few
            return normal * 2.5 + 12 * torch.rand(count, vocab, generator=generator).pow(400)
        case "flat":
            return normal * 0.01
        case "wide":
            return normal * 60
        case "ties":
            return (normal * 2).round()
        case "equal":
            return torch.full((count, vocab), 1.5)
        case "zeros":  # of both signs
            return torch.where(normal > 0, 0.0, -0.0)
        case "masked":
            return torch.where(normal > 1.2, normal, -math.inf)
        case "tiny":  # differences that float64 loses against the largest
            return torch.where(normal > 0, normal * 1e-25, torch.full_like(normal, 3.0).where(normal < -2.5, normal))
    raise AssertionError(kind)


KINDS = ["model", "flat", "wide", "ties", "equal", "zeros", "masked", "tiny"]
PARAMS = st.builds(
    SamplingParams,
    logit_bias=st.lists(st.tuples(st.integers(0, 60), st.floats(-100, 100, width=32)), max_size=3).map(tuple),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.125, 10, width=32)),
    presence_penalty=st.one_of(st.just(0.0), st.floats(-2, 2, width=32)),
    frequency_penalty=st.one_of(st.just(0.0), st.floats(-2, 2, width=32)),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.lists(st.integers(0, 60), max_size=3).map(tuple),
    temperature=st.one_of(
        st.sampled_from((0.0, 0.7, 1.0)), st.floats(0, 100, width=32), st.sampled_from((1e-300, 1e300))
    ),
    top_k=st.one_of(st.just(0), st.integers(1, 80), st.integers(1, 5000)),
    top_p=st.one_of(st.just(1.0), st.floats(2**-20, 1, width=32), st.just(1 - 2**-24)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1, width=32)),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 2**32 - 1),
    logprobs=st.one_of(st.none(), st.integers(0, 20), st.just(5000)),
)


# Words for the vocabularies below: too few and too many of them, among them whole ones.
MASKS = st.one_of(
    st.none(),
    st.lists(st.one_of(st.sampled_from((0, 2**32 - 1)), st.integers(0, 2**32 - 1)), max_size=140),
)
