"""W8A8 products against torch: codes, scales, bias, gate, residual, odd sizes."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.gpu.narrow import (
    KINDS,
    LARGEST,
    NarrowRows,
    narrow_matrix,
    narrow_norm,
    narrow_product,
    narrow_rows,
    quantized_matrix,
)
from kernels.gpu.target import present_target

TARGET = present_target()
TOLERANCE = 2e-6  # of float32 sums, by the largest result


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def expected_rows(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    size = x.abs().amax(dim=1).clamp(min=1e-30)
    near = x * (LARGEST[kind] / size)[:, None]
    return (near.round() if kind == "int8" else near).to(KINDS[kind]), size / LARGEST[kind]


def values(rows: NarrowRows) -> Tensor:
    return rows.codes[:, : rows.cols].double() * rows.scale.double()[:, None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 100), (2, 128), (2, 300)])
def test_rows_have_torchs_codes(kind: str, rows: int, cols: int) -> None:
    x = random(rows, cols + 3)[:, :cols]  # not contiguous
    found = narrow_rows(TARGET, x, kind)
    codes, scale = expected_rows(x, kind)
    assert torch.equal(found.codes[:, :cols].float(), codes.float())
    assert torch.equal(found.scale, scale)
    assert not found.codes[:, cols:].float().any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_zeros_and_rows_that_hold_no_number(kind: str) -> None:
    x = torch.ones(4, 64)
    x[0], x[1, 3], x[2, 5] = 0.0, math.nan, math.inf
    product = narrow_product(TARGET, narrow_rows(TARGET, x, kind), quantized_matrix(TARGET, torch.ones(64, 64), kind))
    assert torch.equal(product[0], torch.zeros(64))
    assert product[1:3].isnan().all()
    torch.testing.assert_close(product[3], torch.full((64,), 64.0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cols", [96, 200])
def test_the_norm_gives_what_norm_and_rows_give(kind: str, cols: int) -> None:
    x, gain = random(3, cols), random(cols, seed=1)
    normed = x * torch.rsqrt((x * x).mean(dim=1, keepdim=True) + 1e-5) * gain
    found, codes = narrow_norm(TARGET, x, gain, 1e-5, kind), expected_rows(normed, kind)
    torch.testing.assert_close(found.scale, codes[1], rtol=1e-6, atol=0)
    # Another order of the norm's sum may move a value across the middle between two codes: by one step, in few places.
    step = (values(found) - codes[0].double() * codes[1].double()[:, None]).abs()
    coarse = LARGEST[kind] / (127 if kind == "int8" else 14)  # of the largest: a 127th; an e4m3 step is at most a 14th
    assert (step <= 1.01 * found.scale.double()[:, None] * coarse).all()
    assert (step > 1e-5 * normed.abs().max()).float().mean() <= 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "n", "cols"), [(1, 64, 128), (17, 72, 96), (5, 130, 300)])
@pytest.mark.parametrize("out_type", [torch.float32, torch.float16])
def test_product_with_bias_and_residual(kind: str, rows: int, n: int, cols: int, out_type: torch.dtype) -> None:
    x = narrow_rows(TARGET, random(rows, cols), kind)
    matrix = quantized_matrix(TARGET, random(n, cols, seed=1), kind)
    bias, residual = random(n, seed=2), random(rows, n, seed=3)
    exact = values(x) @ values(matrix).t()
    plain = narrow_product(TARGET, x, matrix, out_type=out_type)
    both = narrow_product(TARGET, x, matrix, bias=bias, residual=residual, out_type=out_type)
    tolerance = TOLERANCE if out_type == torch.float32 else 1e-3
    size = tolerance * float(exact.abs().max())
    torch.testing.assert_close(plain.double(), exact, rtol=tolerance, atol=size)
    torch.testing.assert_close(both.double(), exact + bias + residual, rtol=tolerance, atol=size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "n"), [(1, 64), (18, 40)])
def test_gated(kind: str, rows: int, n: int) -> None:
    x = narrow_rows(TARGET, random(rows, 160), kind)
    matrix = quantized_matrix(TARGET, random(2 * n, 160, seed=1), kind)
    gate, up = (values(x) @ values(matrix).t()).split(n, dim=1)
    residual = random(rows, n, seed=2)
    exact = torch.nn.functional.silu(gate) * up + residual
    found = narrow_product(TARGET, x, matrix, gated=True, residual=residual)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_has_the_bits_that_it_has_among_many(kind: str) -> None:
    x, matrix = random(33, 256), quantized_matrix(TARGET, random(64, 256, seed=1), kind)
    together = narrow_product(TARGET, narrow_rows(TARGET, x, kind), matrix)
    alone = [narrow_product(TARGET, narrow_rows(TARGET, x[at : at + 1], kind), matrix) for at in (0, 16, 32)]
    assert torch.equal(torch.cat(alone), together[[0, 16, 32]])


def test_what_is_refused() -> None:
    older = replace(TARGET, arch=80)
    message = r"fp8 products need compute capability 8\.9, this device has 8\.0"
    with pytest.raises(ValueError, match=message):
        quantized_matrix(older, torch.ones(4, 4), "fp8")
    with pytest.raises(ValueError, match=message):
        narrow_rows(older, torch.ones(4, 4), "fp8")
    with pytest.raises(ValueError, match=r"kind must be one of int8, fp8, got int3"):
        narrow_rows(TARGET, torch.ones(4, 4), "int3")
    with pytest.raises(ValueError, match=r"codes must be int8 or float8_e4m3fn, got torch\.float32"):
        narrow_matrix(TARGET, torch.ones(4, 4), torch.ones(4))
    x, matrix = narrow_rows(TARGET, torch.ones(2, 8), "int8"), quantized_matrix(TARGET, torch.ones(4, 9), "int8")
    with pytest.raises(ValueError, match=r"x must have 9 columns, got 8"):
        narrow_product(TARGET, x, matrix)
    with pytest.raises(ValueError, match=r"x is int8, the weights are fp8"):
        narrow_product(TARGET, x, quantized_matrix(TARGET, torch.ones(4, 8), "fp8"))
