"""Pages and attention of the native library, for torch's tensors.

Owns: the plan of a step, and what a call's structures hold. Must not know: models, other ops.
The layout of a page and the order of sums are described in native/pages.h and native/attention.h.
"""

import ctypes
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels.cpu.library import FLOAT, INT, LONG, POINTER, Library, Team
from kernels.ops import AttentionShape, PagedRows

_ITEM_BYTES: Final = 56


class PageStruct(ctypes.Structure):
    _fields_ = [("block_size", INT), ("kv_heads", INT), ("head_dim", INT)]


class ShapeStruct(ctypes.Structure):
    _fields_ = [("pages", PageStruct), ("heads", INT), ("window", INT)]


class RowsStruct(ctypes.Structure):
    _fields_ = [
        ("sequences", INT),
        ("table_width", LONG),
        ("query_start", POINTER),
        ("seq_lens", POINTER),
        ("block_tables", POINTER),
    ]


class NeedsStruct(ctypes.Structure):
    _fields_ = [("items", LONG), ("merges", LONG), ("partials", LONG)]


class StepStruct(ctypes.Structure):
    _fields_ = [
        ("shape", ShapeStruct),
        ("rows", RowsStruct),
        ("scale", FLOAT),
        ("queries", POINTER),
        ("query_stride", LONG),
        ("key_pages", POINTER),
        ("value_pages", POINTER),
        ("out", POINTER),
        ("out_stride", LONG),
        ("merges", POINTER),
        ("partials", POINTER),
        ("cap", FLOAT),
        ("sinks", POINTER),
    ]


class RopeStruct(ctypes.Structure):
    _fields_ = [
        ("shape", PageStruct),
        ("heads", INT),
        ("qkv", POINTER),
        ("stride", LONG),
        ("cos", POINTER),
        ("sin", POINTER),
        ("positions", POINTER),
        ("slots", POINTER),
        ("key_pages", POINTER),
        ("value_pages", POINTER),
        ("queries", POINTER),
        ("query_stride", LONG),
    ]


@dataclass(frozen=True, slots=True)
class NativePlan:
    """The tensors are what the pointers of `rows_struct` point to."""

    rows: PagedRows
    rows_struct: RowsStruct
    items: Tensor  # uint8 [count * item bytes]
    count: int
    merges: Tensor  # int32, zero between uses
    partials: Tensor  # float32
    window: int  # keys that a row sees, its own the last of them; 0: all up to its own


def shape_struct(shape: AttentionShape, window: int = 0) -> ShapeStruct:
    return ShapeStruct(PageStruct(shape.block_size, shape.kv_heads, shape.head_dim), shape.heads, window)


class NativeAttention:
    """One at a time: calls share the threads' memory."""

    def __init__(self, library: Library, team: Team) -> None:
        self._team = team
        self._scratch_bytes = library.bind("tercet_attention_scratch_bytes", LONG, POINTER)
        self._plan = library.bind("tercet_plan_attention", None, POINTER, POINTER, INT, POINTER, POINTER)
        self._attend = library.bind("tercet_attend", None, POINTER, POINTER, POINTER, LONG, POINTER)
        self._write = library.bind(
            "tercet_cache_write", None, POINTER, LONG, POINTER, LONG, POINTER, LONG, POINTER, POINTER, POINTER
        )
        self._read = library.bind("tercet_cache_read", None, POINTER, LONG, *[POINTER] * 5)
        self._rope = library.bind("tercet_rope_and_cache", None, POINTER, POINTER, LONG, POINTER)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def scratch_bytes(self, shape: AttentionShape) -> int:
        """Of all threads."""
        struct = shape_struct(shape)
        return self._team.threads * int(self._scratch_bytes(ctypes.byref(struct)))

    def plan(self, rows: PagedRows, shape: AttentionShape, window: int = 0) -> NativePlan:
        """The rows are valid (`kernels.checks`), window is at least 0."""
        rows = PagedRows(rows.query_start.contiguous(), rows.seq_lens.contiguous(), rows.block_tables.contiguous())
        struct = RowsStruct(
            rows.seq_lens.shape[0],
            rows.block_tables.shape[1],
            rows.query_start.data_ptr(),
            rows.seq_lens.data_ptr(),
            rows.block_tables.data_ptr(),
        )
        needs, of = NeedsStruct(), shape_struct(shape, window)
        threads = self._team.threads
        self._plan(ctypes.byref(struct), ctypes.byref(of), threads, None, ctypes.byref(needs))
        items = torch.empty(needs.items * _ITEM_BYTES, dtype=torch.uint8)
        self._plan(ctypes.byref(struct), ctypes.byref(of), threads, items.data_ptr(), ctypes.byref(needs))
        merges = torch.zeros(needs.merges, dtype=torch.int32)
        return NativePlan(rows, struct, items, needs.items, merges, torch.empty(needs.partials), window)

    def attend(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        plan: NativePlan,
        shape: AttentionShape,
        scale: float,
        *,
        cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q float32 [T, H, D], heads and dimensions contiguous -> [T, H, D]. scale is positive.

        cap: scaled scores become cap * tanh(score / cap) (arXiv:2408.00118); 0: they stay. sinks float32 [H]: the score
        of a key without a value that every row sees (arXiv:2309.17453, as a learnt score).
        """
        out = torch.empty(q.shape)
        step = StepStruct(
            shape_struct(shape, plan.window),
            plan.rows_struct,
            scale,
            q.data_ptr(),
            q.stride(0),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            plan.merges.data_ptr(),
            plan.partials.data_ptr(),
            cap,
            None if sinks is None else sinks.data_ptr(),
        )
        scratch = self._room(self.scratch_bytes(shape))
        self._attend(self._team.handle, ctypes.byref(step), plan.items.data_ptr(), plan.count, scratch)
        return out

    def cache_write(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
        k, v, slots = (_by_rows(tensor) for tensor in (k, v, slots))
        shape = PageStruct(*k_pages.shape[1:])
        rows = (k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0))
        pages = (k_pages.data_ptr(), v_pages.data_ptr())
        self._write(ctypes.byref(shape), slots.shape[0], *rows, slots.data_ptr(), *pages)

    def cache_read(self, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """What lies in the slots, float32 [n, G, D] each. slots int64 [n]."""
        shape, slots = PageStruct(*k_pages.shape[1:]), slots.contiguous()
        k, v = (torch.empty(slots.shape[0], *k_pages.shape[2:]) for _ in range(2))
        pages = (k_pages.data_ptr(), v_pages.data_ptr())
        self._read(ctypes.byref(shape), slots.shape[0], slots.data_ptr(), *pages, k.data_ptr(), v.data_ptr())
        return k, v

    def rope_and_cache(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        slots: Tensor,
        shape: AttentionShape,
        positions: Tensor | None = None,
    ) -> Tensor:
        """As Ops.rope_and_cache; with positions int64 [T], cos and sin are tables [positions, D/2]."""
        qkv, cos, sin, slots = _by_rows(qkv), cos.contiguous(), sin.contiguous(), slots.contiguous()
        queries = torch.empty(qkv.shape[0], shape.heads, shape.head_dim)
        step = RopeStruct(
            PageStruct(shape.block_size, shape.kv_heads, shape.head_dim),
            shape.heads,
            qkv.data_ptr(),
            qkv.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            None if positions is None else positions.data_ptr(),
            slots.data_ptr(),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            queries.data_ptr(),
            queries.stride(0),
        )
        scratch = self._room(4 * self._team.threads * shape.head_dim)
        self._rope(self._team.handle, ctypes.byref(step), qkv.shape[0], scratch)
        return queries

    def _room(self, size: int) -> int:
        """Address of so many bytes, aligned to 64."""
        if self._scratch.shape[0] < size + 64:
            self._scratch = torch.empty(size + 64, dtype=torch.uint8)
        return -(-self._scratch.data_ptr() // 64) * 64


def _by_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy, so that all but the first axis is contiguous."""
    return tensor if tensor.shape[0] == 0 or tensor[0].is_contiguous() else tensor.contiguous()
