"""The plan of an executor: weights counted, memory divided, ceilings; and what is refused by name."""

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import TinySpec, write_tiny_model

from executor.cache import MemoryPlanError
from executor.loading import load
from executor.loading.shortage import POOL, WEIGHTS, naming, start_table
from executor.sizing.devices import DEVICES, GIB, PlanError, find_device
from executor.sizing.files import read_shape
from executor.sizing.formats import CACHE_FORMATS, WEIGHT_FORMATS, find_cache, find_weights
from executor.sizing.plan import Ask, fixed_lines, make_plan
from executor.sizing.shapes import SHAPES, ModelShape
from services.commands import plan as command

LLAMA = SHAPES["llama-3.1-8b"]
# What the models' publishers state (the sum of the tensors of their checkpoints).
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
}


def ask(**changes: Any) -> Ask:
    plain = Ask(LLAMA, find_device("h200"), find_weights("bf16"), find_cache("bf16"), context=8192)
    return replace(plain, **changes)


def test_the_shapes_have_as_many_weights_as_published() -> None:
    assert {name: shape.weights() for name, shape in SHAPES.items()} == PUBLISHED


def test_bytes_by_hand() -> None:
    """Llama 3.1 8B: 16-bit weights, 32 layers x 8 heads x 128 x keys and values x 2 bytes a token."""
    vectors = (2 * 32 + 1) * 4096
    assert find_weights("bf16").weight_bytes(LLAMA) == 2 * (8_030_261_248 - vectors) + 4 * vectors
    assert find_cache("bf16").token_bytes(LLAMA) == 131_072
    assert find_cache("fp8").token_bytes(LLAMA) == 2 * 32 * 8 * (128 + 4)
    lookup = 128256 * 4096 * 2
    assert find_weights("bf16").read_bytes(LLAMA, 1) == find_weights("bf16").weight_bytes(LLAMA) - lookup + 8192
    one = make_plan(ask()).decode[0]
    moved = find_weights("bf16").read_bytes(LLAMA, 1) + 8193 * 131_072
    assert (one.bytes, one.bound) == (moved, "bandwidth")
    assert one.tokens_per_second == pytest.approx(4.3e12 / moved)


def test_four_bits_are_four_and_a_half() -> None:
    layers = 8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096
    ends = 2 * 128256 * 4096
    assert find_weights("w4").weight_bytes(LLAMA) == layers * 9 // 16 + ends * 17 // 16 + 4 * 65 * 4096


@given(
    device=st.sampled_from(sorted(DEVICES)),
    weights=st.sampled_from(sorted(WEIGHT_FORMATS)),
    cache=st.sampled_from(sorted(CACHE_FORMATS)),
    shape=st.sampled_from(sorted(SHAPES)),
    context=st.integers(1, 8192),
    block_size=st.integers(1, 256),
)
def test_what_is_planned_fits(device: str, weights: str, cache: str, shape: str, context: int, block_size: int) -> None:
    wish = Ask(
        SHAPES[shape], find_device(device), find_weights(weights), find_cache(cache), context, block_size=block_size
    )
    limit = wish.device.memory
    fixed = sum(line.bytes for line in fixed_lines(wish))
    needed = -(-context // block_size) * block_size * wish.cache.token_bytes(wish.shape)
    if fixed + needed > limit:
        with pytest.raises(PlanError, match="the line to change is"):
            make_plan(wish)
        return
    found = make_plan(wish)
    assert limit - found.token_bytes * block_size < found.table.total <= limit
    assert all(line.bytes >= 0 for line in found.table.lines)
    assert found.pool_tokens >= context
    for each in found.concurrency:
        assert each.sequences * -(-each.tokens // block_size) <= found.blocks
    for each, wider in zip(found.decode, found.decode[1:], strict=False):
        assert each.bytes < wider.bytes
        assert each.seconds <= wider.seconds
        assert each.tokens_per_second <= wider.tokens_per_second * (1 + 1e-9)


def test_narrower_is_faster_and_holds_more() -> None:
    by_weights = [make_plan(ask(weights=find_weights(name))) for name in ("bf16", "fp8", "w4")]
    speeds = [each.decode[0].tokens_per_second for each in by_weights]
    assert speeds == sorted(speeds)
    assert speeds[-1] / speeds[0] > 2.5
    narrow = make_plan(ask(cache=find_cache("fp8")))
    assert narrow.pool_tokens > 1.9 * by_weights[0].pool_tokens


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: find_device("b300"), "unknown device 'b300'; there are h200, h100"),
        (lambda: find_weights("3bit"), "unknown weights '3bit'; there are bf16"),
        (lambda: find_cache("int4"), "unknown KV format 'int4'"),
        (lambda: ask(context=131073), "context must be from 1 to the model's 131072, got 131073"),
        (lambda: ask(block_size=0), "block_size must be from 1 to 256, got 0"),
        (lambda: ask(reserve=-1), "reserve must be at least 0, got -1"),
        (lambda: replace(LLAMA, heads=0), "llama-3.1-8b: heads must be at least 1, got 0"),
        (lambda: make_plan(ask(shape=SHAPES["llama-3.1-70b"], device=find_device("h100"))), "is 'weights'"),
        (lambda: make_plan(ask(max_batched_tokens=1 << 20)), "is 'temporaries': max-batched-tokens"),
        (lambda: make_plan(ask(context=131072, device=find_device("l4"), cache=find_cache("fp32"))), "is 'KV pool'"),
    ],
)
def test_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


def config(**changes: object) -> dict[str, object]:
    plain: dict[str, object] = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    }
    return plain | changes


def test_a_directory_with_a_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "llama-3.1-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config()))
    assert read_shape(folder).shape == LLAMA
    assert read_shape(folder).weights is None
    for changes, message in (
        ({"model_type": "mamba"}, "model_type is 'mamba'; llama, mistral"),
        ({"num_local_experts": 8}, "num_local_experts is 8; models of experts"),
        ({"hidden_size": "4096"}, "hidden_size must be a whole number above 0, got '4096'"),
    ):
        (folder / "config.json").write_text(json.dumps(config(**changes)))
        with pytest.raises(PlanError, match=message):
            read_shape(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(PlanError, match="is no JSON"):
        read_shape(folder)


def test_a_file_has_the_shape_and_the_bytes_that_the_executor_loads(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", TinySpec())
    found = read_shape(path)
    assert found.shape == ModelShape("tiny", 2, 64, 96, 4, 2, 16, 300, 256, tied=True)
    assert found.weights is not None
    runner = load.load_runner(
        path, backend="reference", block_size=16, max_batched_tokens=8, max_sequences=2, total_blocks=4
    )
    assert runner.weight_bytes == found.weights.total
    assert found.weights.read_bytes(found.shape, 1) == found.weights.total  # the head is the embedding


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model", "llama-3.1-8b", "--device", "h200", "--weights", "fp8", "--context", "8192"]
    assert command.main(asked) == 0
    shown = capsys.readouterr().out
    assert "weights fp8, KV bf16" in shown
    assert "bandwidth 4.300 TB/s (measured), products 1979 Tflop/s in fp8 (data sheet)" in shown
    assert command.main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(line["bytes"] for line in told["table"]["lines"]) <= 139 * GIB
    assert [each["sequences"] for each in told["decode"]] == [1, 8, 64, 256]
    path = write_tiny_model(tmp_path / "tiny.gguf", TinySpec())
    assert command.main(["--model", str(path), "--device", "cpu"]) == 0
    assert "weights file" in capsys.readouterr().out
    assert command.main([*asked, "--memory-gib", "10"]) == 1
    assert "the line to change is 'weights'" in capsys.readouterr().err
    assert command.main(["--model", "llama-3.1-8b", "--weights", "file"]) == 1
    assert "needs a model file" in capsys.readouterr().err
    assert command.main(["--model", "nobody"]) == 1
    assert "unknown model 'nobody'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_running_out_names_the_line(error: Exception) -> None:
    table = start_table(weights=3 * GIB, temporaries=GIB, pool=2 * GIB)
    with pytest.raises(MemoryPlanError, match=r"takes 6.00 GiB .* is 'KV pool': lower --kv-memory-mib"):
        with naming(table, POOL):
            raise error


@pytest.mark.parametrize("error", [OSError(errno.EIO, "bad"), RuntimeError("shape"), ValueError("x")])
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        with naming(start_table(1, 1, 1), WEIGHTS):
            raise error
    assert caught.value is error


def test_a_pool_that_is_not_there_is_named_at_the_start(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", TinySpec())
    with pytest.raises(MemoryPlanError, match="the line to change is 'KV pool'"):
        load.load_runner(
            path, backend="reference", block_size=16, max_batched_tokens=8, max_sequences=2, total_blocks=1 << 40
        )
