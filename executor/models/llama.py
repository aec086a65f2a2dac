"""The Llama architecture: what Llama 1 to 3, Mistral, SmolLM and their kin are in GGUF files of that name.

Owns: its configuration, the names of its tensors, and the forward pass. Must not know: steps, slots, back ends.
Invariant: `forward` is composites of `kernels.ops` alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.batch import Batch
from executor.cache import KvPool
from executor.loading.gguf import MetadataValue, find, require
from executor.models.model import ModelError
from executor.models.rope import Rope, RopeTables, Yarn, rope_tables
from executor.quant.native import NativeScheme, Part, unpermuted
from executor.sizing.plan import activation_bytes
from executor.sizing.shapes import ModelShape
from kernels.ops import AttentionPlan, AttentionShape, DecoderLayer, DecoderStep, Ops, PackedMatrix
from kernels.sampling import Greedy

PREFIX = "llama"
# Each would change the results, and is not implemented.
_REFUSED_KEYS = (
    "attention.scale",
    "attention.sliding_window",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "expert_count",
    "embedding_scale",
    "logit_scale",
    "residual_scale",
    "rope.scaling.yarn_log_multiplier",
)


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    context_length: int
    rope: Rope

    def activation_bytes(self, vocab_size: int, max_batched_tokens: int, max_sequences: int) -> int:
        return activation_bytes(self.shape(vocab_size), max_batched_tokens, max_sequences)

    def shape(self, vocab_size: int) -> ModelShape:
        """For `executor.sizing`."""
        return ModelShape(
            name=PREFIX,
            layers=self.layers,
            hidden=self.hidden,
            inner=self.inner,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab=vocab_size,
            context=self.context_length,
        )

    def load(self, scheme: NativeScheme, ops: Ops, *, vocab_size: int, max_model_len: int) -> "Llama":
        tied = not scheme.has("output.weight")
        embedding = scheme.matrix([Part("token_embd.weight", vocab_size)], self.hidden, lookup=True)
        head = embedding if tied else scheme.matrix([Part("output.weight", vocab_size)], self.hidden)
        layers = tuple(_load_layer(self, scheme, index) for index in range(self.layers))
        norm = scheme.vector("output_norm.weight", self.hidden)
        pairs = self.head_dim // 2
        divisors = scheme.vector("rope_freqs.weight", pairs) if scheme.has("rope_freqs.weight") else None
        scheme.finish()
        tables = rope_tables(self.rope, max_model_len, divisors)
        return Llama(self, ops, embedding, layers, norm, head, tables)


def read_config(metadata: Mapping[str, MetadataValue]) -> LlamaConfig:
    """Raises GgufError for a missing key or a value of another type, ModelError for one that cannot be served."""
    for name in _REFUSED_KEYS:
        if metadata.get(f"{PREFIX}.{name}"):
            raise ModelError(f"{PREFIX}.{name} is {metadata[f'{PREFIX}.{name}']}, which is not supported")
    hidden = _positive(metadata, "embedding_length")
    heads = _positive(metadata, "attention.head_count")
    kv_heads = _positive(metadata, "attention.head_count_kv", heads)
    if heads % kv_heads:
        raise ModelError(f"{PREFIX}.attention.head_count {heads} is no multiple of head_count_kv {kv_heads}")
    if f"{PREFIX}.attention.key_length" not in metadata and hidden % heads:
        raise ModelError(f"{PREFIX}.embedding_length {hidden} is no multiple of attention.head_count {heads}")
    head_dim = _positive(metadata, "attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if _positive(metadata, name, head_dim) != head_dim:
            raise ModelError(
                f"{PREFIX}.{name} is {metadata[f'{PREFIX}.{name}']}; only the head size {head_dim} is served"
            )
    if head_dim % 2:
        raise ModelError(f"head size {head_dim} is odd: it has no pairs to rotate")
    eps = require(metadata, f"{PREFIX}.attention.layer_norm_rms_epsilon", float)
    if not 0 <= eps < 1:
        raise ModelError(f"{PREFIX}.attention.layer_norm_rms_epsilon is {eps}")
    context_length = _positive(metadata, "context_length")
    return LlamaConfig(
        layers=_positive(metadata, "block_count"),
        hidden=hidden,
        inner=_positive(metadata, "feed_forward_length"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=eps,
        context_length=context_length,
        rope=_read_rope(metadata, head_dim, context_length),
    )


class Llama:
    """Weights and forward pass. Made by `LlamaConfig.load`."""

    def __init__(
        self,
        config: LlamaConfig,
        ops: Ops,
        embedding: PackedMatrix,
        layers: tuple[DecoderLayer, ...],
        norm: Tensor,
        head: PackedMatrix,
        tables: RopeTables,
    ) -> None:
        self.config = config
        self.vocab_size = head.rows
        self.weight_bytes = _weight_bytes(embedding, layers, norm, head)
        self._ops = ops
        self._embedding = embedding
        self._decoder = ops.pack_decoder(layers, config.eps)
        self._norm = norm
        self._head = head
        self._cos, self._sin = ops.resident(tables.cos), ops.resident(tables.sin)

    def forward(self, batch: Batch, pool: KvPool) -> Tensor:
        plan = self._ops.plan_attention(batch.rows, self._shape(pool))
        return self.compute(batch.token_ids, batch.positions, batch.slot_mapping, plan, pool)

    def compute(
        self, token_ids: Tensor, positions: Tensor, slot_mapping: Tensor, plan: AttentionPlan, pool: KvPool
    ) -> Tensor:
        step = DecoderStep(
            cos=self._cos[positions],
            sin=self._sin[positions],
            slot_mapping=slot_mapping,
            plan=plan,
            shape=self._shape(pool),
            scale=self.config.head_dim**-0.5,
        )
        x = self._ops.embedding(token_ids, self._embedding)
        return self._ops.decoder(x, self._decoder, pool.keys, pool.values, step)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._ops.head_logits(hidden, self._norm, self.config.eps, self._head)

    def greedy(self, hidden: Tensor) -> Greedy:
        return self._ops.head_greedy(hidden, self._norm, self.config.eps, self._head)

    def _shape(self, pool: KvPool) -> AttentionShape:
        config = self.config
        return AttentionShape(config.heads, config.kv_heads, config.head_dim, pool.keys[0].shape[1])


def _load_layer(config: LlamaConfig, scheme: NativeScheme, index: int) -> DecoderLayer:
    def name(tensor: str) -> str:
        return f"blk.{index}.{tensor}"

    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    parts = (
        Part(name("attn_q.weight"), q_rows, unpermuted(config.heads, config.head_dim)),
        Part(name("attn_k.weight"), kv_rows, unpermuted(config.kv_heads, config.head_dim)),
        Part(name("attn_v.weight"), kv_rows),
    )
    output_bias = name("attn_output.bias")
    return DecoderLayer(
        attention_norm=scheme.vector(name("attn_norm.weight"), config.hidden),
        qkv=scheme.matrix(parts, config.hidden),
        qkv_bias=_load_qkv_bias(scheme, parts),
        output=scheme.matrix([Part(name("attn_output.weight"), config.hidden)], q_rows),
        output_bias=scheme.vector(output_bias, config.hidden) if scheme.has(output_bias) else None,
        mlp_norm=scheme.vector(name("ffn_norm.weight"), config.hidden),
        gate_up=scheme.matrix(
            [Part(name("ffn_gate.weight"), config.inner), Part(name("ffn_up.weight"), config.inner)], config.hidden
        ),
        down=scheme.matrix([Part(name("ffn_down.weight"), config.hidden)], config.inner),
    )


def _load_qkv_bias(scheme: NativeScheme, parts: tuple[Part, ...]) -> Tensor | None:
    """All three or none: a missing one of them is named when it is read."""
    names = [part.name.removesuffix("weight") + "bias" for part in parts]
    if not any(scheme.has(name) for name in names):
        return None
    return torch.cat([scheme.vector(name, part.rows, part.order) for name, part in zip(names, parts, strict=True)])


def _weight_bytes(embedding: PackedMatrix, layers: tuple[DecoderLayer, ...], norm: Tensor, head: PackedMatrix) -> int:
    matrices = {id(embedding): embedding.nbytes, id(head): head.nbytes}  # once, where they are tied
    vectors = norm.nbytes
    for layer in layers:
        matrices |= {id(m): m.nbytes for m in (layer.qkv, layer.output, layer.gate_up, layer.down)}
        parameters = (layer.attention_norm, layer.mlp_norm, layer.qkv_bias, layer.output_bias)
        vectors += sum(vector.nbytes for vector in parameters if vector is not None)
    return sum(matrices.values()) + vectors


def _positive(metadata: Mapping[str, MetadataValue], name: str, default: int | None = None) -> int:
    key = f"{PREFIX}.{name}"
    value = default if default is not None and key not in metadata else require(metadata, key, int)
    if value < 1:
        raise ModelError(f"{key} must be at least 1, got {value}")
    return value


def _read_rope(metadata: Mapping[str, MetadataValue], head_dim: int, context_length: int) -> Rope:
    base = find(metadata, f"{PREFIX}.rope.freq_base", float) or 10000.0
    if not 1 < base < float("inf"):
        raise ModelError(f"{PREFIX}.rope.freq_base is {base}")
    kind = find(metadata, f"{PREFIX}.rope.scaling.type", str) or "none"
    factor = find(metadata, f"{PREFIX}.rope.scaling.factor", float) or 1.0
    old_factor = find(metadata, f"{PREFIX}.rope.scale_linear", float)  # of files from before rope.scaling
    if kind == "none" and old_factor:
        kind, factor = "linear", old_factor
    if not 0 < factor < float("inf"):
        raise ModelError(f"{PREFIX}.rope.scaling.factor is {factor}")
    if kind == "none":
        return Rope(head_dim, base)
    if kind == "linear":
        return Rope(head_dim, base, linear_factor=factor)
    if kind == "yarn":
        original = _positive(metadata, "rope.scaling.original_context_length", context_length)
        yarn = Yarn(
            factor=factor,
            original_context=original,
            beta_fast=find(metadata, f"{PREFIX}.rope.scaling.yarn_beta_fast", float) or 32.0,
            beta_slow=find(metadata, f"{PREFIX}.rope.scaling.yarn_beta_slow", float) or 1.0,
            attention_factor=find(metadata, f"{PREFIX}.rope.scaling.attn_factor", float) or 1.0,
        )
        return Rope(head_dim, base, yarn=yarn)
    raise ModelError(f"{PREFIX}.rope.scaling.type {kind!r} is not supported; none, linear and yarn are")
