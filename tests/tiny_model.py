"""A two-layer Llama in a GGUF file, small enough to build in every test: random weights, byte vocabulary."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf_writer
import numpy as np
from stored_matrices import random_blocks

from executor.loading.ggml_types import GgmlType

BYTE_TOKENS = 256
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>")
VOCAB = BYTE_TOKENS + len(SPECIAL) + 40  # some ids that no text has


@dataclass(frozen=True, slots=True)
class TinySpec:
    layers: int = 2
    hidden: int = 64
    inner: int = 96
    heads: int = 4
    kv_heads: int = 2
    context: int = 256
    weights: GgmlType = GgmlType.Q4_1
    embedding: GgmlType = GgmlType.Q8_0
    output: GgmlType | None = None  # None: tied
    biases: bool = False
    seed: int = 0
    formats: Mapping[str, GgmlType] = field(default_factory=dict)  # of tensors by name, beside the rule
    metadata: Mapping[str, Any] = field(default_factory=dict)  # more, or other, keys; None removes one
    extra: tuple[gguf_writer.Tensor, ...] = ()
    without: tuple[str, ...] = ()


def write_tiny_model(path: Path, spec: TinySpec | None = None) -> Path:
    chosen = spec or TinySpec()
    path.write_bytes(gguf_writer.gguf_bytes(_metadata(chosen), _tensors(chosen)))
    return path


def tensor(name: str, shape: tuple[int, ...], kind: GgmlType, seed: int) -> gguf_writer.Tensor:
    rows, cols = (1, shape[0]) if len(shape) == 1 else shape
    return gguf_writer.Tensor(name, shape, int(kind), random_blocks(kind, rows, cols, seed).numpy().tobytes())


def vector(name: str, values: np.ndarray) -> gguf_writer.Tensor:
    return gguf_writer.Tensor(name, values.shape, int(GgmlType.F32), values.astype("<f4").tobytes())


def _tensors(spec: TinySpec) -> list[gguf_writer.Tensor]:
    rng = np.random.default_rng(spec.seed)
    head_dim = spec.hidden // spec.heads
    q_rows, kv_rows = spec.heads * head_dim, spec.kv_heads * head_dim
    tensors: list[gguf_writer.Tensor] = []

    def matrix(name: str, rows: int, cols: int, kind: GgmlType) -> None:
        kind = spec.formats.get(name, kind)
        tensors.append(tensor(name, (rows, cols), kind, spec.seed * 1000 + len(tensors)))

    def norm(name: str) -> None:
        tensors.append(vector(name, rng.uniform(0.5, 1.5, spec.hidden)))

    def bias(name: str, size: int) -> None:
        if spec.biases:
            tensors.append(vector(name, rng.normal(0, 0.5, size)))

    matrix("token_embd.weight", VOCAB, spec.hidden, spec.embedding)
    for layer in range(spec.layers):
        prefix = f"blk.{layer}."
        norm(prefix + "attn_norm.weight")
        for name, rows in (("attn_q", q_rows), ("attn_k", kv_rows), ("attn_v", kv_rows)):
            matrix(prefix + name + ".weight", rows, spec.hidden, spec.weights)
            bias(prefix + name + ".bias", rows)
        matrix(prefix + "attn_output.weight", spec.hidden, q_rows, spec.weights)
        bias(prefix + "attn_output.bias", spec.hidden)
        norm(prefix + "ffn_norm.weight")
        matrix(prefix + "ffn_gate.weight", spec.inner, spec.hidden, spec.weights)
        matrix(prefix + "ffn_up.weight", spec.inner, spec.hidden, spec.weights)
        matrix(prefix + "ffn_down.weight", spec.hidden, spec.inner, spec.weights)
    norm("output_norm.weight")
    if spec.output is not None:
        matrix("output.weight", VOCAB, spec.hidden, spec.output)
    return [tensor for tensor in tensors if tensor.name not in spec.without] + list(spec.extra)


def _metadata(spec: TinySpec) -> dict[str, Any]:
    metadata = {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.block_count": spec.layers,
        "llama.context_length": spec.context,
        "llama.embedding_length": spec.hidden,
        "llama.feed_forward_length": spec.inner,
        "llama.attention.head_count": spec.heads,
        "llama.attention.head_count_kv": spec.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": VOCAB,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": _tokens(),
        "tokenizer.ggml.token_type": [1] * BYTE_TOKENS
        + [3] * len(SPECIAL)
        + [5] * (VOCAB - BYTE_TOKENS - len(SPECIAL)),
        "tokenizer.ggml.merges": gguf_writer.Typed(gguf_writer.ARRAY, [], gguf_writer.STRING),
        "tokenizer.ggml.bos_token_id": BYTE_TOKENS + 1,
        "tokenizer.ggml.eos_token_id": BYTE_TOKENS + 2,
        "tokenizer.ggml.unknown_token_id": BYTE_TOKENS + 3,
        "tokenizer.ggml.add_bos_token": False,
    }
    metadata.update(spec.metadata)
    return {key: value for key, value in metadata.items() if value is not None}


def _tokens() -> list[str]:
    """GPT-2's visible stand-ins for bytes, then the special tokens, then unused ones."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    unused = [f"<unused{index}>" for index in range(VOCAB - BYTE_TOKENS - len(SPECIAL))]
    return [letters[byte] for byte in range(256)] + list(SPECIAL) + unused
