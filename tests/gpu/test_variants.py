"""Which launches would be compiled: counted without a compiler."""

import pytest
import torch

from kernels.gpu.backend import GpuOps
from kernels.gpu.launch import Launch
from kernels.gpu.launches import META, matrix
from kernels.gpu.target import Target
from kernels.gpu.variants import UnpreparedError, Variants

WEIGHT = matrix("float", 4096, 4096)


def multiply(variants: Variants, rows: int) -> None:
    ops = GpuOps(Target(META, 90, 132, torch.bfloat16, variants))
    ops.linear(torch.empty(rows, 4096, device=META), WEIGHT)


def test_sizes_that_share_code_are_compiled_once() -> None:
    ran: list[Launch] = []
    variants = Variants(ran.append)
    multiply(variants, 3)
    first = variants.compiled
    assert first == 2  # the product, and the sum of its segments
    for rows in (5, 7, 15):
        multiply(variants, rows)
    assert variants.compiled == first
    multiply(variants, 1)  # an integer of 1 is a constant
    multiply(variants, 16)  # and a multiple of 16 is known to be one
    assert variants.compiled == 3 * first
    assert len(ran) == 12


def test_what_comes_late_is_told_or_refused() -> None:
    variants = Variants(lambda _: None)
    multiply(variants, 3)
    variants.seal()
    multiply(variants, 5)
    assert variants.late == []
    multiply(variants, 100)
    assert variants.late == ["linear_kernel"]
    strict = Variants(lambda _: None, refuse=True)
    multiply(strict, 3)
    strict.seal()
    with pytest.raises(UnpreparedError, match=r"linear_kernel would be compiled now: .*BLOCK_T 128"):
        multiply(strict, 101)
