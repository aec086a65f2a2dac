"""The shape of a model from its files: a GGUF, or a directory with config.json. Without torch.

Owns: which fields mean what, and the refusal of what is no dense decoder. Must not know: catalogues, devices.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from executor.loading.gguf import GgufFile, find, open_gguf, require
from executor.sizing.devices import PlanError
from executor.sizing.formats import FileWeights
from executor.sizing.shapes import ModelShape

_QKV_BIAS: Final = {
    "llama": False,
    "mistral": False,
    "qwen2": True,
    "qwen3": False,
}  # by model_type; also which there are
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class SizedModel:
    """weights: None where there is no file that has them."""

    shape: ModelShape
    weights: FileWeights | None = None


def read_shape(path: Path) -> SizedModel:
    """Raises PlanError or GgufError naming what is wrong, OSError."""
    if path.is_dir():
        return SizedModel(_from_config(path / "config.json"))
    with open_gguf(path) as file:
        shape = _from_gguf(file, path.stem)
        sizes = {name: len(file.raw(name)) for name in file.tensors}
    return SizedModel(shape, FileWeights(sum(sizes.values()), 0 if shape.tied else sizes["token_embd.weight"]))


def _from_config(path: Path) -> ModelShape:
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise PlanError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise PlanError(f"{path} holds no object")
    kind = config.get("model_type")
    if kind not in _QKV_BIAS:
        raise PlanError(f"{path}: model_type is {kind!r}; {', '.join(_QKV_BIAS)} can be planned")
    for name in _EXPERTS:
        if config.get(name):
            raise PlanError(f"{path}: {name} is {config[name]}; models of experts cannot be planned")
    hidden, heads = _whole(path, config, "hidden_size"), _whole(path, config, "num_attention_heads")
    return ModelShape(
        name=path.parent.resolve().name,
        layers=_whole(path, config, "num_hidden_layers"),
        hidden=hidden,
        inner=_whole(path, config, "intermediate_size"),
        heads=heads,
        kv_heads=_whole(path, config, "num_key_value_heads", heads),
        head_dim=_whole(path, config, "head_dim", hidden // heads),
        vocab=_whole(path, config, "vocab_size"),
        context=_whole(path, config, "max_position_embeddings"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bool(config.get("attention_bias", _QKV_BIAS[kind])),
        qk_norm=kind == "qwen3",
    )


def _whole(path: Path, config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        raise PlanError(f"{path}: {name} must be a whole number above 0, got {value!r}")
    return value


def _from_gguf(file: GgufFile, name: str) -> ModelShape:
    metadata = file.metadata
    prefix = require(metadata, "general.architecture", str)
    if find(metadata, f"{prefix}.expert_count", int):
        raise PlanError(f"{name}: {prefix}.expert_count is set; models of experts cannot be planned")
    hidden = require(metadata, f"{prefix}.embedding_length", int)
    heads = require(metadata, f"{prefix}.attention.head_count", int)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or heads < 1:
        raise PlanError(f"{name}: no tensor 'token_embd.weight', or attention.head_count {heads} is below 1")
    return ModelShape(
        name=name,
        layers=require(metadata, f"{prefix}.block_count", int),
        hidden=hidden,
        inner=require(metadata, f"{prefix}.feed_forward_length", int),
        heads=heads,
        kv_heads=find(metadata, f"{prefix}.attention.head_count_kv", int) or heads,
        head_dim=find(metadata, f"{prefix}.attention.key_length", int) or hidden // heads,
        vocab=embedding.shape[0],
        context=require(metadata, f"{prefix}.context_length", int),
        tied="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
    )
