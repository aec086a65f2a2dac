"""The native sampler against `kernels.sampling`, which says what a draw is: the same results, bit for bit."""

import math
from array import array
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor.step import SamplingParams
from kernels.cpu.build import cpu_flags, runnable
from kernels.cpu.library import Team, load_library
from kernels.cpu.sampling import Sampler
from kernels.sampling import Fault, SampledSequence, sample

NAMES = [one.name for one in runnable(cpu_flags())]


@pytest.fixture(scope="module", params=NAMES)
def sampler(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampler]:
    library = load_library(request.param)
    team = Team(library, 2)
    yield Sampler(library, team)
    team.close()


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


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(KINDS),
    st.sampled_from((61, 64, 300, 1000, 4097)),
    st.integers(0, 2**31),
    st.lists(
        st.tuples(PARAMS, st.lists(st.integers(0, 60), min_size=1, max_size=30), st.integers(1, 30), MASKS),
        min_size=1,
        max_size=3,
    ),
)
def test_any_row_draws_as_the_definition_says(
    sampler: Sampler,
    kind: str,
    vocab: int,
    seed: int,
    drawn: list[tuple[SamplingParams, list[int], int, list[int] | None]],
) -> None:
    logits = rows(kind, len(drawn), vocab, seed)
    sequences = [
        sequence(sampling, tokens, min(prompt_len, len(tokens)), mask) for sampling, tokens, prompt_len, mask in drawn
    ]
    assert sampler.sample(logits, sequences) == sample(logits, sequences)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=2.5, top_p=0.999, logprobs=20),
        SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
        SamplingParams(temperature=100.0, top_p=0.5),
        SamplingParams(top_k=20_000),
        SamplingParams(min_p=0.02),
    ],
    ids=str,
)
def test_a_real_vocabulary_at_many_positions(sampler: Sampler, kind: str, sampling: SamplingParams) -> None:
    logits = rows(kind, 1, 49_152, seed=3).expand(8, -1).contiguous()
    sequences = [sequence(sampling, [7] * length) for length in range(1, 9)]
    assert sampler.sample(logits, sequences) == sample(logits, sequences)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_no_numbers_fails_alone(sampler: Sampler, poison: float, temperature: float) -> None:
    for place in (0, 63, 64, 99):
        logits = torch.zeros(3, 100)
        logits[:, 2] = 50
        if poison == -math.inf:
            logits[1] = poison
        else:
            logits[1, place] = poison
        found = sampler.sample(logits, [sequence(SamplingParams(temperature=temperature))] * 3)
        assert [one.fault for one in found] == [None, Fault.NOT_FINITE, None]
        assert (found[0].token_id, found[2].token_id) == (2, 2)


def test_penalties_leave_nothing_behind(sampler: Sampler) -> None:
    logits = rows("model", 1, 500, seed=1)
    penalized = sequence(SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, seed=5), list(range(400)), 100)
    plain = sequence(SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, seed=5), [1, 2, 3], 2)
    before = sampler.sample(logits, [plain])
    sampler.sample(logits, [penalized])
    assert sampler.sample(logits, [plain]) == before


def test_wrong_logits_are_refused(sampler: Sampler) -> None:
    one = [sequence(SamplingParams())]
    with pytest.raises(ValueError, match="float32 and contiguous"):
        sampler.sample(torch.zeros(1, 9, dtype=torch.float64), one)
    with pytest.raises(ValueError, match="float32 and contiguous"):
        sampler.sample(torch.zeros(9, 1).t().expand(2, 9)[:1, ::2], one)
    with pytest.raises(ValueError, match="2 rows of logits are not of 1 sequences"):
        sampler.sample(torch.zeros(2, 9), one)
