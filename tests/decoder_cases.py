"""Layers of a decoder with random weights, and a step of them over pages that hold a case's earlier tokens."""

import torch
from paged_cases import PagedCase
from stored_matrices import random_matrix
from torch import Tensor

from executor.loading.ggml_types import GgmlType
from kernels.ops import AttentionShape, DecoderLayer, DecoderStep, Ops, PackedDecoder

EPS = 1e-5
Q4, Q6, Q8, F16 = GgmlType.Q4_1, GgmlType.Q6_K, GgmlType.Q8_0, GgmlType.F16
CASES = [
    (AttentionShape(9, 3, 64, 16), 576, 192, Q4, Q4, False),
    (AttentionShape(4, 2, 16, 4), 64, 96, Q8, Q4, True),
    (AttentionShape(2, 1, 32, 5), 96, 40, Q4, F16, True),  # 40: gate's last panel is no whole one
    (AttentionShape(2, 2, 128, 16), 256, 256, Q6, Q6, False),
    (AttentionShape(3, 1, 16, 16), 48, 33, F16, F16, True),
]


def some_layers(
    ops: Ops, shape: AttentionShape, cols: int, inner: int, weights: GgmlType, *, biases: bool, down: GgmlType
) -> list[DecoderLayer]:
    generator = torch.Generator().manual_seed(cols)
    q_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def vector(size: int) -> Tensor:
        return torch.rand(size, generator=generator) + 0.5

    def one(seed: int) -> DecoderLayer:
        qkv = [random_matrix(weights, rows, cols, seed + at) for at, rows in enumerate((q_rows, kv_rows, kv_rows))]
        gate_up = [random_matrix(weights, inner, cols, seed + at) for at in (3, 4)]
        return DecoderLayer(
            attention_norm=vector(cols),
            qkv=ops.pack(qkv, lookup=False),
            qkv_bias=vector(q_rows + 2 * kv_rows) if biases else None,
            output=ops.pack([random_matrix(weights, cols, q_rows, seed + 5)], lookup=False),
            output_bias=vector(cols) if biases else None,
            mlp_norm=vector(cols),
            gate_up=ops.pack(gate_up, lookup=False),
            down=ops.pack([random_matrix(down, cols, inner, seed + 6)], lookup=False),
        )

    return [one(0), one(10)]


def run(ops: Ops, case: PagedCase, decoder: PackedDecoder, x: Tensor, poison: float) -> tuple[Tensor, list[Tensor]]:
    """The result and the pages, whose earlier tokens are the case's."""
    shape, rows = case.shape, case.rows
    pages = [
        torch.full((case.blocks, shape.block_size, shape.kv_heads, shape.head_dim), poison, dtype=ops.kv_dtype)
        for _ in range(2 * len(decoder.layers))
    ]
    k_pages, v_pages = pages[: len(decoder.layers)], pages[len(decoder.layers) :]
    starts, slots, positions = rows.query_start.tolist(), [], []
    for index, (keys, values, table) in enumerate(zip(case.keys, case.values, rows.block_tables, strict=True)):
        places = torch.arange(keys.shape[0])
        every = table[places // shape.block_size].to(torch.int64) * shape.block_size + places % shape.block_size
        for k_page, v_page in zip(k_pages, v_pages, strict=True):
            ops.cache_write(keys, values, k_page, v_page, every)
        count = starts[index + 1] - starts[index]
        slots.append(every[keys.shape[0] - count :])
        positions.append(places[keys.shape[0] - count :])
    angles = torch.cat(positions)[:, None] * torch.logspace(0, -3, shape.head_dim // 2)
    step = DecoderStep(
        cos=angles.cos(),
        sin=angles.sin(),
        slot_mapping=torch.cat(slots),
        plan=ops.plan_attention(rows, shape),
        shape=shape,
        scale=shape.head_dim**-0.5,
    )
    return ops.decoder(x, decoder, k_pages, v_pages, step), pages
