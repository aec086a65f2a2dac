"""What a checkpoint may be, what is refused and by which name, and that each option changes the right thing."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_llama import plain_logprobs
from tiny_model import VOCAB, TinySpec, tensor, vector, write_tiny_model

from executor.loading.ggml_types import GgmlType
from executor.loading.gguf import GgufError
from executor.loading.load import load_runner
from executor.models.model import ModelError
from executor.runner import Runner

IDS = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(path: Path, spec: TinySpec, backend: str = "reference", **settings: int) -> Runner:
    sizes = {"block_size": 8, "total_blocks": 32, "max_batched_tokens": 64, "max_sequences": 4} | settings
    return load_runner(write_tiny_model(path / "m.gguf", spec), backend=backend, **sizes)  # type: ignore[arg-type]


def assert_near(scores: list[float], expected: np.ndarray, backend: str) -> None:
    """`cpu` rounds keys, values and activations to bfloat16, which random weights amplify."""
    apart = np.abs(np.array(scores) - expected)
    largest, mean = (1e-4, 1e-5) if backend == "reference" else (0.4, 0.04)
    assert apart.max() < largest
    assert apart.mean() < mean


SERVED = {
    "default": TinySpec(),
    "biases": TinySpec(biases=True),
    "untied": TinySpec(output=GgmlType.Q4_0),
    "one key/value head": TinySpec(kv_heads=1),
    "as many key/value heads": TinySpec(kv_heads=4),
    "head size of its own": TinySpec(metadata={"llama.attention.key_length": 16, "llama.attention.value_length": 16}),
    "linear": TinySpec(metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}),
    "yarn": TinySpec(
        metadata={
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 8.0,
            "llama.rope.scaling.original_context_length": 32,
        }
    ),
    "llama3": TinySpec(extra=(vector("rope_freqs.weight", np.array([1, 1, 1.5, 2, 4, 8, 8, 8])),)),
    "mixed formats": TinySpec(
        formats={
            "blk.0.attn_v.weight": GgmlType.Q8_0,
            "blk.1.ffn_up.weight": GgmlType.F16,
            "blk.1.attn_q.weight": GgmlType.Q5_1,
        }
    ),
    "floats": TinySpec(weights=GgmlType.BF16, embedding=GgmlType.F32),
    "k-quants": TinySpec(layers=1, hidden=256, inner=256, weights=GgmlType.Q4_K, embedding=GgmlType.Q6_K),
}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", SERVED)
def test_logprobs_equal_a_plain_implementation(tmp_path: Path, name: str, backend: str) -> None:
    """The plain one reads the file with the gguf package and rotates neighbouring pairs, as files store them."""
    runner = load(tmp_path, SERVED[name], backend)
    expected = plain_logprobs(tmp_path / "m.gguf", IDS)
    assert_near(runner.score(IDS, 1), expected, backend)


def test_options_change_the_result(tmp_path: Path) -> None:
    """So that the comparison above could fail."""
    scores = {name: tuple(load(tmp_path, spec).score(IDS, 1)) for name, spec in SERVED.items()}
    same = {"head size of its own"}
    assert len({scores[name] for name in SERVED if name not in same}) == len(SERVED) - len(same)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", list(GgmlType), ids=lambda kind: kind.name)
def test_every_format_serves_as_weights_and_as_tied_head(tmp_path: Path, kind: GgmlType, backend: str) -> None:
    spec = TinySpec(layers=1, hidden=256, inner=256, weights=kind, embedding=kind)
    runner = load(tmp_path, spec, backend)
    expected = plain_logprobs(tmp_path / "m.gguf", IDS)
    assert_near(runner.score(IDS, 1), expected, backend)


# -- refusals ----------------------------------------------------------------------------------------------------------

WRONG_TENSORS = {
    "missing": (TinySpec(without=("blk.1.ffn_up.weight",)), "tensor 'blk.1.ffn_up.weight' is missing"),
    "no embedding": (TinySpec(without=("token_embd.weight",)), "tensor 'token_embd.weight' is missing"),
    "no norm": (TinySpec(without=("output_norm.weight",)), "tensor 'output_norm.weight' is missing"),
    "one bias of three": (
        TinySpec(biases=True, without=("blk.0.attn_k.bias",)),
        "tensor 'blk.0.attn_k.bias' is missing",
    ),
    "unused": (
        TinySpec(extra=(tensor("blk.0.ffn_gate_inp.weight", (4, 64), GgmlType.F32, 0),)),
        "1 tensors of the file are of no use to this architecture: 'blk.0.ffn_gate_inp.weight'",
    ),
    "a layer too many": (TinySpec(metadata={"llama.block_count": 1}), "no use to this architecture: 'blk.1.attn_k"),
    "a layer too few": (TinySpec(metadata={"llama.block_count": 3}), "tensor 'blk.2.attn_norm.weight' is missing"),
    "wrong shape": (
        TinySpec(metadata={"llama.feed_forward_length": 128}),
        r"tensor 'blk.0.ffn_gate.weight' has shape \[96, 64\], expected \[128, 64\]",
    ),
    "wrong number of heads": (
        TinySpec(metadata={"llama.attention.head_count_kv": 4}),
        r"tensor 'blk.0.attn_k.weight' has shape \[32, 64\], expected \[64, 64\]",
    ),
    "quantized vector": (
        TinySpec(without=("output_norm.weight",), extra=(tensor("output_norm.weight", (64,), GgmlType.Q8_0, 0),)),
        "tensor 'output_norm.weight' is Q8_0; a vector must be F32, F16 or BF16",
    ),
}


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_wrong_tensors_are_named(tmp_path: Path, name: str) -> None:
    spec, message = WRONG_TENSORS[name]
    with pytest.raises(GgufError, match=message):
        load(tmp_path, spec)


WRONG_METADATA: list[tuple[dict[str, Any], str]] = [
    ({"general.architecture": "qwen2moe"}, "general.architecture 'qwen2moe' is not supported; llama is"),
    ({"general.architecture": None}, "'general.architecture' is missing"),
    ({"llama.block_count": None}, "'llama.block_count' is missing"),
    ({"llama.block_count": 0}, "llama.block_count must be at least 1, got 0"),
    ({"llama.embedding_length": "64"}, "'llama.embedding_length' is of type str, expected int"),
    ({"llama.attention.head_count_kv": 3}, "head_count 4 is no multiple of head_count_kv 3"),
    ({"llama.attention.head_count": 6, "llama.attention.head_count_kv": 2}, "no multiple of attention.head_count 6"),
    ({"llama.attention.value_length": 32}, "llama.attention.value_length is 32; only the head size 16"),
    ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8; only the head size 16"),
    ({"llama.attention.layer_norm_rms_epsilon": math.nan}, "layer_norm_rms_epsilon is nan"),
    ({"llama.rope.freq_base": math.inf}, "rope.freq_base is inf"),
    ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope' is not supported; none, linear and yarn"),
    ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": -1.0}, "rope.scaling.factor is -1.0"),
    ({"llama.expert_count": 8}, "llama.expert_count is 8, which is not supported"),
    ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window is 4096, which is not supported"),
    ({"llama.vocab_size": VOCAB + 1}, f"llama.vocab_size is {VOCAB + 1}, but token_embd.weight has {VOCAB} rows"),
]


@pytest.mark.parametrize(("metadata", "message"), WRONG_METADATA)
def test_metadata_that_cannot_be_served_is_named(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises((ModelError, GgufError), match=message):
        load(tmp_path, replace(TinySpec(), metadata=metadata))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_batched_tokens": 0}, "max_batched_tokens must be at least 1"),
        ({"max_sequences": 0}, "max_sequences must be at least 1"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"max_model_len": 257}, "max_model_len must be from 1 to the model's 256"),
    ],
)
def test_settings_that_cannot_be_served_are_named(tmp_path: Path, settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path, TinySpec(), **settings)


def test_unknown_scheme(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf")
    with pytest.raises(ValueError, match="unknown quantization scheme 'int3'; there are native"):
        load_runner(
            path,
            backend="cpu",
            block_size=8,
            total_blocks=4,
            max_batched_tokens=8,
            max_sequences=1,
            scheme="int3",
        )


def test_capacity_and_budget(tmp_path: Path) -> None:
    runner = load(tmp_path, TinySpec(), "cpu")
    assert (runner.capacity.max_model_len, runner.capacity.vocab_size) == (256, VOCAB)
    assert runner.memory.pool_bytes == 32 * 8 * 2 * 2 * 2 * 16 * 2
    budget = runner.memory.temporary_bytes + runner.memory.pool_bytes
    path = tmp_path / "m.gguf"
    by_budget = load_runner(
        path, backend="cpu", block_size=8, max_batched_tokens=64, max_sequences=4, kv_memory_bytes=budget
    )
    assert by_budget.capacity == runner.capacity
