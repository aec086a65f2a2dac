"""The native linear against the same arithmetic in float64, in every instruction set that this machine can run."""

import math
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from conftest import missing
from stored_matrices import f32_matrix, random_matrix, values_of
from torch import Tensor

from executor.loading.ggml_types import BLOCKS, GgmlType
from executor.quant.requantized import to_bf16, to_int8
from kernels.cpu.build import NoCompilerError, cpu_flags, runnable
from kernels.cpu.library import INT, LONG, POINTER, Library, Team, load_library
from kernels.cpu.pack import ACTIVATIONS, Format, Packer, PanelMatrix
from kernels.ops import StoredMatrix

SPAN = 64  # columns of a scale of activations (native/activations.h)
MOST = 40  # rows: three tiles
ISAS = [isa.name for isa in runnable(cpu_flags())]
QUANTIZED = [kind for kind in GgmlType if kind not in (GgmlType.F32, GgmlType.F16, GgmlType.BF16)]


@dataclass(frozen=True, slots=True)
class Native:
    """The library's functions over tensors."""

    library: Library
    team: Team
    packer: Packer
    planes: int  # of activations

    def linear(
        self, x: Tensor, matrix: PanelMatrix, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        call = self.library.bind("tercet_linear", None, *(POINTER,) * 3, LONG, INT, *(POINTER,) * 4)
        out = torch.full((x.shape[0], matrix.rows), math.nan)
        bias_at = None if bias is None else bias.data_ptr()
        residual_at = None if residual is None else residual.data_ptr()
        scratch = self._scratch(x.shape[0], matrix.cols)
        call(
            *(self.team.handle, matrix.address, x.data_ptr(), x.stride(0), x.shape[0]),
            *(bias_at, residual_at, out.data_ptr(), scratch.data_ptr()),
        )
        return out

    def gated(self, x: Tensor, matrix: PanelMatrix) -> Tensor:
        call = self.library.bind("tercet_gated", None, *(POINTER,) * 3, LONG, INT, POINTER, POINTER)
        out = torch.full((x.shape[0], matrix.rows // 2), math.nan)
        scratch = self._scratch(x.shape[0], matrix.cols)
        call(
            *(self.team.handle, matrix.address, x.data_ptr(), x.stride(0), x.shape[0]),
            *(out.data_ptr(), scratch.data_ptr()),
        )
        return out

    def rows(self, ids: Tensor, matrix: PanelMatrix) -> Tensor:
        call = self.library.bind("tercet_decode_rows", None, POINTER, POINTER, POINTER, INT, POINTER)
        out = torch.full((ids.shape[0], matrix.cols), math.nan)
        call(self.team.handle, matrix.address, ids.data_ptr(), ids.shape[0], out.data_ptr())
        return out

    def quantize(self, x: Tensor) -> bytes:
        call = self.library.bind("tercet_quantize", None, POINTER, POINTER, LONG, *(INT,) * 3, POINTER)
        scratch = self._scratch(*x.shape)
        call(self.team.handle, x.data_ptr(), x.stride(0), *x.shape, self.planes, scratch.data_ptr())
        return scratch.numpy().tobytes()

    def _scratch(self, rows: int, cols: int) -> Tensor:
        size = self.library.bind("tercet_quantized_bytes", LONG, INT, INT, INT)(rows, cols, self.planes)
        return torch.zeros(size, dtype=torch.uint8)


@pytest.fixture(scope="module", params=[(isa, name) for isa in ISAS for name in ACTIVATIONS], ids="-".join)
def native(request: pytest.FixtureRequest) -> Native:
    isa, activations = request.param
    return open_native(isa, ACTIVATIONS[activations])


@cache
def open_native(isa: str, planes: int) -> Native:
    try:
        library = load_library(isa)
    except NoCompilerError as error:
        missing(str(error))
    return Native(library, Team(library, 2), Packer(library, planes), planes)


def rounded(x: Tensor, planes: int) -> Tensor:
    """The definition in native/activations.h, in float64: q * scale."""
    most = {1: 127, 2: 32639}[planes]
    out = torch.zeros(x.shape, dtype=torch.float64)
    for start in range(0, x.shape[1], SPAN):
        span = x[:, start : start + SPAN]
        largest = span.abs().amax(1, keepdim=True)
        counts = largest >= 2.0**-100
        q = torch.where(counts, span * (most / torch.where(counts, largest, 1)), 0).round()
        out[:, start : start + SPAN] = q.double() * torch.where(counts, largest / most, 0).double()
    return torch.where(x.isfinite().all(1, keepdim=True), out, math.nan)


def entering(x: Tensor, matrix: PanelMatrix, isa: str) -> Tensor:
    """What the format multiplies with, in float64."""
    (format,) = set(matrix.formats)
    if format.integer:
        return rounded(x, matrix.planes)
    return (x.to(torch.bfloat16) if format is Format.FLOATS_BRAIN and isa in ("amx", "avx512") else x).double()


def assert_close(actual: Tensor, x: Tensor, weights: Tensor) -> None:
    """Within 2^-20 of the sum of magnitudes: float32 sums of up to 1,536 products, and no more."""
    expected = x @ weights.double().t()
    # A symmetric format's -offset * scale is part of its integers, an affine minimum a term of its own.
    magnitude = x.abs() @ weights.double().abs().t() + x.abs().sum(1, keepdim=True) * weights.abs().max()
    assert ((actual.double() - expected).abs() <= 2.0**-20 * magnitude + 1e-37).all()


def cols_for(kind: GgmlType, blocks: int) -> int:
    return BLOCKS[kind].elements * blocks if BLOCKS[kind].elements > 1 else 29 * blocks


def matrices(blocks: int = 3, rows: int = 40) -> list[StoredMatrix]:
    """One of each form that can be packed."""
    dense = f32_matrix(torch.randn(rows, 29 * blocks, generator=torch.Generator().manual_seed(9)) / 8)
    stored = [random_matrix(kind, rows, cols_for(kind, blocks), seed=blocks) for kind in GgmlType]
    return [*stored, to_int8(dense), to_bf16(dense)]


def normal(rows: int, cols: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


# -- the product -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 200])
@pytest.mark.parametrize("index", range(len(GgmlType) + 2))
def test_against_float64(native: Native, index: int, rows: int) -> None:
    for blocks in (1, 2, 5):
        stored = matrices(blocks, rows)[index]
        matrix = native.packer.pack([stored])
        x = normal(MOST, stored.cols)
        assert_close(native.linear(x, matrix), entering(x, matrix, native.library.isa.name), values_of(stored))


@pytest.mark.parametrize("index", range(len(GgmlType) + 2))
def test_a_row_has_the_same_bits_among_any_others(native: Native, index: int) -> None:
    stored = matrices()[index]
    matrix = native.packer.pack([stored])
    x = normal(MOST, stored.cols)
    whole = native.linear(x, matrix)
    for count in range(1, MOST):
        assert torch.equal(native.linear(x[:count].contiguous(), matrix), whole[:count])
        assert torch.equal(native.linear(x[count:].contiguous(), matrix), whole[count:])


def test_formats_that_keep_their_size(native: Native) -> None:
    for kind, most in ((GgmlType.Q4_0, 1.001), (GgmlType.Q4_1, 1.001), (GgmlType.Q8_0, 1.001), (GgmlType.Q4_K, 1.35)):
        stored = random_matrix(kind, 256, 1536)
        data = native.packer.pack([stored]).data
        assert sum(part.nbytes for part in data) <= most * stored.blocks.nbytes


def test_parts_of_different_formats(native: Native) -> None:
    kinds = (GgmlType.Q4_0, GgmlType.F16, GgmlType.Q6_K, GgmlType.Q8_0)
    parts = [random_matrix(kind, 9 + 8 * index, 256, seed=index) for index, kind in enumerate(kinds)]
    matrix = native.packer.pack(parts)
    x = normal(5, 256)
    alone = [native.linear(x, native.packer.pack([part])) for part in parts]
    assert torch.equal(native.linear(x, matrix), torch.cat(alone, dim=1))
    ids = torch.tensor([0, 8, 9, 25, 26, 50, 51, matrix.rows - 1])
    assert torch.equal(native.rows(ids, matrix), values_of(*parts)[ids])


def test_bias_and_residual(native: Native) -> None:
    stored = random_matrix(GgmlType.Q4_1, 41, 64)
    matrix, x = native.packer.pack([stored]), normal(19, 64)
    plain, bias, residual = native.linear(x, matrix), normal(1, 41, 2)[0], normal(19, 41, 3)
    assert torch.equal(native.linear(x, matrix, bias), plain + bias)
    assert torch.equal(native.linear(x, matrix, bias, residual), residual + (plain + bias))


def test_a_strided_x(native: Native) -> None:
    matrix = native.packer.pack([random_matrix(GgmlType.Q4_0, 20, 64), random_matrix(GgmlType.F32, 20, 64)])
    x = normal(3, 160)[:, 32:96]
    assert torch.equal(native.linear(x, matrix), native.linear(x.contiguous(), matrix))


@pytest.mark.parametrize("kinds", [(GgmlType.Q4_1, GgmlType.Q4_1), (GgmlType.Q5_0, GgmlType.F16)])
@pytest.mark.parametrize("inner", [5, 32, 47, 96])
def test_gate(native: Native, kinds: tuple[GgmlType, GgmlType], inner: int) -> None:
    parts = [random_matrix(kind, inner, 96, seed=index) for index, kind in enumerate(kinds)]
    matrix, x = native.packer.pack(parts), normal(18, 96)
    assert matrix.gated
    gate, up = (native.linear(x, native.packer.pack([part])).double() for part in parts)
    torch.testing.assert_close(native.gated(x, matrix).double(), gate * torch.sigmoid(gate) * up, rtol=1e-6, atol=1e-12)


def test_rows_of_gate_and_up_in_one_panel_are_no_gated_matrix(native: Native) -> None:
    assert not native.packer.pack([random_matrix(GgmlType.Q4_1, 48, 32)]).gated
    assert native.packer.pack([random_matrix(GgmlType.Q4_1, 64, 32)]).gated


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(len(GgmlType) + 2))
def test_rows_come_back_exactly(native: Native, index: int) -> None:
    for rows in (1, 33):
        stored = matrices(2, rows)[index]
        matrix = native.packer.pack([stored])
        assert torch.equal(native.rows(torch.arange(rows), matrix), values_of(stored))


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_extreme_scales(native: Native, kind: GgmlType) -> None:
    """The largest, the smallest and no scale of float16, beside each other."""
    cols = cols_for(kind, 2)
    stored = random_matrix(kind, 32, cols)
    blocks = stored.blocks.view(32, -1, BLOCKS[kind].bytes).clone()
    at = BLOCKS[kind].bytes - 2 if kind is GgmlType.Q6_K else 0
    for row, bits in enumerate((0x7BFF, 0x0001, 0x0000, 0x8001, 0xFBFF, 0x83FF)):
        blocks[row, :, at : at + 2] = torch.tensor([bits & 255, bits >> 8], dtype=torch.uint8)
    extreme = type(stored)("extreme", blocks.view(32, -1), cols, stored.bits, stored.dequantize, stored.unpack)
    matrix, x = native.packer.pack([extreme]), normal(4, cols)
    assert torch.equal(native.rows(torch.arange(32), matrix), values_of(extreme))
    # Row by row, so that the largest does not lend its tolerance to the smallest.
    for row in range(32):
        actual, weights = native.linear(x, matrix)[:, row : row + 1], values_of(extreme)[row : row + 1]
        assert_close(actual, rounded(x, native.planes), weights)


def test_rows_that_fill_up_a_panel_have_no_effect(native: Native) -> None:
    for stored in matrices(3, 19):
        matrix = native.packer.pack([stored])
        x = normal(6, stored.cols)
        before = native.linear(x, matrix)
        second = matrix.data[0][matrix.data[0].shape[0] // 2 :]
        poison_rows(second, matrix.formats[0], first=3, cols=stored.cols)
        assert torch.equal(native.linear(x, matrix), before), stored.name


def poison_rows(panel: Tensor, format: Format, first: int, cols: int) -> None:
    """NaN in the scales, or the weights, of the panel's rows from `first` on."""
    groups = -(-cols // 32)
    if format is Format.FLOATS_BRAIN:
        panel[: -(-cols // 2) * 64].view(torch.bfloat16).view(-1, 16, 2)[:, first:] = math.nan
        return
    columns = {Format.BYTES_ROWS: 1, Format.BYTES_SIXTEENS: 2 * groups, Format.FLOATS: cols, Format.FLOATS_HALF: cols}
    dtype = torch.float16 if format.halves or format is Format.FLOATS_HALF else torch.float32
    size = columns.get(format, groups) * 16 * dtype.itemsize
    panel[:size].view(dtype).view(-1, 16)[:, first:] = math.nan


def test_columns_that_fill_up_a_group_have_no_effect(native: Native) -> None:
    weights = normal(20, 45) / 8
    matrix, x = native.packer.pack([to_int8(f32_matrix(weights))]), normal(5, 45)
    before = native.linear(x, matrix)
    panels = matrix.data[0].view(2, -1)
    integers = panels[:, 64:].view(2, 2, 8, 16, 4)  # [panel, group, step, row, column]
    integers[:, 1, 13 // 4 + 1 :] = 255
    integers[:, 1, 13 // 4, :, 13 % 4 :] = 255
    assert torch.equal(native.linear(x, matrix), before)


# -- activations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planes", ACTIVATIONS.values())
def test_activations_have_the_same_bits_in_every_instruction_set(planes: int) -> None:
    x = normal(MOST, 200) * torch.logspace(-30, 30, MOST)[:, None]
    x[0] = 0
    x[1, 3], x[2, 70], x[3, 199] = math.nan, math.inf, -math.inf
    x[4] = 2.0**-101
    x[5, ::2] = 0.5  # ties
    x[5, 1::2] = 127.0
    x[8, ::2] = 127.5  # ties of two planes, also where the lower one is 127.5 of 256
    x[8, 1::2] = 32639.0
    x[6] = torch.finfo(torch.float32).max
    x[7] = 1e-40
    rounded_by = [open_native(isa, planes).quantize(x) for isa in ISAS]
    assert all(one == rounded_by[0] for one in rounded_by)


@pytest.mark.parametrize("planes", ACTIVATIONS.values())
def test_integer_products_have_the_same_bits_with_and_without_512_bits(planes: int) -> None:
    vectorised = [open_native(isa, planes) for isa in ISAS if isa != "generic"]
    for stored in matrices():
        answers = [
            native.linear(normal(9, stored.cols), native.packer.pack([stored]))
            for native in vectorised
            if native.packer.pack([stored]).planes
        ]
        assert all(torch.equal(answer, answers[0]) for answer in answers)


def test_the_largest_integers_fit(native: Native) -> None:
    """All weights and activations at their largest, of either sign: no sum of a group or a span wraps."""
    for kind in (GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q8_0, GgmlType.Q5_1):
        stored = random_matrix(kind, 16, 128)
        blocks = stored.blocks.view(16, -1, BLOCKS[kind].bytes).clone()
        scales = 4 if kind in (GgmlType.Q4_1, GgmlType.Q5_1) else 2
        blocks[:8, :, scales:] = 255  # -1 of Q8_0
        blocks[8:, :, scales:] = 0x80 if kind is GgmlType.Q8_0 else 0  # the smallest of Q8_0 and Q4_0
        most = type(stored)("most", blocks.view(16, -1), 128, stored.bits, stored.dequantize, stored.unpack)
        matrix, x = native.packer.pack([most]), torch.ones(3, 128) * torch.tensor([1.0, -1.0, 3.7])[:, None]
        assert_close(native.linear(x, matrix), rounded(x, native.planes), values_of(most))
    whole = to_int8(f32_matrix(torch.tensor([[1.0], [-1.0]]).expand(2, 128).contiguous()))
    x = -torch.ones(1, 128)
    assert_close(native.linear(x, native.packer.pack([whole])), rounded(x, native.planes), values_of(whole))


def test_two_planes_are_as_near_as_sixteen_bits(native: Native) -> None:
    x = normal(8, 256)
    spans = x.double().view(8, -1, SPAN)
    step = spans.abs().amax(2, keepdim=True) / {1: 127, 2: 32639}[native.planes]
    identity = to_int8(f32_matrix(torch.eye(256)))
    actual = native.linear(x, native.packer.pack([identity])).double().view(8, -1, SPAN)
    assert ((actual - spans).abs() <= 0.501 * step + 1e-6).all()


def test_rows_of_extreme_size(native: Native) -> None:
    stored = random_matrix(GgmlType.Q4_1, 17, 96)
    matrix = native.packer.pack([stored])
    x = normal(6, 96) * torch.tensor([1e-38, 1e-25, 1.0, 1e20, 1e36, 0.0])[:, None]
    actual = native.linear(x, matrix)
    assert actual.isfinite().all()
    for row in range(6):
        assert_close(actual[row : row + 1], rounded(x[row : row + 1], native.planes), values_of(stored))
    assert torch.equal(actual[0], torch.zeros(17))  # smaller than 2^-100 counts as nothing
    assert torch.equal(actual[5], torch.zeros(17))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 63, 64, 86])
def test_a_row_that_is_not_finite_is_not_a_number_and_no_other_is(native: Native, poison: float, column: int) -> None:
    for stored in matrices():
        matrix = native.packer.pack([stored])
        x = normal(20, stored.cols)
        clean = native.linear(x, matrix)
        x[7, column] = poison
        actual = native.linear(x, matrix)
        others = torch.arange(20) != 7
        assert torch.equal(actual[others], clean[others])
        assert not actual[7].isfinite().any()
        assert actual[7].isnan().all() or not matrix.planes


# -- schemes -----------------------------------------------------------------------------------------------------------


def test_int8_has_a_scale_for_a_row() -> None:
    weights = torch.tensor([[1.0, -127.0, 63.5, 0.5], [0.0, 0.0, 0.0, 0.0], [1e-3, 2e-3, -1.27e-1, 0.0]])
    matrix = to_int8(f32_matrix(weights))
    assert matrix.bits == 8
    assert matrix.blocks.shape == (3, 4 + 4)
    expected = torch.tensor([[1.0, -127.0, 64.0, 0.0], [0.0] * 4, [1e-3, 2e-3, -1.27e-1, 0.0]])
    torch.testing.assert_close(values_of(matrix), expected, rtol=1e-6, atol=0)


def test_int8_refuses_weights_that_are_not_finite() -> None:
    with pytest.raises(ValueError, match="dense has weights that are not finite"):
        to_int8(f32_matrix(torch.tensor([[1.0, math.inf]])))


def test_bf16_rounds_to_the_nearest() -> None:
    weights = normal(3, 8)
    assert torch.equal(values_of(to_bf16(f32_matrix(weights))), weights.to(torch.bfloat16).float())


def test_the_layouts_of_both_languages_agree(native: Native) -> None:
    size = native.library.bind("tercet_panel_bytes", LONG, INT, INT)
    assert all(size(format, 96) > 0 for format in Format)
    assert size(len(Format), 96) == -1
