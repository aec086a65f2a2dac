"""Decode steps on the device: static buffers, recorded steps, two in flight.

Owns: buffers, streams and recordings. Must not know: scheduling, the wire, what a draw is beyond `DeviceSampler`.
Where there is no CUDA the same steps run one by one, as they come: the results are the same.
Invariants: every recording is made by `warm_up`; a drawn token goes to the next step without the host.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from executor.cache import KvPool
from executor.device.buckets import Bucket, choose
from executor.device.layout import FEED, DecodeRow, Layout, Scratch, fill, layout
from executor.models.model import Model
from kernels.ops import AttentionShape, DecodeWork, Ops, PagedRows
from kernels.sampling import Greedy
from kernels.sampling import greedy as reference_greedy

IN_FLIGHT: Final = 2
FAULT: Final = -1  # in place of a token: the row's logits are not finite


class DeviceSampler(Protocol):
    """Draws without the host: it may read what was put on the device before, by slot, and its arguments."""

    def draw(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """logits float32 [rows, V], slots and positions of the inputs int64 [rows] -> tokens int64 [rows], or FAULT."""
        ...


class GreedySampler:
    """The likeliest token; the lowest id of equals. greedy: what finds it, a back end's kernel or the reference."""

    def __init__(self, greedy: Callable[[Tensor], Greedy] = reference_greedy) -> None:
        self._greedy = greedy

    def draw(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        found = self._greedy(logits)
        return torch.where(found.highest.isfinite(), found.token_ids, FAULT)


@dataclass(frozen=True, slots=True)
class Pending:
    """A step in flight. number: counted from 0, in the order of submission."""

    number: int
    slots: tuple[int, ...]


@dataclass(slots=True)
class _Recording:
    where: Layout
    memory: Tensor  # uint8, on the device
    drawn: Tensor  # int64 [rows], on the device
    run: Callable[[], None]


@dataclass(slots=True)
class _Lane:
    """One of the two steps in flight: memory that the device copies from and to by itself."""

    told: Tensor
    drawn: Tensor
    done: "torch.cuda.Event | None"


class DeviceDecoder:
    """One thread calls it. graphs: whether steps are recorded; they are run eagerly otherwise."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        pool: KvPool,
        shape: AttentionShape,
        sampler: DeviceSampler,
        *,
        table: Sequence[Bucket],
        max_sequences: int,
        max_model_len: int,
        scratch: Scratch,
        device: torch.device,
        graphs: bool,
    ) -> None:
        if graphs and device.type != "cuda":
            raise ValueError(f"steps are recorded on a CUDA device, not on {device}")
        if scratch.slot != max_sequences:
            raise ValueError(f"the scratch slot must be {max_sequences}, behind all others, not {scratch.slot}")
        self._model, self._ops, self._pool, self._shape, self._sampler = model, ops, pool, shape, sampler
        self._table, self._scratch, self._device, self._graphs = tuple(table), scratch, device, graphs
        width = -(-max_model_len // shape.block_size)
        self._layouts = {bucket: layout(bucket, width) for bucket in self._table}
        self._tokens = torch.zeros(max_sequences + 1, dtype=torch.int64, device=device)
        largest = max(each.nbytes for each in self._layouts.values())
        rows = max(bucket.rows for bucket in self._table)
        pinned = device.type == "cuda"
        self._lanes = [
            _Lane(
                told=torch.zeros(largest, dtype=torch.uint8, pin_memory=pinned),
                drawn=torch.zeros(rows, dtype=torch.int64, pin_memory=pinned),
                done=torch.cuda.Event() if pinned else None,  # type: ignore[no-untyped-call]
            )
            for _ in range(IN_FLIGHT)
        ]
        self._recordings: dict[Bucket, _Recording] = {}
        self._flying: deque[Pending] = deque()
        self._number = 0

    @property
    def recorded(self) -> Mapping[Bucket, Layout]:
        return {bucket: recording.where for bucket, recording in self._recordings.items()}

    def warm_up(self) -> None:
        """Run every bucket, and record it. The largest first: what it allocates, the others find."""
        memory = None
        for bucket in sorted(self._table, reverse=True):
            recording = self._recordings[bucket] = self._static(bucket)
            told = self._lanes[0].told
            blocks = [self._scratch.first_block] * recording.where.fields["tables"].shape[1]
            row = DecodeRow(self._scratch.slot, 0, 0, blocks)
            fill(recording.where, told.numpy()[: recording.where.nbytes], [row], self._scratch, self._shape.block_size)
            recording.memory.copy_(told[: recording.where.nbytes])
            recording.run()
            if self._graphs:
                torch.cuda.synchronize(self._device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=memory):
                    recording.run()
                memory = graph.pool() if memory is None else memory
                recording.run = graph.replay
        self._tokens.zero_()

    def put(self, slot: int, token_id: int) -> None:
        """What the slot drew elsewhere: the next step that is not told a token takes it."""
        self._tokens[slot] = token_id

    def submit(self, rows: Sequence[DecodeRow]) -> Pending:
        """Start a step behind those in flight. Raises BucketError for one that was not recorded, ValueError for a row
        that is not whole, RuntimeError where two are in flight or `warm_up` was not called."""
        if len(self._flying) == IN_FLIGHT:
            raise RuntimeError(f"{IN_FLIGHT} steps are in flight: collect one first")
        bucket = choose(self._table, len(rows), max((row.position for row in rows), default=0) + 1)
        if bucket not in self._recordings:
            raise RuntimeError("warm_up records steps, and was not called")
        recording = self._recordings[bucket]
        lane = self._lanes[self._number % IN_FLIGHT]
        size = recording.where.nbytes
        fill(recording.where, lane.told.numpy()[:size], rows, self._scratch, self._shape.block_size)
        recording.memory.copy_(lane.told[:size], non_blocking=True)
        recording.run()
        lane.drawn[: bucket.rows].copy_(recording.drawn, non_blocking=True)
        if lane.done is not None:
            lane.done.record()
        pending = Pending(self._number, tuple(row.slot for row in rows))
        self._number += 1
        self._flying.append(pending)
        return pending

    def collect(self, pending: Pending) -> tuple[int, ...]:
        """Wait for the oldest step in flight, which this must be; a token or FAULT for each row."""
        if not self._flying or self._flying[0] != pending:
            raise RuntimeError(f"step {pending.number} is not the oldest in flight")
        self._flying.popleft()
        lane = self._lanes[pending.number % IN_FLIGHT]
        if lane.done is not None:
            lane.done.synchronize()
        return tuple(lane.drawn[: len(pending.slots)].tolist())

    def _static(self, bucket: Bucket) -> _Recording:
        where = self._layouts[bucket]
        memory = torch.zeros(where.nbytes, dtype=torch.uint8, device=self._device)
        drawn = torch.zeros(bucket.rows, dtype=torch.int64, device=self._device)
        fields = {name: _field(memory, where, name) for name in where.fields}
        plan_rows = torch.arange(bucket.rows + 1, dtype=torch.int32)

        def run() -> None:
            with torch.inference_mode():
                self._run(bucket, fields, plan_rows, drawn)

        return _Recording(where, memory, drawn, run)

    def _run(self, bucket: Bucket, fields: Mapping[str, Tensor], starts: Tensor, drawn: Tensor) -> None:
        slots, given = fields["slots"], fields["given"]
        ids = torch.where(given == FEED, self._tokens[slots], given).clamp(min=0)
        work = DecodeWork(
            rows=PagedRows(starts, fields["lengths"], fields["tables"]),
            items=fields["items"],
            merges=fields["merges"],
            parts=bucket.items if bucket.splits > 1 else 0,
        )
        plan = self._ops.plan_decode(work, self._shape)
        hidden = self._model.compute(ids, fields["positions"], fields["slot_mapping"], plan, self._pool)
        tokens = self._sampler.draw(self._model.logits(hidden), slots, fields["positions"])
        self._tokens.index_copy_(0, slots, tokens)
        drawn.copy_(tokens)


def _field(memory: Tensor, where: Layout, name: str) -> Tensor:
    field = where.fields[name]
    dtype = torch.int64 if np.dtype(field.dtype).itemsize == 8 else torch.int32
    return memory[field.offset : field.offset + field.nbytes].view(dtype).view(field.shape)
