"""Paged attention: the work list of a step, and the launches.

Owns: how a step is cut into items, and the checks right before a launch. Must not know: how pages came to be filled.
Invariant: an item is a tile of rows with one split of its keys, or with all of them; which of the two never shows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.gpu.device.attention import attention_kernel, merge_kernel
from kernels.gpu.launch import Launch
from kernels.gpu.pages import PageFormat
from kernels.gpu.target import SPLIT, Target
from kernels.gpu.workspace import attention_workspace_bytes, padded_head
from kernels.ops import AttentionShape, PagedRows, require

_ITEM: Final = 8  # int32 fields
_MERGE: Final = 4
_LARGEST_INT: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Extras:
    """What some families of models add. window: last keys that a row sees, its own included; 0: all. softcap: scores
    become cap * tanh(score / cap); 0: none. sinks: float32 [H], logits of keys without values."""

    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        require(self.window >= 0, f"window must be at least 0, got {self.window}")
        require(0 <= self.softcap < float("inf"), f"softcap must be finite and at least 0, got {self.softcap}")


NO_EXTRAS: Final = Extras()
NO_ROWS: Final = PagedRows(
    torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), torch.zeros(0, 0, dtype=torch.int32)
)


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """items int32 [n, 8], merges int32 [m, 4], as the kernels say; tables int32 [S, W] on the device."""

    rows: PagedRows
    shape: AttentionShape
    window: int
    items: Tensor
    merges: Tensor
    tables: Tensor
    parts: int


@dataclass(frozen=True, slots=True)
class _Tile:
    sequence: int
    row: int
    tokens: int
    position: int

    def splits(self, window: int) -> range:
        begin = max(self.position - window + 1, 0) if window else 0
        return range(begin // SPLIT, -(-(self.position + self.tokens) // SPLIT))


def plan(target: Target, rows: PagedRows, shape: AttentionShape, window: int = 0) -> GpuPlan:
    """rows are checked. Tiles are split where whole ones would leave processors without work."""
    ratio = shape.heads // shape.kv_heads
    block_m = target.attention(shape.head_dim).block_m
    require(ratio <= block_m, f"{ratio} query heads share a key/value head; {block_m} can")
    tiles = list(_tiles(rows, block_m // ratio))
    split = len(tiles) * shape.kv_heads < 2 * target.processors
    items, merges = [], []
    parts = 0
    for tile in tiles:
        fields = (tile.sequence, tile.row, tile.tokens, tile.position)
        splits = tile.splits(window)
        if not split or len(splits) == 1:
            items.append((*fields, -1, 0, 0, 0))
            continue
        merges.append((tile.row, tile.tokens, parts, len(splits)))
        items += [(*fields, at, parts + index, 0, 0) for index, at in enumerate(splits)]
        parts += len(splits)
    return GpuPlan(
        rows=rows,
        shape=shape,
        window=window,
        items=_on(target, items, _ITEM),
        merges=_on(target, merges, _MERGE),
        tables=rows.block_tables.contiguous().to(target.device),
        parts=parts,
    )


def attend(
    target: Target,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    work: GpuPlan,
    pages: PageFormat,
    scale: float,
    extras: Extras = NO_EXTRAS,
    out_type: torch.dtype = torch.float32,
) -> Tensor:
    """q float32 [T, H, D] -> out_type [T, H, D]."""
    shape = work.shape
    require(extras.window == work.window, f"the plan is for a window of {work.window}, not {extras.window}")
    require(
        extras.sinks is None or (extras.sinks.shape == (shape.heads,) and extras.sinks.dtype == torch.float32),
        f"sinks must be float32 [{shape.heads}]",
    )
    require(q.is_contiguous(), "q must be contiguous")
    for name, tensor in (("k_pages", k_pages), ("v_pages", v_pages)):
        pages.check(tensor, shape.block_size, shape.kv_heads, shape.head_dim, name)
    require(k_pages.shape[0] <= _LARGEST_INT, f"{k_pages.shape[0]} blocks are more than block tables can name")
    out = torch.empty(q.shape, dtype=out_type, device=target.device)
    if work.items.shape[0] == 0:
        return out
    tiles = target.attention(shape.head_dim, pages.kind)
    pad = padded_head(shape.head_dim)
    states = work.parts * shape.kv_heads * tiles.block_m
    part_values = torch.empty(max(1, states * pad), dtype=torch.float32, device=target.device)
    part_states = torch.empty(max(1, 2 * states), dtype=torch.float32, device=target.device)
    sinks = extras.sinks if extras.sinks is not None else part_states
    target.launch(
        Launch(
            attention_kernel,
            (work.items.shape[0], shape.kv_heads),
            {
                "q": q,
                "k_pages": k_pages,
                "v_pages": v_pages,
                "tables": work.tables,
                "items": work.items,
                "sinks": sinks,
                "out": out,
                "part_values": part_values,
                "part_states": part_states,
                "table_row": work.tables.stride(0),
                "scale": scale,
                "HEADS": shape.heads,
                "KV_HEADS": shape.kv_heads,
                "HEAD_DIM": shape.head_dim,
                "PAD_D": pad,
                "BLOCK_SIZE": shape.block_size,
                "BLOCK_BYTES": pages.block_bytes(shape.block_size, shape.kv_heads, shape.head_dim),
                "KV_KIND": pages.kind,
                "WINDOW": extras.window,
                "SOFTCAP": extras.softcap,
                "HAS_SINKS": extras.sinks is not None,
                "OPERAND": target.operand_type,
                "BLOCK_M": tiles.block_m,
                "BLOCK_KV": tiles.block_kv,
                "SPLIT": SPLIT,
                "INTERPRET": target.interpret,
            },
            warps=tiles.warps,
            stages=tiles.stages,
        )
    )
    if work.merges.shape[0]:
        target.launch(
            Launch(
                merge_kernel,
                (work.merges.shape[0], shape.kv_heads),
                {
                    "part_values": part_values,
                    "part_states": part_states,
                    "merges": work.merges,
                    "sinks": sinks,
                    "out": out,
                    "HEADS": shape.heads,
                    "KV_HEADS": shape.kv_heads,
                    "HEAD_DIM": shape.head_dim,
                    "PAD_D": pad,
                    "HAS_SINKS": extras.sinks is not None,
                    "BLOCK_M": tiles.block_m,
                    "INTERPRET": target.interpret,
                },
                warps=tiles.warps,  # more for wide heads, whose sums would not fit into registers
            )
        )
    return out


def workspace_bytes(
    target: Target, shape: AttentionShape, max_rows: int, max_sequences: int, max_model_len: int
) -> int:
    """Upper bound of what `plan` and `attend` allocate beyond the result."""
    return attention_workspace_bytes(
        processors=target.processors,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        tile=target.attention(shape.head_dim).block_m,
        max_rows=max_rows,
        max_sequences=max_sequences,
        max_model_len=max_model_len,
    )


def _tiles(rows: PagedRows, tokens: int) -> Iterator[_Tile]:
    starts = rows.query_start.tolist()
    for sequence, length in enumerate(rows.seq_lens.tolist()):
        first, count = starts[sequence], starts[sequence + 1] - starts[sequence]
        for taken in range(0, count, tokens):
            yield _Tile(sequence, first + taken, min(tokens, count - taken), length - count + taken)


def _on(target: Target, rows: Sequence[tuple[int, ...]], width: int) -> Tensor:
    return torch.from_numpy(np.array(rows, dtype=np.int32).reshape(-1, width)).to(target.device)
