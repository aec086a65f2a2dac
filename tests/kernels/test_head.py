"""The head of every back end: the likeliest token is that of the logits, alone and among others."""

import math

import pytest
import torch
from stored_matrices import f32_matrix, random_matrix

from executor.loading.ggml_types import GgmlType
from kernels.ops import Ops
from kernels.sampling import greedy

COLS = 96


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 500, 4099])
@pytest.mark.parametrize("kind", [GgmlType.Q8_0, GgmlType.Q4_1, GgmlType.F16], ids=lambda kind: kind.name)
def test_the_likeliest_is_that_of_the_logits(ops: Ops, kind: GgmlType, vocab: int) -> None:
    head = ops.pack([random_matrix(kind, vocab, COLS, seed=vocab)], lookup=True)
    norm = torch.linspace(0.5, 1.5, COLS)
    x = torch.randn(40, COLS, generator=torch.Generator().manual_seed(vocab))
    expected = greedy(ops.head_logits(x, norm, 1e-5, head))
    for rows in (1, 3, 17, 40):
        found = ops.head_greedy(x[:rows], norm, 1e-5, head)
        assert torch.equal(found.token_ids, expected.token_ids[:rows])
        assert torch.equal(found.highest, expected.highest[:rows])


def test_the_lowest_id_of_equals_and_strided_rows(ops: Ops) -> None:
    weights = torch.zeros(300, COLS)
    weights[[299, 256, 77, 78, 160], 3] = 1.0
    head = ops.pack([f32_matrix(weights)], lookup=False)
    x = torch.zeros(4, 2 * COLS)
    x[:, 3] = torch.tensor([1.0, -1.0, 2.0, 0.0])
    found = ops.head_greedy(x[:, :COLS], torch.ones(COLS), 1e-5, head)
    assert found.token_ids.tolist() == [77, 0, 77, 0]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_no_number_shows_in_its_row_alone(ops: Ops, poison: float) -> None:
    head = ops.pack([random_matrix(GgmlType.Q8_0, 200, COLS, seed=1)], lookup=False)
    x = torch.randn(18, COLS, generator=torch.Generator().manual_seed(1))
    x[7, 5] = poison
    highest = ops.head_greedy(x, torch.ones(COLS), 1e-5, head).highest
    assert not highest[7].isfinite()
    assert highest[torch.arange(18) != 7].isfinite().all()


def test_one_logit_that_is_infinite(ops: Ops) -> None:
    weights = torch.ones(100, COLS)
    weights[41] = 3e38
    head = ops.pack([f32_matrix(weights)], lookup=False)
    assert ops.head_greedy(torch.ones(2, COLS), torch.ones(COLS), 1e-5, head).highest.isinf().all()
