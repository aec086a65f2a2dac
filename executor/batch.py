"""From the slices of a step to the tensors of a forward pass.

Owns: positions, slot mapping and the ragged layout. Must not know: sampling, models.
Invariant: rows of one sequence are adjacent and in order, sequences in the order of the slices; nothing is padded but
the ends of block tables.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from kernels.ops import PagedRows


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """What one sequence contributes: positions [start, start + len(token_ids))."""

    token_ids: Sequence[int]
    start: int
    block_table: "array[int]"  # type code "i"; it may grow once the batch is built
    samples: bool


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]: block id * block size + place in the block
    rows: PagedRows
    sample_rows: Tensor  # int64: the last row of each sequence that samples, in order


def build_batch(sequences: Sequence[SequenceRows], block_size: int) -> Batch:
    """The sequences are valid (`executor.slots`): not empty, tables long enough."""
    counts = np.array([len(sequence.token_ids) for sequence in sequences], dtype=np.int64)
    starts = np.array([sequence.start for sequence in sequences], dtype=np.int64)
    query_start = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))
    used = -(-(starts + counts) // block_size)
    tables = np.zeros((len(sequences), int(used.max())), dtype=np.int32)
    for table, sequence, blocks in zip(tables, sequences, used.tolist(), strict=True):
        table[:blocks] = np.frombuffer(sequence.block_table, dtype=np.int32, count=blocks)
    owner = np.repeat(np.arange(len(sequences)), counts)
    positions = np.arange(query_start[-1]) - query_start[owner] + starts[owner]
    slot_mapping = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    all_ids = chain.from_iterable(sequence.token_ids for sequence in sequences)
    token_ids = np.fromiter(all_ids, dtype=np.int64, count=positions.shape[0])
    samples = np.array([sequence.samples for sequence in sequences], dtype=bool)
    return Batch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slot_mapping),
        rows=PagedRows(
            query_start=torch.from_numpy(query_start.astype(np.int32)),
            seq_lens=torch.from_numpy((starts + counts).astype(np.int32)),
            block_tables=torch.from_numpy(tables),
        ),
        sample_rows=torch.from_numpy((query_start[1:] - 1)[samples]),
    )
