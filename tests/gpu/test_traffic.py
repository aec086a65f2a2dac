"""Bytes and operations of the GPU's kernels, counted from their own launches, against the fewest possible."""

from dataclasses import replace

import pytest
import torch

from executor.roofline import Rows, fewest_bytes, products, step_cost
from executor.sizing.devices import DEVICES
from executor.sizing.formats import find_cache, find_weights
from executor.sizing.plan import Ask, decode_ceiling
from executor.sizing.shapes import SHAPES
from kernels.gpu import attention
from kernels.gpu.launch import Launch
from kernels.gpu.launches import META
from kernels.gpu.pages import PAGE_FORMATS
from kernels.gpu.target import Target
from kernels.gpu.traffic import Traffic, count
from kernels.ops import AttentionShape, PagedRows

H200, LLAMA = DEVICES["h200"], SHAPES["llama-3.1-8b"]
LIMIT = 1.1
# From 17 to 64 rows a product that has fewer tiles than processors gives segments to programs of their own; their
# float32 sums are more than a tenth of 4-bit weights: what they cost is written here, and nothing else may exceed the
# limit.
SPLIT_AT_64 = {
    ("llama-3.1-8b", "w4", "bf16"): 1.13,
    ("llama-3.1-8b", "w4", "fp8"): 1.18,
    ("llama-3.1-70b", "w8", "bf16"): 1.15,
    ("llama-3.1-70b", "w4", "bf16"): 1.22,
    ("llama-3.1-70b", "w4", "fp8"): 1.27,
}
WITHIN_AT_64 = [("llama-3.1-8b", "bf16"), ("llama-3.1-8b", "w8"), ("llama-3.1-70b", "bf16")]


@pytest.mark.parametrize("weights", ["bf16", "w8", "w4", "w4-minima"])
@pytest.mark.parametrize("cache", ["bf16", "fp8"])
@pytest.mark.parametrize("batch", [1, 8, 16, 128, 256])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.1-70b"])
def test_a_decode_step_moves_hardly_more_than_it_must(weights: str, cache: str, batch: int, model: str) -> None:
    shape, scheme = SHAPES[model], find_weights(weights)
    for context in (1024, 8192):
        rows = Rows(batch, 1, context - 1)
        cost = step_cost(shape, H200, 90, scheme, cache, rows)
        fewest = fewest_bytes(shape, scheme, find_cache(cache), rows)
        assert fewest <= cost.moved <= LIMIT * fewest


@pytest.mark.parametrize(("model", "weights", "cache"), SPLIT_AT_64)
def test_the_sums_of_segments_are_what_exceeds_the_limit_at_64_rows(model: str, weights: str, cache: str) -> None:
    rows, scheme, shape = Rows(64, 1, 1023), find_weights(weights), SHAPES[model]
    cost = step_cost(shape, H200, 90, scheme, cache, rows)
    fewest = fewest_bytes(shape, scheme, find_cache(cache), rows)
    assert LIMIT < cost.moved / fewest <= SPLIT_AT_64[model, weights, cache]
    sums = sum(part.times * part.traffic.scratch for part in cost.parts if part.traffic.kernel != "attention")
    assert cost.moved - sums <= LIMIT * fewest


@pytest.mark.parametrize(("model", "weights"), WITHIN_AT_64)
@pytest.mark.parametrize("batch", [17, 32, 64])
def test_the_limit_holds_at_17_to_64_rows_for_wider_weights(model: str, weights: str, batch: int) -> None:
    rows, scheme = Rows(batch, 1, 1023), find_weights(weights)
    cost = step_cost(SHAPES[model], H200, 90, scheme, "bf16", rows)
    assert cost.moved <= LIMIT * fewest_bytes(SHAPES[model], scheme, find_cache("bf16"), rows)


@pytest.mark.parametrize(("rows", "split"), [(16, True), (17, False), (64, False)])
def test_gate_and_up_is_split_for_a_few_rows_only(rows: int, split: bool) -> None:
    """224 tiles: less than two for each of 132 processors, more than one."""
    parts = step_cost(LLAMA, H200, 90, find_weights("bf16"), "bf16", Rows(rows, 1, 1023)).parts
    gate_up = [part.traffic for part in parts if part.traffic.kernel == "linear"][2]
    assert gate_up.weights == 2 * 14336 * 4096 * 2
    assert (gate_up.scratch > 0) == split


@pytest.mark.parametrize("rows", [1, 8, 16, 128, 256])
@pytest.mark.parametrize("weights", ["bf16", "w8", "w4"])
def test_a_product_moves_hardly_more_than_it_must(rows: int, weights: str) -> None:
    for part in products(LLAMA, find_weights(weights), H200, 90, rows):
        assert part.traffic.moved <= LIMIT * part.traffic.fewest, part


def test_the_fewest_are_those_of_the_plan() -> None:
    """Two counts of the same: by formats and by launches' own fewest."""
    scheme, cache = find_weights("bf16"), find_cache("bf16")
    wish = Ask(LLAMA, H200, scheme, cache, context=1024)
    rows = Rows(8, 1, 1023)
    ceiling = decode_ceiling(wish, 8, 1024, 1 << 30)
    # The plan reads 1,024 tokens and writes one; the step sees 1,023 and its own.
    assert fewest_bytes(LLAMA, scheme, cache, rows) == ceiling.bytes
    cost = step_cost(LLAMA, H200, 90, scheme, "bf16", rows)
    assert sum(part.times * part.traffic.weights for part in cost.parts) == pytest.approx(
        scheme.read_bytes(LLAMA, 8), rel=1e-4
    )
    assert sum(part.times * part.traffic.cache for part in cost.parts) == 8 * 1024 * 131_072
    assert cost.operations == pytest.approx(ceiling.operations, rel=1e-3)


def test_a_product_by_hand() -> None:
    """qkv, bf16, 8 rows: 96 tiles of 64 are too few for 132 processors, so 4 segments of 1,024 columns have sums."""
    qkv = next(iter(products(LLAMA, find_weights("bf16"), H200, 90, 8))).traffic
    assert qkv.weights == 6144 * 4096 * 2
    assert qkv.scratch == 4 * 8 * 6144 * 4
    assert qkv.written == 8 * 6144 * 4
    assert qkv.fewest == qkv.weights + 8 * 4096 * 2 + qkv.written
    assert qkv.operations == 2 * 8 * 6144 * 4096
    assert qkv.executed == 2 * 16 * 6144 * 4096  # a tile has 16 rows


SHAPE = AttentionShape(heads=8, kv_heads=2, head_dim=64, block_size=16)


def attended(sequences: list[tuple[int, int]], window: int, processors: int, pages: str, cache: int) -> list[Traffic]:
    launches: list[Launch] = []
    target = Target(META, 90, processors, torch.bfloat16, launches.append)
    starts = torch.tensor([0, *(count for _, count in sequences)]).cumsum(0).to(torch.int32)
    longest = max(length for length, _ in sequences)
    rows = PagedRows(
        starts,
        torch.tensor([length for length, _ in sequences], dtype=torch.int32),
        torch.zeros(len(sequences), -(-longest // 16), dtype=torch.int32),
    )
    work = attention.plan(replace(target, device=torch.device("cpu")), rows, SHAPE, window)
    kept = PAGE_FORMATS[pages]
    page = torch.empty(4, *kept.page(16, 2, 64), dtype=kept.dtype, device=META)
    q = torch.empty(int(starts[-1]), 8, 64, device=META)
    attention.attend(target, q, page, page, work, kept, 0.125, attention.Extras(window), torch.bfloat16)
    return [count(each, cache, processors) for each in launches]


@pytest.mark.parametrize("pages", ["bf16", "fp8"])
@pytest.mark.parametrize("window", [0, 100, 300])
@pytest.mark.parametrize("processors", [1, 1000])
def test_attention_by_every_key(processors: int, window: int, pages: str) -> None:
    sequences = [(600, 1), (513, 40), (1, 1), (300, 300)]
    found = attended(sequences, window, processors, pages, 1 << 30)
    seen = pairs = 0
    for length, new in sequences:
        keys = set()
        for at in range(length - new, length):
            own = range(max(0, at - window + 1) if window else 0, at + 1)
            keys |= set(own)
            pairs += len(own)
        seen += len(keys)
    token = 2 * 2 * (128 if pages == "bf16" else 68)  # keys and values, heads, bytes
    assert found[0].cache == seen * token
    assert found[0].operations == pairs * 4 * 8 * 64
    assert found[0].executed >= found[0].operations
    assert sum(each.written for each in found) == 342 * 8 * 64 * 2
    assert (found[0].scratch > 0) == (processors == 1000)


def test_a_sequence_beyond_the_cache_is_read_again_by_each_tile() -> None:
    once = attended([(300, 300)], 0, 1, "bf16", 1 << 30)[0]
    again = attended([(300, 300)], 0, 1, "bf16", 1 << 10)[0]
    assert again.cache > 2 * once.cache


def test_a_kernel_without_a_counter_is_refused() -> None:
    class Unknown:
        __name__ = "unknown_kernel"

    with pytest.raises(ValueError, match="no counter for the kernel unknown_kernel; there are linear_kernel"):
        count(Launch(Unknown(), (1,), {}, 4), 1 << 20, 132)
