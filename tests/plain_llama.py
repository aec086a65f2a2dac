"""Llama in plain numpy float64, for comparison: reads the file with the gguf package, shares nothing with the executor.

Rotates neighbouring pairs of the permuted rows, as the file stores them, where the executor undoes the permutation.
"""

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np


def plain_logprobs(path: Path, ids: list[int]) -> np.ndarray:
    """ln p(ids[i] | those before) for i >= 1."""
    meta, tensors = _read(path)
    eps, heads = meta["attention.layer_norm_rms_epsilon"], meta["attention.head_count"]
    kv_heads = meta["attention.head_count_kv"]
    head_dim = meta["embedding_length"] // heads
    count = len(ids)
    frequencies, magnitude = _frequencies(meta, head_dim, tensors.get("rope_freqs.weight"))
    turns = magnitude * np.exp(1j * np.arange(count)[:, None] * frequencies)[:, None, :]
    mask = np.where(np.tri(count, dtype=bool), 0.0, -np.inf)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * tensors[name]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ tensors[name + ".weight"].T + tensors.get(name + ".bias", 0.0)

    def rotate(x: np.ndarray) -> np.ndarray:
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * turns
        return np.stack((turned.real, turned.imag), -1).reshape(x.shape)

    x = tensors["token_embd.weight"][ids]
    for layer in range(meta["block_count"]):
        at = f"blk.{layer}."
        h = norm(x, at + "attn_norm.weight")
        q = rotate(linear(h, at + "attn_q").reshape(count, heads, head_dim))
        k = rotate(linear(h, at + "attn_k").reshape(count, kv_heads, head_dim))
        v = linear(h, at + "attn_v").reshape(count, kv_heads, head_dim)
        k, v = (np.repeat(t, heads // kv_heads, axis=1) for t in (k, v))
        weights = _softmax(np.einsum("qhd,khd->hqk", q, k) / math.sqrt(head_dim) + mask)
        x = x + linear(np.einsum("hqk,khd->qhd", weights, v).reshape(count, -1), at + "attn_output")
        h = norm(x, at + "ffn_norm.weight")
        gate = linear(h, at + "ffn_gate")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, at + "ffn_up"), at + "ffn_down")
    head = tensors.get("output.weight", tensors["token_embd.weight"])
    probabilities = _softmax(norm(x, "output_norm.weight") @ head.T)
    return np.log(probabilities[np.arange(count - 1), ids[1:]])


def _softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _frequencies(meta: dict[str, Any], size: int, divisors: np.ndarray | None) -> tuple[np.ndarray, float]:
    base = meta["rope.freq_base"]
    plain = base ** -(np.arange(0, size, 2) / size)
    kind, factor = meta.get("rope.scaling.type"), meta.get("rope.scaling.factor")
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "yarn":
        context = meta["rope.scaling.original_context_length"]
        pair = [size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (32, 1)]
        low, high = max(math.floor(pair[0]), 0), min(math.ceil(pair[1]), size - 1)
        keep = 1 - np.clip((np.arange(size // 2) - low) / max(high - low, 1e-3), 0, 1)
        return plain * keep + plain / factor * (1 - keep), 0.1 * math.log(factor) + 1
    return (plain if divisors is None else plain / divisors), 1.0


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    from gguf import GGUFReader, dequantize

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = GGUFReader(path)
        meta = {
            key.removeprefix("llama."): entry.contents()
            for key, entry in reader.fields.items()
            if key.startswith("llama.")
        }
        tensors = {
            tensor.name: dequantize(tensor.data, tensor.tensor_type).astype(np.float64).reshape(tensor.shape[::-1])
            for tensor in reader.tensors
        }
    return meta, tensors
