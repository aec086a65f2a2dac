"""The checks that all back ends share. Each raises ValueError naming what does not fit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.ops import AttentionShape, DecoderStep, PackedDecoder, PackedMatrix, PagedRows, require


def check_linear(x: Tensor, weight: PackedMatrix, bias: Tensor | None) -> None:
    require(
        x.dim() == 2 and x.shape[1] == weight.cols and x.dtype == torch.float32,
        f"x must be float32 [T, {weight.cols}], got {x.dtype} {list(x.shape)}",
    )
    require(
        bias is None or (bias.shape == (weight.rows,) and bias.dtype == torch.float32),
        f"bias must be float32 [{weight.rows}]",
    )


def check_pages(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor) -> None:
    require(k_pages.shape == v_pages.shape and k_pages.dim() == 4, "pages must be [B, P, G, D], the same for k and v")
    require(k_pages.is_contiguous() and v_pages.is_contiguous(), "pages must be contiguous")
    expected = (slot_mapping.shape[0], *k_pages.shape[2:])
    require(k.shape == expected and v.shape == expected, f"k and v must be {list(expected)}, got {list(k.shape)}")
    require(slot_mapping.dtype == torch.int64, f"slot_mapping must be int64, got {slot_mapping.dtype}")


def check_paged_rows(rows: PagedRows, shape: AttentionShape) -> None:
    sequences = rows.seq_lens.shape[0]
    for field in ("query_start", "seq_lens", "block_tables"):
        dtype = getattr(rows, field).dtype
        require(dtype == torch.int32, f"{field} must be int32, got {dtype}")
    require(rows.query_start.shape == (sequences + 1,), f"query_start must be [{sequences + 1}]")
    require(
        rows.block_tables.dim() == 2 and rows.block_tables.shape[0] == sequences,
        f"block_tables must be [{sequences}, W]",
    )
    starts = rows.query_start.tolist()
    width = rows.block_tables.shape[1] * shape.block_size
    require(starts[0] == 0, "query_start must begin with 0")
    for index, length in enumerate(rows.seq_lens.tolist()):
        count = starts[index + 1] - starts[index]
        require(0 <= count <= length, f"sequence {index} has {count} rows and {length} tokens")
        require(length <= width, f"sequence {index} has {length} tokens, its block table holds {width}")


def check_queries(q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: PagedRows, shape: AttentionShape) -> None:
    expected = (int(rows.query_start[-1]), shape.heads, shape.head_dim)
    require(
        q.shape == expected and q.dtype == torch.float32,
        f"q must be float32 {list(expected)}, got {q.dtype} {list(q.shape)}",
    )
    pages = (shape.block_size, shape.kv_heads, shape.head_dim)
    for name, tensor in (("k_pages", k_pages), ("v_pages", v_pages)):
        require(tensor.shape[1:] == pages, f"{name} must be [B, {pages[0]}, {pages[1]}, {pages[2]}]")


def check_decoder_step(
    x: Tensor, decoder: PackedDecoder, k_pages: Sequence[Tensor], v_pages: Sequence[Tensor], step: DecoderStep
) -> None:
    layers, first, shape = len(decoder.layers), decoder.layers[0], step.shape
    cols, half = first.qkv.cols, shape.head_dim // 2
    rows = int(step.plan.rows.query_start[-1])
    require(
        x.shape == (rows, cols) and x.dtype == torch.float32, f"x must be float32 [{rows}, {cols}], got {list(x.shape)}"
    )
    require(
        first.qkv.rows == (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        and first.output.cols == shape.heads * shape.head_dim,
        f"the layers are not those of {shape}",
    )
    require(len(k_pages) == len(v_pages) == layers, f"{layers} layers have {len(k_pages)} and {len(v_pages)} pages")
    for name, tensor in (("cos", step.cos), ("sin", step.sin)):
        require(
            tensor.shape == (rows, half) and tensor.dtype == torch.float32 and tensor.is_contiguous(),
            f"{name} must be float32 [{rows}, {half}], contiguous",
        )
    require(
        step.slot_mapping.shape == (rows,) and step.slot_mapping.dtype == torch.int64,
        f"slot_mapping must be int64 [{rows}]",
    )
    pages = (shape.block_size, shape.kv_heads, shape.head_dim)
    for tensor in (k_pages[0], v_pages[0]):
        require(tensor.shape[1:] == pages and tensor.is_contiguous(), f"pages must be [B, *{pages}], contiguous")
