"""A row's bits depend on its own inputs alone, on every back end: alone or among many, decoded or prefilled."""

from collections.abc import Iterator

import pytest
import torch
from paged_cases import PagedCase, paged_case, run_case
from stored_matrices import random_matrix
from torch import Tensor

from executor.loading.ggml_types import BLOCKS, GgmlType
from kernels.ops import AttentionShape, Ops, PagedRows

ROWS = 37


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def pieces(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Each row alone, and the rows in batches that shift its place."""
    for start in range(x.shape[0]):
        yield slice(start, start + 1), x[start : start + 1]
    for step in (2, 5, 16):
        for start in range(0, x.shape[0], step):
            yield slice(start, start + step), x[start : start + step]


@pytest.mark.parametrize("kind", list(GgmlType), ids=lambda kind: kind.name)
def test_linear(ops: Ops, kind: GgmlType) -> None:
    cols = 256 if BLOCKS[kind].elements == 256 else 96
    packed = ops.pack([random_matrix(kind, 150, cols)], lookup=False)
    x = torch.randn(ROWS, cols, generator=torch.Generator().manual_seed(0))
    whole = ops.linear(x, packed)
    for where, piece in pieces(x):
        assert torch.equal(ops.linear(piece, packed), whole[where])


@pytest.mark.parametrize("cols", [576, 1536])
def test_linear_of_a_real_width(ops: Ops, cols: int) -> None:
    packed = ops.pack([random_matrix(GgmlType.Q4_1, 192, cols)], lookup=False)
    x = torch.randn(70, cols, generator=torch.Generator().manual_seed(0))
    whole = ops.linear(x, packed)
    for row in range(x.shape[0]):
        assert torch.equal(ops.linear(x[row : row + 1], packed), whole[row : row + 1])


@pytest.mark.parametrize("size", [64, 576, 1536])
def test_rows_of_elementwise_ops(ops: Ops, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x, weight = torch.randn(ROWS, size, generator=generator), torch.randn(size, generator=generator)
    angles = torch.rand(ROWS, 32, generator=generator)
    normed, gated = ops.rms_norm(x, weight, 1e-5), ops.silu_mul(x)
    turned = ops.rope(x.view(ROWS, -1, 64), angles.cos(), angles.sin())
    for where, piece in pieces(x):
        assert torch.equal(ops.rms_norm(piece, weight, 1e-5), normed[where])
        assert torch.equal(ops.silu_mul(piece), gated[where])
        part = angles[where]
        assert torch.equal(ops.rope(piece.view(piece.shape[0], -1, 64), part.cos(), part.sin()), turned[where])


SHAPES = [(9, 3, 64, 16), (4, 1, 80, 16), (8, 8, 128, 32), (3, 1, 16, 5), (32, 8, 64, 16)]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), SHAPES)
def test_a_decode_row_equals_the_row_in_a_prefill(
    ops: Ops, heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    shape = AttentionShape(heads, kv_heads, head_dim, block_size)
    length = 2 * 128 + 45
    prefill = paged_case(shape, [(length, length)])
    whole = run_case(ops, prefill)
    for row in (0, 1, 15, 16, 63, 64, 127, 128, 129, 200, 256, length - 1):
        assert torch.equal(run_case(ops, _cut(prefill, row, row + 1)), whole[row : row + 1]), row
    for start, stop in ((0, 16), (16, 80), (80, 97), (97, 98), (98, 131), (131, length)):
        assert torch.equal(run_case(ops, _cut(prefill, start, stop)), whole[start:stop]), (start, stop)


def test_neighbours_change_no_bit_of_attention(ops: Ops) -> None:
    shape = AttentionShape(9, 3, 64, 16)
    sequences = [(1, 1), (300, 1), (129, 1), (64, 64), (70, 6), (17, 17), (500, 130), (128, 1)]
    case = paged_case(shape, sequences)
    whole = run_case(ops, case)
    starts = case.rows.query_start.tolist()
    for index in range(len(sequences)):
        first, last = starts[index], starts[index + 1]
        count = torch.tensor([0, last - first], dtype=torch.int32)
        rows = PagedRows(count, case.rows.seq_lens[index : index + 1], case.rows.block_tables[index : index + 1])
        alone = PagedCase(shape, case.q[first:last], [case.keys[index]], [case.values[index]], rows, case.blocks)
        assert torch.equal(run_case(ops, alone), whole[first:last]), sequences[index]


def _cut(case: PagedCase, start: int, stop: int) -> PagedCase:
    """The rows [start, stop) of a case of one sequence, which then ends at `stop`."""
    rows = PagedRows(
        torch.tensor([0, stop - start], dtype=torch.int32),
        torch.tensor([stop], dtype=torch.int32),
        case.rows.block_tables,
    )
    return PagedCase(case.shape, case.q[start:stop], [case.keys[0][:stop]], [case.values[0][:stop]], rows, case.blocks)
