"""The contract of every op: what a back end must provide, and what a model may call.

Owns: shapes, dtypes, layout, aliasing and errors of the ops, and the default body of each composite. Must not know:
models, requests, file formats.
Invariants, of every back end that calls itself deterministic: a row of a result depends on that row's inputs alone,
not on the other rows nor on how many there are; a row computed as one of many equals the same row computed alone,
bit for bit; attention reads keys and values from the pages, after the write.

Letters in shapes: T rows (tokens of a step, those of one sequence adjacent and in order), S sequences, H query heads,
G key/value heads, D head size, I inner size of the MLP, V vocabulary, B blocks of the pool, P tokens a block.
Activations are float32 [T, ...], contiguous in the last axis. Ops return new tensors and write to no input, except
`cache_write`. A wrong shape or dtype raises ValueError naming it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels import sampling
from kernels.memory import large_pages
from kernels.sampling import Drawn, Greedy, SampledSequence


class Groups(Protocol):
    """Integer rows with a scale, and in affine formats a minimum, per group: w = scale * q + minimum."""

    @property
    def q(self) -> Tensor: ...  # [rows, cols] uint8 or int8
    @property
    def scale(self) -> Tensor: ...  # float32 [rows, groups]
    @property
    def minimum(self) -> Tensor | None: ...  # float32 [rows, groups]


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A weight matrix [rows, cols] as its file stores it, with the two ways to read it."""

    name: str
    blocks: Tensor  # uint8 [rows, row_bytes]
    cols: int
    bits: int  # of the stored integers; 0: the format holds floats
    dequantize: Callable[[Tensor], Tensor]  # uint8 [n, row_bytes] -> float32 [n, cols], exact
    unpack: Callable[[Tensor], Groups] | None  # uint8 [n, row_bytes]; None: the format holds floats

    @property
    def rows(self) -> int:
        return self.blocks.shape[0]


class PackedMatrix(Protocol):
    """A weight matrix in the form that one back end multiplies with. Only that back end may look inside."""

    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def nbytes(self) -> int: ...  # resident, all parts


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What does not change between steps."""

    heads: int
    kv_heads: int  # divides heads: query head h reads key/value head h // (heads // kv_heads)
    head_dim: int
    block_size: int

    def __post_init__(self) -> None:
        for field in ("heads", "kv_heads", "head_dim", "block_size"):
            require(getattr(self, field) >= 1, f"{field} must be at least 1, got {getattr(self, field)}")
        require(
            self.heads % self.kv_heads == 0,
            f"{self.heads} heads are no multiple of {self.kv_heads} key/value heads",
        )
        require(self.head_dim % 2 == 0, f"head_dim must be even, got {self.head_dim}")


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Which rows belong to which sequence, and where its keys and values lie. All on the CPU.

    query_start  int32 [S + 1]  rows of sequence i are [query_start[i], query_start[i + 1])
    seq_lens     int32 [S]      tokens in the cache once this step's are written; 0 for a sequence without rows.
                                The rows of sequence i are its last ones: the first has position
                                seq_lens[i] - (query_start[i + 1] - query_start[i])
    block_tables int32 [S, W]   entries from ceil(seq_len / P) on are never used, whatever they hold
    """

    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DecodeWork:
    """A step of one row for each sequence, whose contents may change after it was planned, but not its sizes.

    rows: query_start on the CPU; lengths and tables where the ops compute. items int32 [n, 8], merges int32 [m, 4]:
    work as `kernels.gpu.device.attention` reads it; parts: how many states of split keys there are.
    """

    rows: PagedRows
    items: Tensor
    merges: Tensor
    parts: int


class AttentionPlan(Protocol):
    """What a back end derives from PagedRows once a step, for all layers. Only that back end may look inside."""

    @property
    def rows(self) -> PagedRows: ...


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """Weights of a layer of N features: attention, then a gated MLP, each normed first and added to what went in."""

    attention_norm: Tensor  # float32 [N]
    qkv: PackedMatrix  # [(H + 2 G) D, N]: the rows of the queries, the keys, the values
    qkv_bias: Tensor | None  # float32 [(H + 2 G) D]
    output: PackedMatrix  # [N, H D]
    output_bias: Tensor | None  # float32 [N]
    mlp_norm: Tensor  # float32 [N]
    gate_up: PackedMatrix  # [2 I, N]: the rows of the gate, then the up's
    down: PackedMatrix  # [N, I]


class PackedDecoder(Protocol):
    """Layers in the form that one back end runs them in."""

    @property
    def layers(self) -> Sequence[DecoderLayer]: ...
    @property
    def eps(self) -> float: ...  # of all norms


@dataclass(frozen=True, slots=True, eq=False)
class PlainDecoder:
    """The form of a back end that has no better one."""

    layers: tuple[DecoderLayer, ...]
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class DecoderStep:
    """What all layers of a step share."""

    cos: Tensor  # float32 [T, D/2]
    sin: Tensor  # float32 [T, D/2]
    slot_mapping: Tensor  # int64 [T]
    plan: AttentionPlan
    shape: AttentionShape
    scale: float  # of attention's scores


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


class Ops(Protocol):
    """One back end. Primitives have no body; composites have a default made of primitives, to be fused where it pays.

    name: of the back end. deterministic: whether the module's invariants hold. kv_dtype, kv_format: of the pages, and
    what people call it.
    """

    name: str
    deterministic: bool
    kv_dtype: torch.dtype
    kv_format: str

    # -- once ---------------------------------------------------------------------------------------------------------

    def instruction_set(self) -> str:
        """What the results' last bits may depend on: equal names, equal bits."""
        ...

    def pack(self, parts: Sequence[StoredMatrix], *, lookup: bool) -> PackedMatrix:
        """One matrix of the parts' rows, in order. The parts' blocks may be kept: nobody writes to them later.

        lookup: rows will also be read one by one, by `embedding`. Raises ValueError for no parts, different widths.
        """
        ...

    def workspace_bytes(self, shape: AttentionShape, max_rows: int, max_sequences: int, max_model_len: int) -> int:
        """Upper bound of what the ops allocate beyond their results in a step of so many rows and sequences, none of
        them longer than max_model_len; bytes. Never falls as a size grows."""
        ...

    def resident(self, tensor: Tensor) -> Tensor:
        """Where the ops compute: what every step reads of a model besides its weights."""
        return tensor

    def page(self, shape: AttentionShape) -> tuple[int, int, int]:
        """Of a block's keys or values, in numbers of kv_dtype: tokens, heads, and a head's with what lies behind them.
        Raises ValueError for sizes that the pages' format cannot have."""
        return shape.block_size, shape.kv_heads, shape.head_dim

    def page_memory(self, size: int) -> Tensor:
        """uint8 [size], contents whatever, where the pages of the cache are to lie."""
        return large_pages(size)

    def size_classes(self) -> tuple[int, ...]:
        """Numbers of rows, one of each kind that the ops launch differently: those that serving should have run once
        before it is ready. None where that makes no difference."""
        return ()

    def prepared(self) -> None:
        """Everything that serving needs has run: what has to be compiled from here on comes late."""
        return

    def late(self) -> int:
        """How many kernels were compiled since `prepared`."""
        return 0

    def free_memory(self) -> int | None:
        """Bytes that could still be allocated where weights and pages lie; None where nobody can say."""
        return None

    def pack_decoder(self, layers: Sequence[DecoderLayer], eps: float) -> PackedDecoder:
        """For `decoder`. The layers' tensors are kept."""
        return PlainDecoder(tuple(layers), eps)

    # -- primitives ---------------------------------------------------------------------------------------------------

    def linear(self, x: Tensor, weight: PackedMatrix, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias. x [T, cols], bias float32 [rows] -> [T, rows]."""
        ...

    def embedding(self, token_ids: Tensor, weight: PackedMatrix) -> Tensor:
        """Rows of a matrix packed with lookup, exact. token_ids int64 [T], T >= 1, each below rows -> [T, cols]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight along the last axis (arXiv:1910.07467). x [T, N], weight float32 [N]."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up (arXiv:2002.05202), gate and up being the halves of the last axis. [T, 2 I] -> [T, I]."""
        ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates the pairs (i, i + D/2) of each head by the row's angle i (arXiv:2104.09864).

        x [T, heads, D], cos and sin float32 [T, D/2] -> like x, contiguous.
        """
        ...

    def cache_write(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor) -> None:
        """Writes row t to page slot_mapping[t] // P, place slot_mapping[t] % P. The only op that writes to an input.

        k, v [T, G, D] any strides; k_pages, v_pages kv_dtype [B, P, G, D] contiguous; slot_mapping int64 [T], distinct.
        """
        ...

    def plan_attention(self, rows: PagedRows, shape: AttentionShape) -> AttentionPlan:
        """Called once a step. Raises ValueError where sequence lengths, rows and tables do not fit together."""
        ...

    def plan_decode(self, work: DecodeWork, shape: AttentionShape) -> AttentionPlan:
        """As `plan_attention`. A back end whose steps are recorded reads contents when they run, not now."""
        return self.plan_attention(work.rows, shape)

    def paged_attention(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: AttentionPlan, shape: AttentionShape, scale: float
    ) -> Tensor:
        """softmax(q K^T * scale) V over each row's own sequence, up to and with the row's own position.

        q [T, H, D] -> [T, H, D]. Whatever lies in unused pages or behind a sequence's end, NaN included, has no effect.
        """
        ...

    # -- composites ---------------------------------------------------------------------------------------------------

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: PackedMatrix, bias: Tensor | None = None
    ) -> Tensor:
        """linear(rms_norm(x))."""
        return self.linear(self.rms_norm(x, norm, eps), weight, bias)

    def rope_and_cache(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        slot_mapping: Tensor,
        shape: AttentionShape,
    ) -> Tensor:
        """Splits qkv [T, (H + 2 G) D] into heads, rotates queries and keys, writes keys and values to the pages.

        Returns the queries [T, H, D].
        """
        heads = qkv.view(qkv.shape[0], shape.heads + 2 * shape.kv_heads, shape.head_dim)
        rotated = self.rope(heads[:, : shape.heads + shape.kv_heads], cos, sin)
        values = heads[:, shape.heads + shape.kv_heads :]
        self.cache_write(rotated[:, shape.heads :], values, k_pages, v_pages, slot_mapping)
        return rotated[:, : shape.heads]

    def linear_residual(self, x: Tensor, weight: PackedMatrix, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        """residual + linear(x)."""
        return residual + self.linear(x, weight, bias)

    def gated_mlp(self, x: Tensor, norm: Tensor, eps: float, gate_up: PackedMatrix, down: PackedMatrix) -> Tensor:
        """x + down(silu(gate) * up), gate and up of the normed x; gate_up holds the gate's rows, then the up's."""
        return self.linear_residual(self.silu_mul(self.norm_linear(x, norm, eps, gate_up)), down, x)

    def decoder_layer(
        self, x: Tensor, layer: DecoderLayer, eps: float, k_pages: Tensor, v_pages: Tensor, step: DecoderStep
    ) -> Tensor:
        """One layer: x [T, N] -> [T, N]. Writes the step's keys and values to the pages."""
        shape = step.shape
        qkv = self.norm_linear(x, layer.attention_norm, eps, layer.qkv, layer.qkv_bias)
        q = self.rope_and_cache(qkv, step.cos, step.sin, k_pages, v_pages, step.slot_mapping, shape)
        attended = self.paged_attention(q, k_pages, v_pages, step.plan, shape, step.scale)
        x = self.linear_residual(attended.flatten(1), layer.output, x, layer.output_bias)
        return self.gated_mlp(x, layer.mlp_norm, eps, layer.gate_up, layer.down)

    def decoder(
        self,
        x: Tensor,
        decoder: PackedDecoder,
        k_pages: Sequence[Tensor],
        v_pages: Sequence[Tensor],
        step: DecoderStep,
    ) -> Tensor:
        """All layers, one after the other; k_pages and v_pages of each. x [T, N] -> [T, N]."""
        for layer, keys, values in zip(decoder.layers, k_pages, v_pages, strict=True):
            x = self.decoder_layer(x, layer, decoder.eps, keys, values, step)
        return x

    def head_logits(self, x: Tensor, norm: Tensor, eps: float, head: PackedMatrix) -> Tensor:
        """Logits [rows, V] of the few rows that sample; x [rows, N]."""
        return self.norm_linear(x, norm, eps, head)

    def head_greedy(self, x: Tensor, norm: Tensor, eps: float, head: PackedMatrix) -> Greedy:
        """The likeliest token of each row; x [rows, N], rows >= 1. Equal to what `head_logits` would give."""
        return sampling.greedy(self.head_logits(x, norm, eps, head))

    def sample(self, logits: Tensor, sequences: Sequence[SampledSequence]) -> list[Drawn]:
        """Draws a token from each row of logits [rows, V]. The same bits from every back end (`kernels.sampling`)."""
        return sampling.sample(logits, sequences)
