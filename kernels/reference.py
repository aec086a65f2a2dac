"""The executable specification: every op the obvious way, summed in float64 and rounded once to float32.

Owns: what the right result is. Must not know: speed (a few tokens a second of a small model suffice).
Invariant: those of `kernels.ops`, exactly. What sums or calls a transcendental function does so row by row, or in
tiles of one fixed shape; pages hold float32, so nothing is lost between a write and a read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.checks import check_linear, check_paged_rows, check_pages, check_queries
from kernels.ops import AttentionPlan, AttentionShape, Ops, PackedMatrix, PagedRows, StoredMatrix
from kernels.raw import CHUNK_BYTES, RawMatrix, in_tiles, pack_raw

TILE = 16  # rows of one matrix product


@dataclass(frozen=True, slots=True)
class _Plan:
    rows: PagedRows


class ReferenceOps(Ops):
    name = "reference"
    deterministic = True
    kv_dtype = torch.float32
    kv_format = "fp32"

    def instruction_set(self) -> str:
        return torch.backends.cpu.get_cpu_capability()

    def pack(self, parts: Sequence[StoredMatrix], *, lookup: bool) -> RawMatrix:
        return pack_raw(parts)

    def workspace_bytes(self, shape: AttentionShape, max_rows: int, max_sequences: int, max_model_len: int) -> int:
        # Decoded weights in float32 with their intermediates, and in float64; keys and values of one sequence in
        # float64 are bounded by the pages themselves, twice.
        return 6 * CHUNK_BYTES

    def linear(self, x: Tensor, weight: PackedMatrix, bias: Tensor | None = None) -> Tensor:
        matrix = _raw(weight)
        check_linear(x, matrix, bias)
        tiles = list(in_tiles(x, TILE, torch.float64))
        out = torch.empty(x.shape[0], matrix.rows, dtype=torch.float32)
        row = 0
        for chunk in matrix.chunks():
            columns = slice(row, row + chunk.shape[0])
            transposed = chunk.to(torch.float64).t()
            for rows, tile in tiles:
                sums = tile @ transposed
                if bias is not None:
                    sums += bias[columns].to(torch.float64)
                out[rows, columns] = sums[: rows.stop - rows.start].to(torch.float32)
            row = columns.stop
        return out

    def embedding(self, token_ids: Tensor, weight: PackedMatrix) -> Tensor:
        return _raw(weight).lookup(token_ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        gain = weight.to(torch.float64)
        return _by_row(lambda row: row * (row.square().mean() + eps).rsqrt() * gain, x.to(torch.float64))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        def row(values: Tensor) -> Tensor:
            gate, up = values.chunk(2)
            return gate / (1 + torch.exp(-gate)) * up

        return _by_row(row, gate_up.to(torch.float64))

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.to(torch.float64).chunk(2, dim=-1)
        cos, sin = cos.to(torch.float64).unsqueeze(1), sin.to(torch.float64).unsqueeze(1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(torch.float32)

    def cache_write(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor) -> None:
        check_pages(k, v, k_pages, v_pages, slot_mapping)
        k_pages.view(-1, *k_pages.shape[2:])[slot_mapping] = k.to(k_pages.dtype)
        v_pages.view(-1, *v_pages.shape[2:])[slot_mapping] = v.to(v_pages.dtype)

    def plan_attention(self, rows: PagedRows, shape: AttentionShape) -> AttentionPlan:
        check_paged_rows(rows, shape)
        return _Plan(rows)

    def paged_attention(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: AttentionPlan, shape: AttentionShape, scale: float
    ) -> Tensor:
        check_queries(q, k_pages, v_pages, plan.rows, shape)
        out = torch.empty(q.shape, dtype=torch.float32)
        starts = plan.rows.query_start.tolist()
        for sequence, length in enumerate(plan.rows.seq_lens.tolist()):
            first, last = starts[sequence], starts[sequence + 1]
            used = plan.rows.block_tables[sequence, : -(-length // shape.block_size)].to(torch.int64)
            keys = k_pages[used].to(torch.float64).flatten(0, 1)  # [tokens, G, D]
            values = v_pages[used].to(torch.float64).flatten(0, 1)
            for row in range(first, last):
                visible = length - (last - 1 - row)
                out[row] = _attend(q[row].to(torch.float64), keys[:visible], values[:visible], scale)
        return out


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One row. q [H, D], keys and values [n, G, D] -> float32 [H, D]."""
    grouped = q.view(keys.shape[1], -1, q.shape[1])  # [G, H / G, D]
    scores = torch.bmm(grouped, keys.permute(1, 2, 0)) * scale
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    sums = torch.bmm(weights, values.transpose(0, 1)) / weights.sum(dim=-1, keepdim=True)
    return sums.reshape(q.shape).to(torch.float32)


def _by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if x.shape[0] == 0:
        return function(torch.zeros(x.shape[1], dtype=x.dtype)).unsqueeze(0)[:0].to(torch.float32)
    return torch.stack([function(row) for row in x.unbind()]).to(torch.float32)


def _raw(weight: PackedMatrix) -> RawMatrix:
    if not isinstance(weight, RawMatrix):
        raise ValueError(f"a {type(weight).__name__} was packed for another back end")
    return weight
