"""What a decode step tells the device, in one piece of memory: its fields, their places, and what is written there.

Owns: the layout, and the filling of a step up to its bucket. Must not know: torch, models, who asks. numpy and the
standard library only.
One copy takes the whole piece to the device. A row without a sequence writes its keys and values to a scratch block,
sees no work item, and leaves its token where nobody reads it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from executor.device.buckets import SPLIT, Bucket, BucketError

ITEM: Final = 8  # int32 fields of a work item, and of a merge, as kernels.gpu.device.attention says
MERGE: Final = 4
_ALIGNED: Final = 256
FEED: Final = -1  # in `given`: the token that the slot drew last

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    bucket: Bucket
    fields: Mapping[str, Field]
    nbytes: int

    def view(self, memory: Bytes, name: str) -> npt.NDArray[Any]:
        field = self.fields[name]
        piece = memory[field.offset : field.offset + field.nbytes]
        return piece.view(field.dtype).reshape(field.shape)


@dataclass(frozen=True, slots=True)
class Scratch:
    """What rows without a sequence use: places of blocks from `first_block` on, and the entry `slot` of the tokens."""

    first_block: int
    blocks: int
    slot: int


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """position: of the token that goes in, in its sequence. token_id: None takes what the slot drew last, which may
    not have left the device yet. blocks: of the sequence, enough for the position."""

    slot: int
    position: int
    token_id: int | None
    blocks: Sequence[int]


def layout(bucket: Bucket, table_width: int) -> Layout:
    """table_width: blocks of the longest sequence."""
    rows = bucket.rows
    shapes = (
        ("slots", "int64", (rows,)),
        ("given", "int64", (rows,)),
        ("positions", "int64", (rows,)),
        ("slot_mapping", "int64", (rows,)),
        ("lengths", "int32", (rows,)),
        ("tables", "int32", (rows, table_width)),
        ("items", "int32", (bucket.items, ITEM)),
        ("merges", "int32", (bucket.merges, MERGE)),
    )
    fields, offset = {}, 0
    for name, dtype, shape in shapes:
        fields[name] = field = Field(name, dtype, shape, offset)
        offset += -(-field.nbytes // _ALIGNED) * _ALIGNED
    return Layout(bucket, fields, offset)


def fill(where: Layout, memory: Bytes, rows: Sequence[DecodeRow], scratch: Scratch, block_size: int) -> None:
    """Write a step, whole: nothing of an earlier one is left. memory: uint8 [where.nbytes].

    Raises BucketError for more rows, splits or blocks than the bucket has, ValueError for a row without its block or
    a slot that occurs twice.
    """
    bucket = where.bucket
    if not 0 < len(rows) <= bucket.rows:
        raise BucketError(f"a step of {len(rows)} rows does not go into a bucket of {bucket.rows}")
    if len({row.slot for row in rows}) != len(rows):
        raise ValueError("a slot occurs twice in a step")
    slots, given = where.view(memory, "slots"), where.view(memory, "given")
    positions, slot_mapping = where.view(memory, "positions"), where.view(memory, "slot_mapping")
    lengths, tables = where.view(memory, "lengths"), where.view(memory, "tables")
    items, merges = where.view(memory, "items"), where.view(memory, "merges")
    items[:] = -1
    merges[:] = 0
    tables[:] = 0
    for index, row in enumerate(rows):
        used = row.position // block_size + 1
        if used > len(row.blocks):
            raise ValueError(f"slot {row.slot}: position {row.position} is beyond its {len(row.blocks)} blocks")
        if used > tables.shape[1]:
            raise BucketError(f"slot {row.slot}: {used} blocks, a table has {tables.shape[1]}")
        slots[index], positions[index] = row.slot, row.position
        given[index] = FEED if row.token_id is None else row.token_id
        tables[index, :used] = row.blocks[:used]
        slot_mapping[index] = row.blocks[used - 1] * block_size + row.position % block_size
        _add_items(bucket, index, row.position, items, merges)
    count = len(rows)
    padding = np.arange(bucket.rows - count)
    if len(padding) > scratch.blocks * block_size:
        raise BucketError(f"{len(padding)} rows fill up, {scratch.blocks} scratch blocks hold {block_size} each")
    slots[count:], positions[count:], given[count:] = scratch.slot, 0, 0
    slot_mapping[count:] = scratch.first_block * block_size + padding
    tables[count:, 0] = scratch.first_block + padding // block_size
    lengths[:] = positions + 1


def _add_items(bucket: Bucket, index: int, position: int, items: npt.NDArray[Any], merges: npt.NDArray[Any]) -> None:
    first, splits = index * bucket.splits, position // SPLIT + 1
    if bucket.splits == 1 or splits == 1:
        items[first] = (index, index, 1, position, -1, 0, 0, 0)
        return
    if splits > bucket.splits:
        raise BucketError(f"position {position} has {splits} splits, the bucket {bucket.splits}")
    for split in range(splits):
        items[first + split] = (index, index, 1, position, split, first + split, 0, 0)
    merges[index] = (index, 1, first, splits)
