"""The CPU back end in vectorised torch, for where there is no compiler.

Owns: the choice of a kernel for each matrix. Must not know: models, requests, file formats.
Activations enter a 4-bit product as bfloat16 and leave it as bfloat16; between products they are float32. Pages are
bfloat16: values come out of such a product, so they lose nothing. Matrices of other formats stay as stored and are
decoded in pieces at each use, which is exact and slow.
What that costs on SmolLM2-135M Q4_1: perplexity 19.127 against 19.167 of float32 (wikitext2, 120,000 bytes), and of 29
greedy answers of 32 tokens 17 equal float32's, the others first differ where its two largest logits are within 0.19
(float32 pages: 16 of 29, so it is the products that round).
The determinism invariants hold as far as torch's own kernels do what was measured of them: see `attention` (products
with a multiple of 4 rows) and `linear` (4-bit products treat each row alike; float products are tiled).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.checks import check_linear, check_paged_rows, check_pages, check_queries
from kernels.ops import AttentionPlan, AttentionShape, Ops, PackedMatrix, PagedRows, StoredMatrix
from kernels.raw import CHUNK_BYTES, RawMatrix, check_parts, in_tiles
from kernels.vectorised import attention
from kernels.vectorised.int4 import Int4Matrix, fits_int4, int4_linear, int4_rows, pack_int4

TILE = 16  # rows of one float product


@dataclass(frozen=True, slots=True)
class StackedMatrix:
    """Parts of different formats, one above the other."""

    parts: tuple[Int4Matrix | RawMatrix, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def cols(self) -> int:
        return self.parts[0].cols

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class VectorisedOps(Ops):
    name = "cpu-torch"
    deterministic = True
    kv_dtype = torch.bfloat16
    kv_format = "bf16"

    def instruction_set(self) -> str:
        return torch.backends.cpu.get_cpu_capability()

    def pack(self, parts: Sequence[StoredMatrix], *, lookup: bool) -> PackedMatrix:
        check_parts(parts)
        if fits_int4(parts):
            return pack_int4(parts, lookup=lookup)
        packed = tuple(pack_int4([part], lookup=lookup) if fits_int4([part]) else RawMatrix((part,)) for part in parts)
        return packed[0] if len(packed) == 1 else StackedMatrix(packed)

    def workspace_bytes(self, shape: AttentionShape, max_rows: int, max_sequences: int, max_model_len: int) -> int:
        return attention.workspace_bytes(shape, max_rows, max_sequences) + 6 * CHUNK_BYTES

    def linear(self, x: Tensor, weight: PackedMatrix, bias: Tensor | None = None) -> Tensor:
        check_linear(x, weight, bias)
        parts = weight.parts if isinstance(weight, StackedMatrix) else (weight,)
        products = [_linear(x, part) for part in parts]
        product = products[0] if len(products) == 1 else torch.cat(products, dim=1)
        return product if bias is None else product + bias

    def embedding(self, token_ids: Tensor, weight: PackedMatrix) -> Tensor:
        if isinstance(weight, Int4Matrix):
            return int4_rows(token_ids, weight)
        if isinstance(weight, RawMatrix):
            return weight.lookup(token_ids)
        raise ValueError(f"rows of a {type(weight).__name__} are not looked up")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt_() * weight

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate).mul_(up)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        first, second = x[..., :half], x[..., half:]
        out = torch.empty(x.shape)
        torch.sub(first * cos, second * sin, out=out[..., :half])
        torch.add(second * cos, first * sin, out=out[..., half:])
        return out

    def cache_write(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor) -> None:
        check_pages(k, v, k_pages, v_pages, slot_mapping)
        k_pages.view(-1, *k_pages.shape[2:]).index_copy_(0, slot_mapping, k.to(k_pages.dtype))
        v_pages.view(-1, *v_pages.shape[2:]).index_copy_(0, slot_mapping, v.to(v_pages.dtype))

    def plan_attention(self, rows: PagedRows, shape: AttentionShape) -> AttentionPlan:
        check_paged_rows(rows, shape)
        return attention.plan(rows, shape)

    def paged_attention(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: AttentionPlan, shape: AttentionShape, scale: float
    ) -> Tensor:
        if not isinstance(plan, attention.GatherPlan):
            raise ValueError(f"a {type(plan).__name__} was made by another back end")
        check_queries(q, k_pages, v_pages, plan.rows, shape)
        return attention.attend(q, k_pages, v_pages, plan, shape, scale)


def _linear(x: Tensor, weight: PackedMatrix) -> Tensor:
    if isinstance(weight, Int4Matrix):
        return int4_linear(x, weight)
    if not isinstance(weight, RawMatrix):
        raise ValueError(f"a {type(weight).__name__} was packed for another back end")
    out = torch.empty(x.shape[0], weight.rows)
    tiles = list(in_tiles(x, TILE, torch.float32))
    row = 0
    for chunk in weight.chunks():
        for rows, tile in tiles:
            out[rows, row : row + chunk.shape[0]] = (tile @ chunk.t())[: rows.stop - rows.start]
        row += chunk.shape[0]
    return out
