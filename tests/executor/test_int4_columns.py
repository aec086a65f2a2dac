"""GPTQ and AWQ layouts as rows: no integer, scale or zero point changes."""

import pytest
import torch
from column_packed import Columns, awq, gptq

from executor.quant.int4_columns import awq_matrix, gptq_matrix
from kernels.ops import StoredMatrix

LAYOUTS = {"gptq": gptq, "awq": awq}


def stored(layout: str, made: Columns) -> StoredMatrix:
    if layout == "gptq":
        return gptq_matrix(layout, made.qweight, made.qzeros, made.scales, None)
    return awq_matrix(layout, made.qweight, made.qzeros, made.scales)


@pytest.mark.parametrize("zero", [None, 8, 0, 15])
@pytest.mark.parametrize(("rows", "cols", "group"), [(8, 64, 32), (72, 256, 128), (16, 192, 64), (24, 96, 96)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_weight_is_exact(layout: str, rows: int, cols: int, group: int, zero: int | None) -> None:
    made = LAYOUTS[layout](rows, cols, group, zero)
    matrix = stored(layout, made)
    assert (matrix.rows, matrix.cols, matrix.bits) == (rows, cols, 4)
    assert torch.equal(matrix.dequantize(matrix.blocks), made.values)
    assert matrix.unpack is not None
    found = matrix.unpack(matrix.blocks[3:5])
    assert (found.minimum is None) == (zero == 8)
    assert found.scale.shape == (2, cols // group)


def test_columns_out_of_order_are_refused() -> None:
    made = gptq(8, 64, 32)
    order = torch.arange(64, dtype=torch.int32) // 32
    gptq_matrix("w", made.qweight, made.qzeros, made.scales, order)
    with pytest.raises(ValueError, match="desc_act"):
        gptq_matrix("w", made.qweight, made.qzeros, made.scales, order.flip(0))


def test_words_of_other_widths_are_refused() -> None:
    made = gptq(8, 64, 32)
    with pytest.raises(ValueError, match="do not go with scales"):
        gptq_matrix("w", made.qweight[:, :4], made.qzeros, made.scales, None)
    small = awq(8, 64, 16)
    with pytest.raises(ValueError, match="4 groups of 64 columns"):
        awq_matrix("w", small.qweight, small.qzeros, small.scales)
    with pytest.raises(ValueError, match="must be int32"):
        awq_matrix("w", made.qweight.long(), made.qzeros, made.scales)
