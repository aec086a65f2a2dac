"""The block formats, bit for bit against the gguf package's own dequantize."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from executor.loading.ggml_types import BLOCKS, GgmlType
from executor.loading.gguf import open_gguf
from executor.quant.ggml import dequantize, read_blocks, unpack, unpack_unsigned

gguf = pytest.importorskip("gguf")

# Where in its block each quantized format keeps its float16 scales and minimums.
HALVES = {
    GgmlType.Q4_0: (0,),
    GgmlType.Q4_1: (0, 2),
    GgmlType.Q5_0: (0,),
    GgmlType.Q5_1: (0, 2),
    GgmlType.Q8_0: (0,),
    GgmlType.Q4_K: (0, 2),
    GgmlType.Q5_K: (0, 2),
    GgmlType.Q6_K: (208,),
}
SYMMETRIC = (GgmlType.Q4_0, GgmlType.Q5_0, GgmlType.Q8_0, GgmlType.Q6_K)
# Zero, minus zero, least and greatest subnormal, least normal, 1, greatest finite, an ordinary one; and negatives.
EDGES = np.array(
    [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x1234], dtype="<u2"
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_rows(type: GgmlType, rows: int, blocks: int, seed: int) -> np.ndarray:
    """Random bytes, with finite float16 fields where the format has any: uint8 [rows, row_bytes]."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, blocks, BLOCKS[type].bytes), dtype=np.uint8)
    for at in HALVES.get(type, ()):
        finite = rng.uniform(-4, 4, (rows, blocks)).astype("<f2")
        raw[..., at : at + 2] = finite[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def theirs(raw: np.ndarray, type: GgmlType) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(int(type)))


def assert_same_bits(ours: torch.Tensor, reference: np.ndarray) -> None:
    """Equal to the last bit; NaN where the reference has NaN, whose payload is free."""
    assert ours.dtype == torch.float32
    values = ours.numpy()
    assert values.shape == reference.shape
    nan = np.isnan(reference)
    np.testing.assert_array_equal(np.isnan(values), nan)
    np.testing.assert_array_equal(values.view(np.uint32)[~nan], reference.view(np.uint32)[~nan])


@pytest.mark.parametrize("type", list(GgmlType))
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (1, 7), (33, 4), (128, 18)])
def test_random_blocks(type: GgmlType, rows: int, blocks: int) -> None:
    raw = random_rows(type, rows, blocks, seed=rows * 100 + blocks)
    before = raw.copy()
    assert_same_bits(dequantize(torch.from_numpy(raw), type), theirs(raw, type))
    np.testing.assert_array_equal(raw, before)


@pytest.mark.parametrize("type", list(HALVES))
def test_edge_scales(type: GgmlType) -> None:
    # Every pair of edge values as (scale, minimum), each over a block with random integers.
    raw = random_rows(type, len(EDGES), len(EDGES), seed=1).reshape(len(EDGES), len(EDGES), -1)
    first = np.broadcast_to(EDGES[:, None, None], (*raw.shape[:2], 1)).copy().view(np.uint8)
    second = np.broadcast_to(EDGES[None, :, None], (*raw.shape[:2], 1)).copy().view(np.uint8)
    for at, edge in zip(HALVES[type], (first, second), strict=False):
        raw[..., at : at + 2] = edge
    raw = raw.reshape(len(EDGES), -1)
    assert_same_bits(dequantize(torch.from_numpy(raw), type), theirs(raw, type))


@pytest.mark.parametrize("type", list(GgmlType))
def test_any_bytes_at_all(type: GgmlType) -> None:
    # Infinite and NaN scales included: they must come out as the reference has them, not be hidden.
    raw = np.random.default_rng(2).integers(0, 256, (64, 6 * BLOCKS[type].bytes), dtype=np.uint8)
    assert_same_bits(dequantize(torch.from_numpy(raw), type), theirs(raw, type))


@pytest.mark.parametrize("type", [GgmlType.F16, GgmlType.BF16])
def test_every_value_of_the_16_bit_floats(type: GgmlType) -> None:
    raw = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(16, -1)
    assert_same_bits(dequantize(torch.from_numpy(raw), type), theirs(raw, type))


@pytest.mark.parametrize("type", list(GgmlType))
def test_views_at_odd_addresses_and_with_strides(type: GgmlType) -> None:
    raw = random_rows(type, 8, 3, seed=3)
    shifted = torch.zeros(raw.size + 1, dtype=torch.uint8)[1:].view(8, -1)
    shifted.copy_(torch.from_numpy(raw))
    assert_same_bits(dequantize(shifted, type), theirs(raw, type))
    wide = torch.zeros(16, raw.shape[1] + 3, dtype=torch.uint8)[::2, 1:-2]
    wide.copy_(torch.from_numpy(raw))
    assert_same_bits(dequantize(wide, type), theirs(raw, type))


@pytest.mark.parametrize("type", [GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q5_0, GgmlType.Q5_1, GgmlType.Q8_0])
def test_what_the_gguf_package_quantizes_comes_back(type: GgmlType) -> None:
    weights = np.random.default_rng(4).normal(0, 0.05, (16, 256)).astype(np.float32)
    raw = gguf.quants.quantize(weights, gguf.GGMLQuantizationType(int(type)))
    ours = dequantize(torch.from_numpy(raw), type)
    assert_same_bits(ours, theirs(raw, type))
    step = (weights.max() - weights.min()) / (255 if type is GgmlType.Q8_0 else 15)
    assert np.abs(ours.numpy() - weights).max() < step


@pytest.mark.parametrize("type", list(HALVES))
def test_unpacked_groups_are_the_weights(type: GgmlType) -> None:
    raw = random_rows(type, 12, 5, seed=5)
    groups = unpack(torch.from_numpy(raw), type)
    cols = 5 * BLOCKS[type].elements
    assert groups.q.shape == (12, cols)
    assert groups.q.dtype == (torch.int8 if type in SYMMETRIC else torch.uint8)
    assert (groups.minimum is None) == (type in SYMMETRIC)
    assert groups.group_size == (16 if type is GgmlType.Q6_K else 32)
    product = groups.q.double() * groups.scale.double().repeat_interleave(groups.group_size, 1)
    assert torch.equal(product, product.float().double()), "scale * q must not round"
    if groups.minimum is not None:
        product = product + groups.minimum.double().repeat_interleave(groups.group_size, 1)
    np.testing.assert_array_equal(product.float().numpy(), theirs(raw, type))


@pytest.mark.parametrize("type", [type for type in HALVES if type is not GgmlType.Q8_0])
def test_the_unsigned_form_is_equal(type: GgmlType) -> None:
    raw = random_rows(type, 12, 5, seed=6)
    q, scale, minimum = unpack_unsigned(torch.from_numpy(raw), type)
    assert (q.dtype, scale.dtype, minimum.dtype) == (torch.uint8, torch.float32, torch.float32)
    assert scale.shape == minimum.shape
    size = q.shape[1] // scale.shape[1]
    weights = q.float() * scale.repeat_interleave(size, 1) + minimum.repeat_interleave(size, 1)
    np.testing.assert_array_equal(weights.numpy(), theirs(raw, type))
    assert int(q.max()) == {GgmlType.Q4_0: 15, GgmlType.Q4_1: 15, GgmlType.Q4_K: 15, GgmlType.Q6_K: 63}.get(type, 31)


@pytest.mark.model
def test_every_tensor_of_the_default_model(default_model_path: Path) -> None:
    reader = gguf.GGUFReader(default_model_path)
    with open_gguf(default_model_path) as model:
        for tensor in reader.tensors:
            info = model.tensors[tensor.name]
            ours = dequantize(read_blocks(model.raw(info.name), info.rows), info.type)
            reference = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert_same_bits(ours.reshape(info.shape), reference)


def test_wrong_arguments_are_refused_by_name() -> None:
    raw = torch.zeros(2, 18, dtype=torch.uint8)
    for call, message in (
        (lambda: dequantize(raw.int(), GgmlType.Q4_0), r"expected uint8 \[rows, row_bytes\], got torch.int32"),
        (lambda: dequantize(raw[0], GgmlType.Q4_0), r"got torch.uint8 \[18\]"),
        (lambda: dequantize(raw, GgmlType.Q4_1), r"18 bytes are no whole number of Q4_1 blocks \(20\)"),
        (lambda: unpack(raw, GgmlType.F16), "F16 is not a quantized format"),
        (lambda: unpack_unsigned(raw[:, :0], GgmlType.Q8_0), "Q8_0 has no unsigned form"),
        (lambda: read_blocks(memoryview(bytes(10)), 3), "10 bytes do not divide into 3 rows"),
        (lambda: read_blocks(memoryview(bytes(10)), 0), "0 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_read_blocks_copies() -> None:
    source = bytearray(range(36))
    blocks = read_blocks(memoryview(source).toreadonly(), 2)
    source[0] = 99
    assert blocks.tolist() == [list(range(18)), list(range(18, 36))]
