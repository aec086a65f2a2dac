"""The native sampler against `kernels.sampling`, which says what a draw is: the same results, bit for bit."""

import math
from collections.abc import Iterator

import pytest
import torch
from draw_cases import KINDS, MASKS, PARAMS, rows, sequence
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor.step import SamplingParams
from kernels.cpu.build import cpu_flags, runnable
from kernels.cpu.library import Team, load_library
from kernels.cpu.sampling import Sampler
from kernels.sampling import Fault, sample

NAMES = [one.name for one in runnable(cpu_flags())]


@pytest.fixture(scope="module", params=NAMES)
def sampler(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampler]:
    library = load_library(request.param)
    team = Team(library, 2)
    yield Sampler(library, team)
    team.close()


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
