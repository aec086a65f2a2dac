"""Every op of every back end against the obvious formula in float64."""

import math

import pytest
import torch
from paged_cases import dense_answer, paged_case, run_case
from stored_matrices import f32_matrix, random_matrix, values_of
from torch import Tensor

from executor.loading.ggml_types import BLOCKS, GgmlType
from kernels.backends import load
from kernels.ops import AttentionShape, Ops, PagedRows

# (relative, absolute) by the narrowest type that takes part in an op.
TOLERANCE = {
    torch.float32: (2e-6, 2e-6),
    torch.bfloat16: (1.6e-2, 1.6e-2),
    torch.int16: (2e-4, 2e-4),
    torch.int8: (2e-2, 2e-2),
}
INT4_FORMATS = (GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q4_K, GgmlType.Q8_0)
FLOAT_FORMATS = (GgmlType.F32, GgmlType.F16, GgmlType.BF16)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    relative, absolute = TOLERANCE[dtype]
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected.float(), rtol=relative, atol=absolute * max(1.0, _size(expected)))


def _size(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def narrowest(ops: Ops, *formats: GgmlType) -> torch.dtype:
    """That activations are rounded to where they meet weights of these formats."""
    if ops.name == "cpu" and GgmlType.BF16 in formats and ops.instruction_set().startswith(("amx", "avx512")):
        return torch.bfloat16
    if ops.name == "cpu" and any(f not in FLOAT_FORMATS for f in formats):
        return torch.int8 if ops.instruction_set().endswith(" 8bit") else torch.int16
    return torch.bfloat16 if ops.name == "cpu-torch" and any(f in INT4_FORMATS for f in formats) else torch.float32


def of_attention(ops: Ops) -> torch.dtype:
    return torch.bfloat16 if ops.name == "cpu" else torch.float32


@pytest.mark.parametrize("rows", [1, 7, 64, 200])
@pytest.mark.parametrize("kind", list(GgmlType), ids=lambda kind: kind.name)
def test_linear_in_every_format(ops: Ops, kind: GgmlType, rows: int) -> None:
    cols = 256 if BLOCKS[kind].elements == 256 else 96
    matrix = random_matrix(kind, rows, cols, seed=rows)
    packed = ops.pack([matrix], lookup=False)
    assert (packed.rows, packed.cols) == (rows, cols)
    bias = torch.linspace(-1, 1, rows)
    for count in (0, 1, 3, 17, 33):
        x = torch.randn(count, cols, generator=torch.Generator().manual_seed(count))
        expected = x.double() @ values_of(matrix).double().t()
        assert_near(ops.linear(x, packed), expected, narrowest(ops, kind))
        assert_near(ops.linear(x, packed, bias), expected + bias.double(), narrowest(ops, kind))


@pytest.mark.parametrize(
    "kinds",
    [(GgmlType.Q4_1, GgmlType.Q4_1, GgmlType.Q4_0), (GgmlType.Q4_K, GgmlType.Q6_K), (GgmlType.Q8_0, GgmlType.F16)],
)
def test_linear_of_fused_parts(ops: Ops, kinds: tuple[GgmlType, ...]) -> None:
    parts = [random_matrix(kind, 24 + 8 * index, 256, seed=index) for index, kind in enumerate(kinds)]
    packed = ops.pack(parts, lookup=False)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    assert packed.rows == sum(part.rows for part in parts)
    assert_near(ops.linear(x, packed), x.double() @ values_of(*parts).double().t(), narrowest(ops, *kinds))


def test_linear_of_a_strided_x(ops: Ops) -> None:
    matrix = random_matrix(GgmlType.Q4_1, 64, 32)
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(2))[:, 32:64]
    packed = ops.pack([matrix], lookup=False)
    assert torch.equal(ops.linear(x, packed), ops.linear(x.contiguous(), packed))


@pytest.mark.parametrize("kind", list(GgmlType), ids=lambda kind: kind.name)
def test_embedding_is_exact(ops: Ops, kind: GgmlType) -> None:
    cols = 256 if BLOCKS[kind].elements == 256 else 64
    matrix = random_matrix(kind, 70, cols)
    packed = ops.pack([matrix], lookup=True)
    ids = torch.tensor([0, 69, 3, 63, 64, 3])
    assert torch.equal(ops.embedding(ids, packed), values_of(matrix)[ids])
    # The same packed matrix serves as a tied head.
    x = torch.randn(3, cols, generator=torch.Generator().manual_seed(3))
    assert_near(ops.linear(x, packed), x.double() @ values_of(matrix).double().t(), narrowest(ops, kind))


@pytest.mark.parametrize("kind", INT4_FORMATS, ids=lambda kind: kind.name)
def test_cpu_torch_keeps_integers_packed(kind: GgmlType) -> None:
    matrix = random_matrix(kind, 512, 256)
    packed = load("cpu-torch").pack([matrix], lookup=False)
    assert packed.nbytes <= 1.18 * matrix.blocks.nbytes


@pytest.mark.parametrize("backend", ["reference", "cpu-torch"])
def test_formats_that_are_not_repacked_cost_what_the_file_does(backend: str) -> None:
    matrix = random_matrix(GgmlType.Q6_K, 64, 256)
    assert load(backend).pack([matrix], lookup=True).nbytes == matrix.blocks.nbytes


def test_int4_is_exact_where_scales_are_short() -> None:
    """Integers lose nothing: with scales and activations that bfloat16 holds, only the result is rounded."""
    ops = load("cpu-torch")
    matrix = random_matrix(GgmlType.Q8_0, 64, 64)
    blocks = matrix.blocks.view(64, 2, 34).clone()
    blocks[..., :2] = torch.tensor([0x00, 0x2C], dtype=torch.uint8)  # 0.0625
    exact = type(matrix)(matrix.name, blocks.view(64, -1), 64, matrix.bits, matrix.dequantize, matrix.unpack)
    x = torch.eye(64)
    expected = values_of(exact).t().to(torch.bfloat16).float()
    assert torch.equal(ops.linear(x, ops.pack([exact], lookup=False)), expected)


@pytest.mark.parametrize("size", [1, 31, 64, 577])
def test_rms_norm(ops: Ops, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x, weight = torch.randn(5, size, generator=generator) * 3, torch.randn(size, generator=generator)
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_near(ops.rms_norm(x, weight, 1e-5), expected, torch.float32)
    assert torch.equal(ops.rms_norm(torch.zeros(2, size), weight, 1e-5), torch.zeros(2, size))


@pytest.mark.parametrize("size", [1, 33, 1536])
def test_silu_mul(ops: Ops, size: int) -> None:
    x = torch.randn(3, 2 * size, generator=torch.Generator().manual_seed(size)) * 20
    x[0, 0] = -200.0  # exp overflows float32
    gate, up = x.double().chunk(2, -1)
    assert_near(ops.silu_mul(x), gate * torch.sigmoid(gate) * up, torch.float32)


@pytest.mark.parametrize("head_dim", [2, 64, 80])
def test_rope_rotates_pairs_half_a_head_apart(ops: Ops, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    x = torch.randn(4, 5, head_dim, generator=generator)[:, 1:4]  # strided, as a slice of qkv is
    angles = torch.rand(4, head_dim // 2, generator=generator) * 6
    turned = ops.rope(x, angles.cos(), angles.sin())
    pairs = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones(()).double(), angles.double()).unsqueeze(1)
    assert_near(turned, torch.cat((pairs.real, pairs.imag), -1), torch.float32)
    assert turned.is_contiguous()


def numbers(pages: Tensor) -> Tensor:
    """All that is no NaN, in ascending order: where in its page an element lies is the back end's business."""
    return pages[~pages.isnan()].sort().values


def test_cache_write_touches_its_slots_alone(ops: Ops) -> None:
    pages = torch.full((4, 3, 2, 8), math.nan, dtype=ops.kv_dtype)
    k_pages, v_pages = pages.clone(), pages.clone()
    qkv = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0))
    ops.cache_write(qkv[:, 2:4], qkv[:, 4:], k_pages, v_pages, torch.tensor([11, 0, 4]))
    for written, source in ((k_pages, qkv[:, 2:4]), (v_pages, qkv[:, 4:])):
        for block, token in ((0, 1), (1, 2), (3, 0)):
            assert torch.equal(numbers(written[block]), numbers(source[token].to(ops.kv_dtype)))
        assert written[2].isnan().all()
    before = k_pages.nan_to_num(7.0)
    ops.cache_write(qkv[:1, 2:4], qkv[:1, 4:], k_pages, v_pages, torch.tensor([3]))
    assert torch.equal(before[[0, 2, 3]], k_pages[[0, 2, 3]].nan_to_num(7.0))
    assert numbers(k_pages[1]).shape == (32,)


HEADS = [(1, 1, 64), (3, 1, 16), (6, 2, 80), (8, 8, 72), (14, 2, 96), (9, 3, 64)]


@pytest.mark.parametrize("block_size", [1, 5, 16, 160])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_paged_attention(ops: Ops, heads: int, kv_heads: int, head_dim: int, block_size: int, poison: float) -> None:
    shape = AttentionShape(heads, kv_heads, head_dim, block_size)
    lengths = sorted({1, block_size - 1, block_size, block_size + 1, 3 * block_size + 1, 130} - {0})
    decodes = [(length, 1) for length in lengths]
    prefills = [(length, length) for length in lengths]
    chunks = [(140, 3), (140, 17), (200, 66), (5, 0), (0, 0)]
    case = paged_case(shape, [*decodes, *prefills, *chunks])
    assert_near(run_case(ops, case, poison), dense_answer(case), of_attention(ops))


def test_paged_attention_of_nothing(ops: Ops) -> None:
    shape = AttentionShape(2, 1, 8, 4)
    case = paged_case(shape, [(0, 0), (3, 0)])
    assert run_case(ops, case).shape == (0, 2, 8)


def test_paged_attention_of_many_sequences_gathers_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, shape = load("cpu-torch"), AttentionShape(3, 1, 16, 16)
    case = paged_case(shape, [(20 * index + 1, 1 + index % 3) for index in range(20)])
    whole = run_case(ops, case)
    monkeypatch.setattr("kernels.vectorised.attention.GATHER_BYTES", 3 * 4 * 128 * 16)
    assert torch.equal(run_case(ops, case), whole)


def test_scores_too_large_for_float32_exp(ops: Ops) -> None:
    shape = AttentionShape(1, 1, 16, 16)
    case = paged_case(shape, [(200, 200)])
    case.q.copy_(case.q.mul(300).to(torch.bfloat16))
    actual = run_case(ops, case)
    assert actual.isfinite().all()
    tolerance = 1.6e-2 if of_attention(ops) == torch.bfloat16 else 1e-3
    torch.testing.assert_close(actual, dense_answer(case), rtol=tolerance, atol=tolerance)


def test_composites_are_their_primitives(ops: Ops) -> None:
    generator = torch.Generator().manual_seed(7)
    x, norm = torch.randn(5, 64, generator=generator), torch.rand(64, generator=generator)
    gate_up = ops.pack([random_matrix(GgmlType.Q4_1, 96, 64, 1), random_matrix(GgmlType.Q4_1, 96, 64, 2)], lookup=False)
    down = ops.pack([random_matrix(GgmlType.Q4_1, 64, 96, 3)], lookup=False)
    normed = ops.rms_norm(x, norm, 1e-5)
    gates = ops.linear(normed, gate_up)
    assert torch.equal(ops.norm_linear(x, norm, 1e-5, gate_up), gates)
    mlp = ops.linear(ops.silu_mul(gates), down)
    assert torch.equal(ops.gated_mlp(x, norm, 1e-5, gate_up, down), x + mlp)
    assert torch.equal(ops.linear_residual(ops.silu_mul(gates), down, x), x + mlp)
    assert torch.equal(ops.head_logits(x, norm, 1e-5, gate_up), gates)


def test_rope_and_cache_splits_a_fused_row(ops: Ops) -> None:
    shape = AttentionShape(4, 2, 8, 4)
    generator = torch.Generator().manual_seed(8)
    qkv, angles = torch.randn(3, 64, generator=generator), torch.rand(3, 4, generator=generator)
    pages = torch.zeros(2, 4, 2, 8, dtype=ops.kv_dtype)
    k_pages, v_pages = pages.clone(), pages.clone()
    slots = torch.tensor([5, 6, 2])
    q = ops.rope_and_cache(qkv, angles.cos(), angles.sin(), k_pages, v_pages, slots, shape)
    heads = qkv.view(3, 8, 8)
    turned = ops.rope(heads[:, :6], angles.cos(), angles.sin())
    assert torch.equal(q, turned[:, :4])
    by_primitives = pages.clone(), pages.clone()
    ops.cache_write(turned[:, 4:], heads[:, 6:], *by_primitives, slots)
    assert torch.equal(k_pages, by_primitives[0])
    assert torch.equal(v_pages, by_primitives[1])


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_shapes_that_do_not_fit_are_named(ops: Ops) -> None:
    packed = ops.pack([f32_matrix(torch.zeros(3, 8))], lookup=False)
    with pytest.raises(ValueError, match=r"x must be float32 \[T, 8\]"):
        ops.linear(torch.zeros(2, 7), packed)
    with pytest.raises(ValueError, match=r"bias must be float32 \[3\]"):
        ops.linear(torch.zeros(2, 8), packed, torch.zeros(2))
    with pytest.raises(ValueError, match="differ in width"):
        ops.pack([f32_matrix(torch.zeros(3, 8)), f32_matrix(torch.zeros(3, 4))], lookup=False)
    with pytest.raises(ValueError, match="at least one part"):
        ops.pack([], lookup=False)


def test_sequences_that_do_not_fit_are_named(ops: Ops) -> None:
    shape = AttentionShape(1, 1, 8, 4)

    def rows(starts: list[int], lengths: list[int], width: int = 1) -> PagedRows:
        tables = torch.zeros(len(lengths), width, dtype=torch.int32)
        return PagedRows(torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), tables)

    with pytest.raises(ValueError, match="sequence 0 has 5 tokens, its block table holds 4"):
        ops.plan_attention(rows([0, 1], [5]), shape)
    with pytest.raises(ValueError, match="sequence 1 has 3 rows and 2 tokens"):
        ops.plan_attention(rows([0, 1, 4], [2, 2]), shape)
    with pytest.raises(ValueError, match="query_start must begin with 0"):
        ops.plan_attention(rows([1, 2], [2]), shape)
    with pytest.raises(ValueError, match="5 heads are no multiple of 2"):
        AttentionShape(5, 2, 8, 4)


def test_matrices_of_another_back_end_are_refused() -> None:
    matrix = random_matrix(GgmlType.Q4_1, 16, 32)
    packed = load("cpu-torch").pack([matrix], lookup=False)
    with pytest.raises(ValueError, match="another back end"):
        load("reference").linear(torch.zeros(1, 32), packed)


def test_unknown_back_end() -> None:
    with pytest.raises(ValueError, match="unknown back end 'gpu-of-my-dreams'; there are reference, cpu, cpu-torch"):
        load("gpu-of-my-dreams")
