"""What the contract of all back ends does not ask: narrow pages, splits, windows, sinks, capped scores, rounding."""

import math
from dataclasses import replace

import pytest
import torch
from paged_cases import PagedCase, paged_case
from stored_matrices import f32_matrix
from torch import Tensor

from kernels.gpu import attention
from kernels.gpu.backend import GpuOps
from kernels.gpu.launch import Launch, run
from kernels.gpu.pack import GpuMatrix
from kernels.gpu.pages import PAGE_FORMATS
from kernels.gpu.products import product
from kernels.gpu.target import Target, present_target
from kernels.ops import AttentionShape

SHAPE = AttentionShape(heads=6, kv_heads=2, head_dim=64, block_size=16)
FORMATS = ["fp32", "bf16", "fp16", "int8", "fp8"]
TOLERANCE = 2e-5  # of attention in float32 over what the pages hold, relative and absolute


def back_end(pages: str = "fp32", processors: int = 1) -> GpuOps:
    return GpuOps(replace(present_target(), processors=processors), PAGE_FORMATS[pages])


def filled(ops: GpuOps, case: PagedCase, poison: int = 0xFF) -> tuple[Tensor, Tensor]:
    """The case's pages; what no token wrote is NaN in every format that has one."""
    shape = case.shape
    size = case.blocks * ops.pages.block_bytes(shape.block_size, shape.kv_heads, shape.head_dim)
    page = (case.blocks, *ops.pages.page(shape.block_size, shape.kv_heads, shape.head_dim))
    pages = [torch.full((size,), poison, dtype=torch.uint8).view(ops.pages.dtype).view(page) for _ in range(2)]
    for keys, values, table in zip(case.keys, case.values, case.rows.block_tables, strict=True):
        places = torch.arange(keys.shape[0])
        slots = table[places // shape.block_size].to(torch.int64) * shape.block_size + places % shape.block_size
        ops.cache_write(keys, values, pages[0], pages[1], slots)
    return pages[0], pages[1]


def attend(ops: GpuOps, case: PagedCase, extras: attention.Extras = attention.NO_EXTRAS) -> Tensor:
    k_pages, v_pages = filled(ops, case)
    work = attention.plan(ops.target, case.rows, case.shape, extras.window)
    scale = case.shape.head_dim**-0.5
    return attention.attend(ops.target, case.q, k_pages, v_pages, work, ops.pages, scale, extras)


def held(case: PagedCase, pages: str) -> PagedCase:
    """The case with keys and values as its pages hold them, by torch's own rounding."""

    def one(values: Tensor) -> Tensor:
        kept = PAGE_FORMATS[pages]
        if kept.kind == "float":
            return values.to(kept.dtype).float()
        largest = 448.0 if kept.kind == "fp8" else 127.0
        scale = values.abs().amax(-1, keepdim=True) * torch.tensor(1 / largest)
        scaled = values * (1 / torch.where(scale > 0, scale, 1.0))
        if kept.kind == "fp8":
            return scaled.clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        return scaled.round() * scale

    return replace(case, keys=[one(each) for each in case.keys], values=[one(each) for each in case.values])


def answer(case: PagedCase, extras: attention.Extras = attention.NO_EXTRAS) -> Tensor:
    """Row by row, in float64."""
    starts, rows = case.rows.query_start.tolist(), []
    ratio = case.shape.heads // case.shape.kv_heads
    for index, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        for row in range(starts[index], starts[index + 1]):
            stop = keys.shape[0] - (starts[index + 1] - 1 - row)
            start = max(0, stop - extras.window) if extras.window else 0
            wide = keys[start:stop].double().repeat_interleave(ratio, dim=1)
            scores = torch.einsum("hd,khd->hk", case.q[row].double(), wide) * case.shape.head_dim**-0.5
            if extras.softcap:
                scores = extras.softcap * torch.tanh(scores / extras.softcap)
            if extras.sinks is not None:
                scores = torch.cat((scores, extras.sinks.double()[:, None]), dim=1)
            weights = scores.softmax(-1)[:, : stop - start]
            wide = values[start:stop].double().repeat_interleave(ratio, dim=1)
            rows.append(torch.einsum("hk,khd->hd", weights, wide))
    return torch.stack(rows).float()


SEQUENCES = [(1, 1), (17, 1), (300, 1), (600, 3), (40, 40), (5, 0)]


@pytest.mark.parametrize("pages", FORMATS)
def test_every_page_format(pages: str) -> None:
    case = paged_case(SHAPE, SEQUENCES)
    expected = answer(held(case, pages))
    torch.testing.assert_close(attend(back_end(pages), case), expected, rtol=TOLERANCE, atol=TOLERANCE)
    if pages in ("fp8", "int8"):
        assert not torch.allclose(expected, answer(case), rtol=1e-3, atol=1e-3)  # the pages did round


@pytest.mark.parametrize("pages", ["fp8", "int8"])
def test_scales_of_keys_and_values_are_their_own(pages: str) -> None:
    """Keys and values of sizes far apart, in each head and token; a token of zeros; one that stands out."""
    case = paged_case(SHAPE, [(33, 1), (20, 20)])
    for keys, values in zip(case.keys, case.values, strict=True):
        keys *= torch.tensor([0.01, 3.0])[None, :, None]
        values *= torch.tensor([50.0, 0.002])[None, :, None]
        keys[2], values[3] = 0.0, 0.0
        values[4, 0, 5] = 1e4
    found, expected = attend(back_end(pages), case), answer(held(case, pages))
    assert found.isfinite().all()
    for head in range(SHAPE.heads):
        size = float(expected[:, head].abs().max())
        assert float((found - expected)[:, head].abs().max()) < TOLERANCE * size


@pytest.mark.parametrize("pages", ["fp32", "fp8"])
def test_splits_change_no_bit(pages: str) -> None:
    case = paged_case(SHAPE, [(600, 1), (513, 1), (1, 1), (300, 30), (256, 1)])
    split = back_end(pages, processors=1000)
    assert attention.plan(split.target, case.rows, SHAPE).parts > 5
    assert attention.plan(back_end(pages).target, case.rows, SHAPE).parts == 0
    assert torch.equal(attend(split, case), attend(back_end(pages), case))


EXTRAS = [
    attention.Extras(window=1),
    attention.Extras(window=100),
    attention.Extras(softcap=2.0),
    attention.Extras(sinks=torch.linspace(-3, 3, 6)),
    attention.Extras(window=280, softcap=5.0, sinks=torch.linspace(-3, 3, 6)),
]


@pytest.mark.parametrize("processors", [1, 1000])
@pytest.mark.parametrize("extras", EXTRAS)
def test_windows_caps_and_sinks(extras: attention.Extras, processors: int) -> None:
    case = paged_case(SHAPE, [(600, 1), (90, 90), (310, 40)])
    found = attend(back_end(processors=processors), case, extras)
    torch.testing.assert_close(found, answer(case, extras), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("head_dim", [80, 96, 256])
def test_head_sizes(head_dim: int) -> None:
    case = paged_case(replace(SHAPE, head_dim=head_dim), [(40, 1), (20, 20)])
    torch.testing.assert_close(attend(back_end(), case), answer(case), rtol=TOLERANCE, atol=TOLERANCE)


def test_fp8_is_that_of_torch() -> None:
    """Written by the kernel, in every code and between them, and read back."""
    ops = back_end("fp8")
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = codes[codes.isfinite() & (codes > 0)].sort().values
    between = (finite[1:] + finite[:-1]) / 2
    values = torch.cat((finite, between, between * 1.0001, between * 0.9999))
    values = torch.cat((values, -values))
    rows = values.view(-1, 2)
    keys = torch.cat((rows, torch.full((rows.shape[0], 2), 448.0)), dim=1)[:, None, :]  # so that the scale is 1
    pages = torch.zeros(rows.shape[0], *ops.pages.page(1, 1, 4), dtype=torch.uint8)
    ops.cache_write(keys, keys, pages, pages.clone(), torch.arange(rows.shape[0]))
    expected = keys[:, 0].to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(pages.view(rows.shape[0], -1)[:, :4], expected)


def test_bfloat16_is_rounded_to_the_nearest() -> None:
    ops = back_end("bf16")
    keys = torch.cat((torch.randn(63, 1, 16), torch.tensor([1.00390625, math.inf, -math.inf, 3e38] * 4).view(1, 1, 16)))
    pages = torch.zeros(64, *ops.pages.page(1, 1, 16), dtype=torch.bfloat16)
    ops.cache_write(keys, keys, pages, pages.clone(), torch.arange(64))
    assert torch.equal(pages.view(64, 16), keys[:, 0].to(torch.bfloat16))


def test_what_does_not_fit_is_named() -> None:
    case = paged_case(SHAPE, [(5, 1)])
    ops, keys = back_end(), case.keys[0]
    pages = torch.zeros(case.blocks, *ops.pages.page(16, 2, 64))
    slots = torch.arange(5)
    with pytest.raises(ValueError, match="k_pages must be contiguous"):
        ops.cache_write(keys, keys, pages[:, :8], pages[:, :8], slots)
    with pytest.raises(ValueError, match=r"k_pages must be torch.float32, got torch.bfloat16"):
        ops.cache_write(keys, keys, pages.to(torch.bfloat16), pages.to(torch.bfloat16), slots)
    with pytest.raises(ValueError, match=r"slot_mapping must be int64 \[5\]"):
        ops.cache_write(keys, keys, pages, pages, slots.to(torch.int32))
    with pytest.raises(ValueError, match="window must be at least 0"):
        attention.Extras(window=-1)


def test_the_interpreter_is_a_target_without_bfloat16() -> None:
    target: Target = present_target()
    assert (target.interpret, target.operand) == (True, torch.float32)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [5, 20])
def test_segments_in_programs_of_their_own_give_the_same_bits(rows: int, gated: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weights, x = torch.randn(256, 2100, generator=generator), torch.randn(rows, 2100, generator=generator)
    found, kernels = [], []
    for processors in (0, 1000):

        def launch(one: Launch) -> None:
            kernels.append(one.kernel.__name__)
            run(one)

        target = replace(present_target(), processors=processors, launch=launch)
        matrix = GpuOps(target).pack([f32_matrix(weights)], lookup=False)
        assert isinstance(matrix, GpuMatrix)
        found.append(product(target, x, matrix, gated=gated))
    assert kernels == ["linear_kernel", "linear_kernel", "reduce_kernel"]
    assert torch.equal(found[0], found[1])
