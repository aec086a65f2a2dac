"""GPTQ and AWQ weights through the kernel that all 4-bit weights take: groups of 32, 64, 128 and whole rows."""

import pytest
import torch
from column_packed import awq, gptq

from executor.quant.int4_columns import awq_matrix, gptq_matrix
from kernels.gpu.backend import GpuOps
from kernels.gpu.target import present_target

TOLERANCE = 2e-6  # of float32 products, by the largest result


@pytest.mark.parametrize("zero", [None, 8])
@pytest.mark.parametrize(("cols", "group"), [(64, 32), (192, 64), (384, 128), (160, 160)])
@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_product_and_rows(layout: str, cols: int, group: int, zero: int | None) -> None:
    rows = 72
    if layout == "gptq":
        made = gptq(rows, cols, group, zero)
        stored = gptq_matrix("w", made.qweight, made.qzeros, made.scales, None)
    else:
        made = awq(rows, cols, group, zero)
        stored = awq_matrix("w", made.qweight, made.qzeros, made.scales)
    ops = GpuOps(present_target())
    packed = ops.pack([stored], lookup=True)
    assert torch.equal(ops.embedding(torch.arange(rows), packed), made.values)
    x = torch.randn(5, cols, generator=torch.Generator().manual_seed(1))
    expected = (x.double() @ made.values.double().t()).float()
    size = TOLERANCE * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(ops.linear(x, packed), expected, rtol=TOLERANCE, atol=size)
