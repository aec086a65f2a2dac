"""Ragged attention cases over a poisoned pool, and what the answer must be."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops import AttentionShape, Ops, PagedRows


@dataclass(frozen=True, slots=True)
class PagedCase:
    """Sequences with their whole keys and values; `rows` of each are its last ones."""

    shape: AttentionShape
    q: Tensor  # [T, H, D]
    keys: list[Tensor]  # of each sequence [length, G, D]
    values: list[Tensor]
    rows: PagedRows
    blocks: int


def paged_case(shape: AttentionShape, sequences: Sequence[tuple[int, int]], seed: int = 0) -> PagedCase:
    """sequences: (length, rows). Block table tails hold ids that no pool has; keys and values fit into bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    used = [-(-length // shape.block_size) for length, _ in sequences]
    blocks = sum(used) + 3
    order = torch.randperm(blocks, generator=generator)
    tables = torch.full((len(sequences), max([*used, 1]) + 2), -7, dtype=torch.int32)
    tables[:, -1] = 2**31 - 1
    taken = 0
    for table, count in zip(tables, used, strict=True):
        table[:count] = order[taken : taken + count]
        taken += count
    starts = torch.tensor([0, *(count for _, count in sequences)]).cumsum(0).to(torch.int32)
    lengths = torch.tensor([length for length, _ in sequences], dtype=torch.int32)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    def stored(length: int) -> Tensor:
        return normal(length, *heads).to(torch.bfloat16).float()

    heads = (shape.kv_heads, shape.head_dim)
    return PagedCase(
        shape=shape,
        q=normal(int(starts[-1]), shape.heads, shape.head_dim),
        keys=[stored(length) for length, _ in sequences],
        values=[stored(length) for length, _ in sequences],
        rows=PagedRows(starts, lengths, tables),
        blocks=blocks,
    )


def run_case(ops: Ops, case: PagedCase, poison: float = math.nan) -> Tensor:
    shape = case.shape
    pages = (case.blocks, shape.block_size, shape.kv_heads, shape.head_dim)
    k_pages, v_pages = (torch.full(pages, poison, dtype=ops.kv_dtype) for _ in range(2))
    for keys, values, table in zip(case.keys, case.values, case.rows.block_tables, strict=True):
        places = torch.arange(keys.shape[0])
        slots = table[places // shape.block_size].to(torch.int64) * shape.block_size + places % shape.block_size
        ops.cache_write(keys, values, k_pages, v_pages, slots)
    plan = ops.plan_attention(case.rows, shape)
    return ops.paged_attention(case.q, k_pages, v_pages, plan, shape, shape.head_dim**-0.5)


def dense_answer(case: PagedCase) -> Tensor:
    """Plain masked softmax in float64."""
    answers = []
    starts = case.rows.query_start.tolist()
    for index, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        q = case.q[starts[index] : starts[index + 1]].double()
        ratio = case.shape.heads // case.shape.kv_heads
        wide_keys = keys.double().repeat_interleave(ratio, dim=1)
        wide_values = values.double().repeat_interleave(ratio, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, wide_keys) * case.shape.head_dim**-0.5
        rows, length = q.shape[0], keys.shape[0]
        future = torch.arange(length) > torch.arange(length - rows, length)[:, None]
        weights = scores.masked_fill(future, -math.inf).softmax(-1) if rows else scores
        answers.append(torch.einsum("hqk,khd->qhd", weights, wide_values))
    return torch.cat(answers).float()
