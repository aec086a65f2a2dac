"""A decoder's layers as one op: the same bits as the composites one after the other, on every back end."""

import math

import pytest
import torch
from decoder_cases import CASES, EPS, Q4, run, some_layers
from paged_cases import paged_case

from executor.loading.ggml_types import GgmlType
from kernels.ops import AttentionShape, Ops, PlainDecoder


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize(("shape", "cols", "inner", "weights", "down", "biases"), CASES)
def test_layers_are_their_composites(
    ops: Ops, shape: AttentionShape, cols: int, inner: int, weights: GgmlType, down: GgmlType, biases: bool
) -> None:
    layers = some_layers(ops, shape, cols, inner, weights, biases=biases, down=down)
    case = paged_case(shape, [(1, 1), (70, 1), (33, 33), (300, 4), (5, 0)])
    x = torch.randn(int(case.rows.query_start[-1]), cols, generator=torch.Generator().manual_seed(1))
    before = x.clone()
    whole, pages = run(ops, case, ops.pack_decoder(layers, EPS), x, math.nan)
    assert torch.equal(x, before)
    plain, plain_pages = run(ops, case, PlainDecoder(tuple(layers), EPS), x, math.nan)
    assert whole.isfinite().all()
    assert torch.equal(whole, plain)
    for page, plain_page in zip(pages, plain_pages, strict=True):
        assert torch.equal(page.nan_to_num(7.0), plain_page.nan_to_num(7.0))


def test_a_step_of_no_rows(ops: Ops) -> None:
    shape = AttentionShape(4, 2, 16, 4)
    decoder = ops.pack_decoder(some_layers(ops, shape, 64, 96, Q4, biases=False, down=Q4), EPS)
    case = paged_case(shape, [(3, 0)])
    assert run(ops, case, decoder, torch.empty(0, 64), math.nan)[0].shape == (0, 64)


def test_a_step_that_does_not_fit_the_layers_is_named(ops: Ops) -> None:
    shape = AttentionShape(4, 2, 16, 4)
    decoder = ops.pack_decoder(some_layers(ops, shape, 64, 96, Q4, biases=False, down=Q4), EPS)
    if isinstance(decoder, PlainDecoder):
        return  # its ops name what does not fit
    case = paged_case(shape, [(3, 2)])
    with pytest.raises(ValueError, match=r"x must be float32 \[2, 64\], got \[2, 65\]"):
        run(ops, case, decoder, torch.empty(2, 65), math.nan)
    other = paged_case(AttentionShape(4, 1, 16, 4), [(3, 2)])
    with pytest.raises(ValueError, match="the layers are not those of"):
        run(ops, other, decoder, torch.empty(2, 64), math.nan)
