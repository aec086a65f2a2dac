"""Paged attention in batched matrix products, without padding prompts to one length.

Owns: cutting a step into tiles of rows, and keys into chunks. Must not know: how pages came to be filled.
Invariants. The keys of a sequence are cut at multiples of a chunk size that is fixed for a run, chunks are merged in
order, and a chunk that a row cannot see adds nothing, exactly: a row's bits depend on its own position and its
sequence's keys and values alone. Every batched product has a multiple of ROW_MULTIPLE rows: measured with torch's
MKL, products with few rows sum in another order (on an EPYC fewer than 4; on a Xeon fewer than 8 with heads of 128,
fewer than 12 with heads of 192), those with such multiples (16 to 512, heads of 16 to 192) agree bit for bit.

A tile is up to TILES[0] adjacent rows of one sequence. Tiles of one size form a batch, ordered by the number of
chunks they see, so those that see chunk c are the first n of them, and no index is needed to merge.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops import AttentionShape, PagedRows

TILES = (64, 16, 1)  # rows; a sequence's rows are cut greedily, the last tile of 16 filled up
CHUNK_TOKENS = 128
ROW_MULTIPLE = 16
GATHER_BYTES = 24 << 20  # of keys, and as much of values, in float32, gathered at a time


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The chunk's keys for the first n tiles of a batch."""

    blocks: Tensor  # int64 [n * blocks a chunk]
    hidden: Tensor | None  # bool [n, tile, tokens]: keys after the row; None: there are none
    absent: Tensor | None  # bool [n, tokens]: keys after the sequence's end; None: there are none


@dataclass(frozen=True, slots=True)
class _Batch:
    rows: Tensor  # int64 [tiles * tile]: of q; rows that fill up a tile repeat its last
    kept: Tensor | None  # bool [tiles * tile]: false where a row fills up; None: all kept
    tile: int
    chunks: tuple[_Chunk, ...]


@dataclass(frozen=True, slots=True)
class GatherPlan:
    rows: PagedRows
    batches: tuple[_Batch, ...]


@dataclass(frozen=True, slots=True)
class _Tile:
    sequence: int
    first: int  # row of q
    count: int
    position: int  # of its first row


def plan(rows: PagedRows, shape: AttentionShape) -> GatherPlan:
    by_size: dict[int, list[_Tile]] = {size: [] for size in TILES}
    starts = rows.query_start.tolist()
    for sequence, length in enumerate(rows.seq_lens.tolist()):
        first, count = starts[sequence], starts[sequence + 1] - starts[sequence]
        for size, taken, tiled in _cut(count):
            by_size[size].append(_Tile(sequence, first + taken, tiled, length - count + taken))
    chunk_tokens = _chunk_tokens(shape)
    limit = max(1, GATHER_BYTES // (4 * chunk_tokens * shape.kv_heads * shape.head_dim))
    batches = []
    for size, tiles in by_size.items():
        ordered = sorted(tiles, key=lambda tile: -(tile.position + tile.count))
        batches += [
            _batch(ordered[start : start + limit], size, rows, shape) for start in range(0, len(ordered), limit)
        ]
    return GatherPlan(rows, tuple(batches))


def attend(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, work: GatherPlan, shape: AttentionShape, scale: float
) -> Tensor:
    out = torch.empty(q.shape, dtype=torch.float32)
    for batch in work.batches:
        values = _attend_batch(q, k_pages, v_pages, batch, shape, scale)
        if batch.kept is None:
            out[batch.rows] = values
        else:
            out[batch.rows[batch.kept]] = values[batch.kept]
    return out


def workspace_bytes(shape: AttentionShape, max_rows: int, max_sequences: int) -> int:
    """Gathered keys and values, as pages and as float32 laid out; queries, scores and sums of all tiles."""
    chunk = _chunk_tokens(shape)
    gathered = max(GATHER_BYTES, 4 * chunk * shape.kv_heads * shape.head_dim)
    filled = shape.heads * (max_rows + max_sequences * (TILES[1] - 1)) + shape.kv_heads * ROW_MULTIPLE * max_rows
    return 5 * gathered + 4 * filled * (4 * shape.head_dim + 3 * chunk)


def _attend_batch(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: _Batch, shape: AttentionShape, scale: float
) -> Tensor:
    """-> float32 [tiles * tile, H, D]."""
    tiles = batch.rows.shape[0] // batch.tile
    ratio = shape.heads // shape.kv_heads
    height = batch.tile * ratio  # rows of one product: query rows times the heads that share keys
    filled = -(-height // ROW_MULTIPLE) * ROW_MULTIPLE
    queries = torch.zeros(tiles, shape.kv_heads, filled, shape.head_dim)
    laid_out = q[batch.rows].view(tiles, batch.tile, shape.kv_heads, ratio, shape.head_dim)
    queries[:, :, :height] = laid_out.transpose(1, 2).reshape(tiles, shape.kv_heads, height, shape.head_dim)
    queries *= scale

    highest = torch.full((tiles, shape.kv_heads, filled, 1), float("-inf"))
    total = torch.zeros(tiles, shape.kv_heads, filled, 1)
    sums = torch.zeros(tiles, shape.kv_heads, filled, shape.head_dim)
    for chunk in batch.chunks:
        keys = _gather(k_pages, chunk.blocks, shape)  # [n * G, tokens, D]
        values = _gather(v_pages, chunk.blocks, shape)
        n, tokens = keys.shape[0] // shape.kv_heads, keys.shape[1]
        scores = torch.bmm(queries[:n].flatten(0, 1), keys.transpose(1, 2)).view(n, shape.kv_heads, filled, tokens)
        if chunk.absent is not None:  # 0 * NaN is NaN: what lies behind the end is no number to rely on
            values.view(n, shape.kv_heads, tokens, -1).masked_fill_(chunk.absent[:, None, :, None], 0)
            scores.masked_fill_(chunk.absent[:, None, None, :], float("-inf"))
        if chunk.hidden is not None:
            by_row = scores[:, :, :height].view(n, shape.kv_heads, batch.tile, ratio, tokens)
            by_row.masked_fill_(chunk.hidden[:, None, :, None, :], float("-inf"))
        _merge(scores, values, highest[:n], total[:n], sums[:n])
    result = (sums / total)[:, :, :height].view(tiles, shape.kv_heads, batch.tile, ratio, shape.head_dim)
    return result.transpose(1, 2).reshape(tiles * batch.tile, shape.heads, shape.head_dim)


def _merge(scores: Tensor, values: Tensor, highest: Tensor, total: Tensor, sums: Tensor) -> None:
    """One step of the online softmax (arXiv:1805.02867), in place on the last three.

    Chunk 0 holds a visible key for every row, so `highest` is finite after it, and a chunk that a row cannot see
    gets weights exp(-inf) = 0 and leaves the row's factor at exp(0) = 1.
    """
    raised = torch.maximum(highest, scores.amax(dim=-1, keepdim=True))
    factor = torch.exp(highest - raised)
    weights = scores.sub_(raised).exp_()
    total.mul_(factor).add_(weights.sum(dim=-1, keepdim=True))
    sums.mul_(factor).add_(torch.bmm(weights.flatten(0, 1), values).view(sums.shape))
    highest.copy_(raised)


def _gather(pages: Tensor, blocks: Tensor, shape: AttentionShape) -> Tensor:
    """float32 [n * G, tokens, D] of the blocks, [n * tokens / P] of them."""
    chunk = _chunk_tokens(shape)
    found = pages.index_select(0, blocks).view(-1, chunk, shape.kv_heads, shape.head_dim)
    return found.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format).flatten(0, 1)


def _chunk_tokens(shape: AttentionShape) -> int:
    return shape.block_size * max(1, CHUNK_TOKENS // shape.block_size)


def _cut(count: int) -> Iterator[tuple[int, int, int]]:
    """(tile size, rows before it, rows in it)."""
    taken = 0
    while taken < count:
        left = count - taken
        size = next((size for size in TILES if size <= left), TILES[-1])
        if 1 < left < TILES[1]:
            size = TILES[1]
        tiled = min(size, left)
        yield size, taken, tiled
        taken += tiled


def _batch(tiles: list[_Tile], size: int, rows: PagedRows, shape: AttentionShape) -> _Batch:
    chunk_tokens = _chunk_tokens(shape)
    offsets = torch.arange(size)
    firsts = torch.tensor([tile.first for tile in tiles])
    counts = torch.tensor([tile.count for tile in tiles])
    positions = torch.tensor([tile.position for tile in tiles])
    kept = offsets < counts[:, None]
    within = torch.minimum(offsets, counts[:, None] - 1)
    row_positions = positions[:, None] + within  # [tiles, size]
    ends = positions + counts  # keys that the tile may see
    sequences = torch.tensor([tile.sequence for tile in tiles])
    lengths = rows.seq_lens[sequences].to(torch.int64)
    tables = rows.block_tables.to(torch.int64)

    chunks = []
    per_chunk = chunk_tokens // shape.block_size
    for start in range(0, int(ends.max()), chunk_tokens):
        n = int((ends > start).sum())
        columns = start // shape.block_size + torch.arange(per_chunk)
        used = columns * shape.block_size < lengths[:n, None]
        table = tables[sequences[:n]][:, columns.clamp(max=tables.shape[1] - 1)]
        blocks = torch.where(used, table, 0).view(-1)
        tokens = start + torch.arange(chunk_tokens)
        hidden = tokens > row_positions[:n, :, None] if size > 1 else None
        absent = tokens >= lengths[:n, None]
        chunks.append(_Chunk(blocks, _if_any(hidden), _if_any(absent)))
    return _Batch((firsts[:, None] + within).view(-1), _unless_all(kept.view(-1)), size, tuple(chunks))


def _if_any(mask: Tensor | None) -> Tensor | None:
    return mask if mask is not None and bool(mask.any()) else None


def _unless_all(mask: Tensor) -> Tensor | None:
    return None if bool(mask.all()) else mask
