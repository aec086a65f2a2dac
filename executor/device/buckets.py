"""Sizes of decode steps that are recorded ahead, and which one a step takes.

Owns: the table of buckets, and the choice. Must not know: tensors, devices. Standard library only.
A recorded step has a fixed number of rows and of work items; a step with fewer is filled up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kernels.gpu.workspace import SPLIT as SPLIT

_FINE: Final = (1, 2, 4, 8, 16)
_STEP: Final = 32  # of rows, beyond


class BucketError(ValueError):
    """A step that no recorded size holds: the message names the limit."""


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """rows: one token each. splits: a row's keys are cut into at most so many items; 1: one item has all of them."""

    rows: int
    splits: int

    @property
    def items(self) -> int:
        return self.rows * self.splits

    @property
    def merges(self) -> int:
        return self.rows if self.splits > 1 else 0


def bucket_table(max_sequences: int, max_model_len: int, kv_heads: int, processors: int) -> tuple[Bucket, ...]:
    """Where few rows would leave processors without work, keys are split: in powers of two, up to the longest's.

    Sorted. Raises ValueError for a size below 1.
    """
    for name, value in (("max_sequences", max_sequences), ("max_model_len", max_model_len), ("kv_heads", kv_heads)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    longest = -(-max_model_len // SPLIT)
    table = []
    for rows in _row_sizes(max_sequences):
        table.append(Bucket(rows, 1))
        splits = 2
        while rows * kv_heads < 2 * processors and splits // 2 < longest:
            table.append(Bucket(rows, min(splits, longest)))
            splits *= 2
    return tuple(sorted(table))


def choose(table: Sequence[Bucket], rows: int, longest: int) -> Bucket:
    """The smallest with room for `rows`; of those with as many rows, the one that splits `longest` keys whole, or the
    one that splits none where it is not to be split. Raises BucketError.
    """
    size = min((bucket.rows for bucket in table if bucket.rows >= rows), default=None)
    if size is None or rows < 1:
        raise BucketError(f"a step has {rows} rows, recorded are 1 to {max(bucket.rows for bucket in table)}")
    own = sorted(bucket for bucket in table if bucket.rows == size)
    needed = -(-longest // SPLIT)
    if needed == 1 or len(own) == 1:
        return own[0]
    for bucket in own[1:]:
        if bucket.splits >= needed:
            return bucket
    raise BucketError(f"a sequence has {longest} tokens, recorded are up to {own[-1].splits * SPLIT}")


def most_padding(table: Sequence[Bucket]) -> int:
    """Rows that a step is filled up with, at most."""
    sizes = sorted({bucket.rows for bucket in table})
    return max((wide - narrow - 1 for narrow, wide in zip([0, *sizes], sizes, strict=False)), default=0)


def _row_sizes(max_sequences: int) -> list[int]:
    sizes = [size for size in (*_FINE, *range(_STEP, max_sequences, _STEP)) if size < max_sequences]
    return [*sizes, max_sequences]
