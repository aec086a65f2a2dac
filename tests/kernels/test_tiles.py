"""AMX's tiles: the bits of the products that AVX-512 makes alone, of every format and number of rows."""

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import missing
from decoder_cases import CASES, EPS, run, some_layers
from paged_cases import paged_case
from step_driver import generate
from stored_matrices import f32_matrix, random_matrix
from tiny_model import TinySpec, write_tiny_model
from torch import Tensor

import kernels.cpu.library
from executor.loading.ggml_types import BLOCKS, GgmlType
from executor.loading.load import load_runner
from executor.quant.requantized import to_int8
from kernels.cpu.backend import CpuOps
from kernels.cpu.build import NoCompilerError, cpu_flags, runnable
from kernels.cpu.library import Library, Team, load_library
from kernels.cpu.pack import ACTIVATIONS
from kernels.ops import Ops, StoredMatrix

RUNNABLE = [isa.name for isa in runnable(cpu_flags())]
pytestmark = pytest.mark.skipif("amx" not in RUNNABLE, reason="no tiles")
WITHOUT = "avx512"
FUSED = ("amx", WITHOUT, "avx2")  # all round a product and its addition once
MOST = 37  # rows: three tiles of rows, of different widths
KINDS = [kind for kind in GgmlType if kind not in (GgmlType.F32, GgmlType.F16, GgmlType.BF16)]

AllOps = dict[str, CpuOps]


@functools.cache
def opened(name: str) -> Library:
    try:
        return load_library(name)
    except NoCompilerError as error:
        missing(str(error))


@pytest.fixture(scope="module", params=list(ACTIVATIONS))
def each(request: pytest.FixtureRequest) -> Iterator[AllOps]:
    """The back end by instruction set."""
    teams = {name: Team(opened(name), 2) for name in FUSED}
    yield {name: CpuOps(opened(name), team, request.param) for name, team in teams.items()}
    for team in teams.values():
        team.close()


def same(each: AllOps, compute: Callable[[Ops], Tensor]) -> None:
    """Bit for bit, but that one NaN is like another."""
    expected = compute(each[WITHOUT])
    for name, ops in each.items():
        actual = compute(ops)
        assert torch.equal(actual.isnan(), expected.isnan()), name
        assert torch.equal(actual.nan_to_num(7.0), expected.nan_to_num(7.0)), name


def stored(kind: GgmlType | None, rows: int, groups: int) -> StoredMatrix:
    """kind None: int8 with a scale for a row, and columns that fill no whole group."""
    if kind is None:
        dense = torch.randn(rows, 32 * groups - 3, generator=torch.Generator().manual_seed(groups))
        return to_int8(f32_matrix(dense / 8))
    return random_matrix(kind, rows, -(-32 * groups // BLOCKS[kind].elements) * BLOCKS[kind].elements, seed=groups)


def inputs(rows: int, cols: int) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)) * 3


@pytest.mark.parametrize("kind", [*KINDS, None], ids=lambda kind: "INT8" if kind is None else kind.name)
@pytest.mark.parametrize("groups", [1, 2, 3, 18])
def test_a_product_has_the_same_bits(each: AllOps, kind: GgmlType | None, groups: int) -> None:
    matrix = stored(kind, 41, groups)
    for rows in range(1, MOST + 1):
        x = inputs(rows, matrix.cols)
        same(each, lambda ops, x=x: ops.linear(x, ops.pack([matrix], lookup=False)))


@pytest.mark.parametrize("kind", [*KINDS, None], ids=lambda kind: "INT8" if kind is None else kind.name)
def test_the_largest_sums(each: AllOps, kind: GgmlType | None) -> None:
    """Activations of the largest integers, of one sign, and rows that are NaN among them."""
    matrix = stored(kind, 32, 8)
    x = torch.full((19, matrix.cols), 1.0)
    x[1::2] = -1.0
    x[3, 5], x[17, 0], x[8] = math.inf, math.nan, 0.0
    same(each, lambda ops: ops.linear(x, ops.pack([matrix], lookup=False)))


@pytest.mark.parametrize("rows", [5, 16, 33])
@pytest.mark.parametrize("kind", [GgmlType.Q4_1, GgmlType.Q8_0, GgmlType.Q5_1], ids=lambda kind: kind.name)
def test_the_likeliest_token_is_the_same(each: AllOps, kind: GgmlType, rows: int) -> None:
    matrix, x = random_matrix(kind, 997, 96), inputs(rows, 96)
    for pick in ("highest", "token_ids"):
        same(
            each,
            lambda ops, pick=pick: torch.as_tensor(
                getattr(ops.head_greedy(x, torch.ones(96), EPS, ops.pack([matrix], lookup=True)), pick)
            ),
        )


@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_all_layers_have_the_same_bits(each: AllOps, case: tuple) -> None:  # type: ignore[type-arg]
    shape, cols, inner, weights, down, biases = case
    paged = paged_case(shape, [(1, 1), (70, 1), (33, 33), (300, 4), (5, 0)])
    x = inputs(int(paged.rows.query_start[-1]), cols)

    def layers(ops: Ops) -> Tensor:
        made = some_layers(ops, shape, cols, inner, weights, biases=biases, down=down)
        return run(ops, paged, ops.pack_decoder(made, EPS), x, math.nan)[0]

    same({name: ops for name, ops in each.items() if name != "avx2"}, layers)


@pytest.mark.parametrize("activations", list(ACTIVATIONS))
def test_a_model_draws_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, activations: str) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", TinySpec(biases=True))
    prompts = [[(7 * at + 3 * length) % 250 for at in range(length)] for length in (1, 9, 40)]
    drawn = {}
    for name in ("amx", WITHOUT):
        library = opened(name)
        monkeypatch.setattr(kernels.cpu.library, "load_library", lambda *_, library=library: library)
        runner = load_runner(
            path,
            backend="cpu",
            activations=activations,
            block_size=8,
            total_blocks=64,
            max_batched_tokens=96,
            max_sequences=6,
            threads=2,
        )
        drawn[name] = generate(runner, prompts, 24)
    assert drawn["amx"] == drawn[WITHOUT]
