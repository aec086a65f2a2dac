"""How much memory a step of attention takes beyond its results, before there is a device to ask.

Owns: the bound, which the executor's memory plan and `tercet plan` share. Must not know: tensors, devices. Standard
library only: plans are made where neither torch nor triton is.
"""

from typing import Final

SPLIT: Final = 256  # keys whose softmax is merged as one
_ITEM_BYTES: Final = 32
_MERGE_BYTES: Final = 16
_TABLE_ENTRY_BYTES: Final = 4
_STATE_WORDS: Final = 2  # largest score and sum, beside a row's values


def padded_head(head_dim: int) -> int:
    """Columns that a kernel computes for a head."""
    return max(16, 1 << (head_dim - 1).bit_length())


def attention_workspace_bytes(
    *,
    processors: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    tile: int,
    max_rows: int,
    max_sequences: int,
    max_model_len: int,
) -> int:
    """Upper bound, bytes. tile: query rows of a tile, those of all heads that share keys counted. Never falls as
    max_model_len grows.

    Tiles are split only where fewer than two programs a processor would have work, so few are; each has at most the
    splits of the longest sequence.
    """
    tiles = min((2 * processors - 1) // kv_heads, max_rows)
    splits = -(-max_model_len // SPLIT)
    parts = tiles * splits if splits > 1 else 0
    states = 4 * parts * kv_heads * tile * (padded_head(head_dim) + _STATE_WORDS)
    lists = _ITEM_BYTES * (parts + max_rows + max_sequences) + _MERGE_BYTES * tiles
    return states + lists + _TABLE_ENTRY_BYTES * max_sequences * -(-max_model_len // block_size)
