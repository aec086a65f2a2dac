"""Pages and attention of the native library, in every instruction set that this machine can run."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from paged_cases import PagedCase, dense_answer, paged_case
from torch import Tensor

from kernels.cpu.attention import NativeAttention
from kernels.cpu.build import cpu_flags, runnable
from kernels.cpu.library import Team, load_library
from kernels.ops import AttentionShape, PagedRows

NAMES = [isa.name for isa in runnable(cpu_flags())]
MODEL = AttentionShape(9, 3, 64, 16)
# Pages in whole units are read as they lie, others are packed: head sizes and block sizes of both kinds.
SHAPES = [
    MODEL,
    AttentionShape(4, 1, 80, 16),
    AttentionShape(8, 8, 128, 32),
    AttentionShape(7, 1, 256, 48),
    AttentionShape(3, 1, 16, 5),
    AttentionShape(2, 2, 2, 1),
    AttentionShape(14, 2, 72, 16),
    AttentionShape(9, 3, 64, 17),
    AttentionShape(6, 2, 34, 20),
]


@pytest.fixture(
    scope="module",
    params=[(NAMES[0], 1), *((name, 3) for name in NAMES)],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def native(request: pytest.FixtureRequest) -> Iterator[NativeAttention]:
    name, threads = request.param
    library = load_library(name)
    team = Team(library, threads)
    yield NativeAttention(library, team)
    team.close()


def run(native: NativeAttention, case: PagedCase, poison: float = math.nan, scale: float | None = None) -> Tensor:
    k_pages, v_pages = filled_pages(native, case, poison)
    scale = case.shape.head_dim**-0.5 if scale is None else scale
    return native.attend(case.q, k_pages, v_pages, native.plan(case.rows, case.shape), case.shape, scale)


def filled_pages(native: NativeAttention, case: PagedCase, poison: float) -> tuple[Tensor, Tensor]:
    shape = case.shape
    pages = (case.blocks, shape.block_size, shape.kv_heads, shape.head_dim)
    k_pages, v_pages = (torch.full(pages, poison, dtype=torch.bfloat16) for _ in range(2))
    for keys, values, table in zip(case.keys, case.values, case.rows.block_tables, strict=True):
        native.cache_write(keys, values, k_pages, v_pages, slots_of(table, keys.shape[0], shape.block_size))
    return k_pages, v_pages


def slots_of(table: Tensor, length: int, block_size: int) -> Tensor:
    places = torch.arange(length)
    return table[places // block_size].to(torch.int64) * block_size + places % block_size


def narrowed(case: PagedCase) -> PagedCase:
    """Queries that bfloat16 holds: what is left of the error is that of the weights."""
    q = case.q.to(torch.bfloat16).float()
    return PagedCase(case.shape, q, case.keys, case.values, case.rows, case.blocks)


def cut(case: PagedCase, start: int, stop: int) -> PagedCase:
    """The rows [start, stop) of a case of one sequence, which then ends at `stop`."""
    starts, lengths = (torch.tensor(values, dtype=torch.int32) for values in ([0, stop - start], [stop]))
    rows = PagedRows(starts, lengths, case.rows.block_tables)
    return PagedCase(case.shape, case.q[start:stop], [case.keys[0][:stop]], [case.values[0][:stop]], rows, case.blocks)


# Weights are rounded to bfloat16 before they are summed, those of the divisor too, so an answer is a mean of the values
# with weights that are up to 2^-9 off: its error is at most 2^-8 of the values' spread.
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_answers(native: NativeAttention, shape: AttentionShape) -> None:
    case, expected = mixed_case(shape)
    actual = run(native, case, math.nan)
    assert float((actual - expected).abs().max()) < 2**-8 * 3
    assert float((actual - expected).square().mean().sqrt()) < 1e-3
    assert torch.equal(run(native, case, math.inf), actual)


@functools.cache
def mixed_case(shape: AttentionShape) -> tuple[PagedCase, Tensor]:
    lengths = sorted({1, 2, 15, 16, 17, 63, 64, 65, 130, 255, 256, 257, 600})
    rows = [(n, 1) for n in lengths] + [(n, n) for n in (1, 17, 64, 70)] + [(300, 3), (290, 66), (5, 0), (0, 0)]
    case = narrowed(paged_case(shape, rows))
    return case, dense_answer(case)


def test_equal_values_come_out_exactly(native: NativeAttention) -> None:
    """Weights and their sum are rounded alike, so a mean of equal values is that value."""
    case = paged_case(MODEL, [(1000, 1), (70, 70)])
    for values in case.values:
        values.fill_(1.5)
    torch.testing.assert_close(run(native, case), torch.full(case.q.shape, 1.5), rtol=3e-6, atol=0)


def test_far_keys_are_found_among_many(native: NativeAttention) -> None:
    """One key among 8,500 that outweighs the rest, in any chunk."""
    shape = AttentionShape(1, 1, 32, 16)
    for place in (0, 63, 64, 4096, 8191, 8192, 8499):
        case = paged_case(shape, [(8500, 1)])
        case.keys[0].mul_(0.01)
        case.keys[0][place] = case.q[0] * 20
        case = PagedCase(shape, case.q, [case.keys[0].to(torch.bfloat16).float()], case.values, case.rows, case.blocks)
        torch.testing.assert_close(run(native, case)[0, 0], case.values[0][place, 0], rtol=1e-3, atol=1e-3)


def test_scores_that_no_exponential_holds(native: NativeAttention) -> None:
    case = paged_case(AttentionShape(1, 1, 16, 16), [(300, 300)])
    case.q.mul_(300)
    case = narrowed(case)
    actual = run(native, case)
    assert actual.isfinite().all()
    torch.testing.assert_close(actual, dense_answer(case), rtol=1e-2, atol=1e-2)


def test_a_broken_row_breaks_alone(native: NativeAttention) -> None:
    case = paged_case(MODEL, [(70, 70), (40, 1)])
    whole = run(native, case)
    case.q[5] = math.nan
    broken = run(native, case)
    assert broken[5].isnan().all()
    kept = torch.arange(71) != 5
    assert torch.equal(broken[kept], whole[kept])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_decode_row_equals_the_row_in_a_prefill(native: NativeAttention, shape: AttentionShape) -> None:
    length = 2 * 256 + 45
    case = paged_case(shape, [(length, length)])
    whole = run(native, case)
    for row in (0, 1, 15, 16, 31, 32, 63, 64, 128, 200, 255, 256, 257, 512, length - 1):
        assert torch.equal(run(native, cut(case, row, row + 1)), whole[row : row + 1]), row
    for start, stop in ((0, 16), (16, 80), (80, 97), (97, 98), (98, 131), (131, 300), (250, length)):
        assert torch.equal(run(native, cut(case, start, stop)), whole[start:stop]), (start, stop)


def test_neighbours_change_no_bit(native: NativeAttention) -> None:
    sequences = [(1, 1), (300, 1), (129, 1), (64, 64), (70, 6), (17, 17), (500, 130), (128, 1), (2000, 1)]
    case = paged_case(MODEL, sequences)
    whole = run(native, case)
    starts = case.rows.query_start.tolist()
    for index in range(len(sequences)):
        first, last = starts[index], starts[index + 1]
        count = torch.tensor([0, last - first], dtype=torch.int32)
        rows = PagedRows(count, case.rows.seq_lens[index : index + 1], case.rows.block_tables[index : index + 1])
        alone = PagedCase(MODEL, case.q[first:last], [case.keys[index]], [case.values[index]], rows, case.blocks)
        assert torch.equal(run(native, alone), whole[first:last]), sequences[index]


def test_later_tokens_in_the_pages_change_no_bit(native: NativeAttention) -> None:
    """A prefill in parts: the rows of a part, with and without what comes later in the cache."""
    case = paged_case(MODEL, [(200, 200)])
    pages = filled_pages(native, case, math.nan)
    part = cut(case, 40, 121)
    plan = native.plan(part.rows, MODEL)
    assert torch.equal(native.attend(part.q, *pages, plan, MODEL, 0.125), run(native, part, scale=0.125))


def test_a_plan_serves_every_layer(native: NativeAttention) -> None:
    """Counters of merges are zero again after each use."""
    case = paged_case(MODEL, [(3000, 1)])
    plan = native.plan(case.rows, MODEL)
    pages = filled_pages(native, case, math.nan)
    first = native.attend(case.q, *pages, plan, MODEL, 0.125)
    for _ in range(20):
        assert torch.equal(native.attend(case.q, *pages, plan, MODEL, 0.125), first)


def test_nothing_to_do(native: NativeAttention) -> None:
    assert run(native, paged_case(MODEL, [(0, 0), (3, 0)])).shape == (0, 9, 64)


@pytest.mark.skipif(len(NAMES) == 1, reason="one instruction set")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_instruction_sets_agree(shape: AttentionShape) -> None:
    """Bit for bit: both steps of a product of pairs round once, and the exponential is written out."""
    case = paged_case(shape, [(300, 1), (90, 90), (2000, 1)])
    answers = []
    for name in NAMES:
        library = load_library(name)
        team = Team(library, 2)
        answers.append(run(NativeAttention(library, team), case))
        team.close()
    for answer in answers[1:]:
        assert torch.equal(answer, answers[0])


# -- variants ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Variant:
    window: int = 0
    cap: float = 0.0
    sinks: bool = False


VARIANTS = [
    Variant(window=1),
    Variant(window=2, cap=3.0),
    Variant(window=16),
    Variant(window=100, sinks=True),
    Variant(window=256),
    Variant(window=400),
    Variant(window=5000),
    Variant(cap=2.0),
    Variant(sinks=True),
    Variant(cap=1.5, sinks=True),
]


def run_variant(native: NativeAttention, case: PagedCase, variant: Variant) -> Tensor:
    pages, shape = filled_pages(native, case, math.nan), case.shape
    plan = native.plan(case.rows, shape, variant.window)
    sinks = sinks_of(shape) if variant.sinks else None
    return native.attend(case.q, *pages, plan, shape, shape.head_dim**-0.5, cap=variant.cap, sinks=sinks)


def sinks_of(shape: AttentionShape) -> Tensor:
    return torch.linspace(-3, 9, shape.heads)


def variant_answer(case: PagedCase, variant: Variant) -> Tensor:
    """As `dense_answer`, in float64."""
    answers, shape = [], case.shape
    ratio = shape.heads // shape.kv_heads
    for index, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        first, last = case.rows.query_start[index : index + 2].tolist()
        wide_keys, wide_values = (part.double().repeat_interleave(ratio, dim=1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", case.q[first:last].double(), wide_keys) * shape.head_dim**-0.5
        if variant.cap:
            scores = variant.cap * (scores / variant.cap).tanh()
        behind = torch.arange(keys.shape[0] - (last - first), keys.shape[0])[:, None] - torch.arange(keys.shape[0])
        unseen = (behind < 0) | (behind >= (variant.window or math.inf))
        scores = scores.masked_fill(unseen, -math.inf)
        if variant.sinks:
            sinks = sinks_of(shape).double()[:, None, None].expand(-1, last - first, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1)[..., : keys.shape[0]]
        answers.append(torch.einsum("hqk,khd->qhd", weights, wide_values))
    return torch.cat(answers).float()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_answers_of_variants(native: NativeAttention, variant: Variant) -> None:
    for shape in (MODEL, AttentionShape(6, 2, 34, 20)):
        case, expected = variant_case(shape, variant)
        actual = run_variant(native, case, variant)
        assert float((actual - expected).abs().max()) < 2**-8 * 3
        assert float((actual - expected).square().mean().sqrt()) < 2e-3


@functools.cache
def variant_case(shape: AttentionShape, variant: Variant) -> tuple[PagedCase, Tensor]:
    case = narrowed(paged_case(shape, [(1, 1), (17, 17), (300, 80), (600, 1), (1000, 1), (257, 257)]))
    return case, variant_answer(case, variant)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_decode_row_of_a_variant_equals_the_row_in_a_prefill(native: NativeAttention, variant: Variant) -> None:
    length = 2 * 256 + 45
    case = paged_case(MODEL, [(length, length)])
    whole = run_variant(native, case, variant)
    for row in (0, 15, 64, 99, 100, 255, 256, 400, 512, length - 1):
        assert torch.equal(run_variant(native, cut(case, row, row + 1), variant), whole[row : row + 1]), row
    for start, stop in ((0, 16), (97, 98), (131, 300), (250, length)):
        assert torch.equal(run_variant(native, cut(case, start, stop), variant), whole[start:stop]), (start, stop)


# -- pages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_slots_hold_what_was_written_and_nothing_else_changes(native: NativeAttention, shape: AttentionShape) -> None:
    blocks = 4
    size = (blocks, shape.block_size, shape.kv_heads, shape.head_dim)
    k_pages, v_pages = (torch.full(size, math.nan, dtype=torch.bfloat16) for _ in range(2))
    every = torch.arange(blocks * shape.block_size)
    slots = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))][: len(every) // 2]
    qkv = torch.randn(len(slots), 3 * shape.kv_heads, shape.head_dim, generator=torch.Generator().manual_seed(1))
    k, v = qkv[:, : shape.kv_heads], qkv[:, shape.kv_heads : 2 * shape.kv_heads]
    native.cache_write(k, v, k_pages, v_pages, slots)
    for written, read in zip((k, v), native.cache_read(k_pages, v_pages, slots), strict=True):
        assert torch.equal(read, written.to(torch.bfloat16).float())
    others = every[~torch.isin(every, slots)]
    for read in native.cache_read(k_pages, v_pages, others):
        assert read.isnan().all()
    assert int(k_pages.isnan().sum()) == int(v_pages.isnan().sum()) == len(others) * shape.kv_heads * shape.head_dim


def test_rounding_is_to_nearest_even_and_keeps_what_is_no_number(native: NativeAttention) -> None:
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x7F800001, -0x7FFFFF, 0])
    x = bits.to(torch.int32).view(torch.float32).view(1, 1, 8)
    k_pages, v_pages = (torch.zeros(1, 16, 1, 8, dtype=torch.bfloat16) for _ in range(2))
    native.cache_write(x, x, k_pages, v_pages, torch.tensor([3]))
    for read in native.cache_read(k_pages, v_pages, torch.tensor([3])):
        torch.testing.assert_close(read, x.to(torch.bfloat16).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("by_position", [False, True])
def test_rope_and_cache(native: NativeAttention, shape: AttentionShape, by_position: bool) -> None:
    generator = torch.Generator().manual_seed(8)
    rows, wide = 37, (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    qkv = torch.randn(rows, wide + 3, generator=generator)[:, :wide]
    angles = torch.rand(60, shape.head_dim // 2, generator=generator) * 6
    positions = torch.randint(60, (rows,), generator=generator)
    blocks = -(-rows // shape.block_size) + 1
    size = (blocks, shape.block_size, shape.kv_heads, shape.head_dim)
    k_pages, v_pages = (torch.full(size, math.nan, dtype=torch.bfloat16) for _ in range(2))
    slots = torch.randperm(blocks * shape.block_size, generator=generator)[:rows]
    tables = (angles.cos(), angles.sin())
    if not by_position:
        tables = (tables[0][positions], tables[1][positions])
    q = native.rope_and_cache(qkv, *tables, k_pages, v_pages, slots, shape, positions if by_position else None)
    heads = qkv.reshape(rows, -1, shape.head_dim)
    turned = rotated(heads[:, : shape.heads + shape.kv_heads], angles[positions])
    torch.testing.assert_close(q.double(), turned[:, : shape.heads], rtol=1e-6, atol=1e-6)
    k, v = native.cache_read(k_pages, v_pages, slots)
    torch.testing.assert_close(k.double(), turned[:, shape.heads :], rtol=2**-8, atol=1e-6)
    assert torch.equal(v, heads[:, shape.heads + shape.kv_heads :].to(torch.bfloat16).float())
    for row in range(0, rows, 11):  # and the same bits alone
        here, where = slice(row, row + 1), positions[row : row + 1] if by_position else None
        own = tables if by_position else (tables[0][here], tables[1][here])
        alone = native.rope_and_cache(qkv[here], *own, k_pages, v_pages, slots[here], shape, where)
        assert torch.equal(alone, q[here])
    assert all(torch.equal(*both) for both in zip(native.cache_read(k_pages, v_pages, slots), (k, v), strict=True))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones(()).double(), angles.double()).unsqueeze(1)
    return torch.cat((pairs.real, pairs.imag), -1)
