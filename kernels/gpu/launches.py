"""Every kernel in every configuration that serving uses, recorded from the wrappers themselves, on no memory.

Owns: the list of cases. Must not know: what the compiler makes of them.
Shapes are those of Llama 3.1 8B; tensors lie on torch's device meta, which has sizes and no contents.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from kernels.gpu import attention, draws
from kernels.gpu.backend import GpuOps
from kernels.gpu.device.draw import NUMBERS, ORDER
from kernels.gpu.launch import Launch
from kernels.gpu.narrow import FP8_ARCH, KINDS, NarrowRows, narrow_norm, narrow_product, narrow_rows
from kernels.gpu.pack import GpuMatrix, chunk_columns
from kernels.gpu.pages import PAGE_FORMATS
from kernels.gpu.products import product
from kernels.gpu.target import PANEL, Target
from kernels.ops import AttentionShape

META: Final = torch.device("meta")
COLS, INNER, VOCAB = 4096, 14336, 128256
SHAPE: Final = AttentionShape(heads=32, kv_heads=8, head_dim=128, block_size=16)
_PROCESSORS: Final = {80: 108, 89: 128, 90: 132, 100: 148}


@dataclass(frozen=True, slots=True)
class Case:
    """bound: what limits the kernel on a GPU: memory, products, or scattered single words."""

    name: str
    bound: str
    launch: Launch


def matrix(kind: str, rows: int, cols: int, *, affine: bool = False, group: int = 32) -> GpuMatrix:
    """A packed matrix without contents."""
    columns = chunk_columns(kind)
    filled, chunks = -(-rows // PANEL) * PANEL, -(-cols // columns)
    if kind == "float":
        weights = torch.empty(filled, chunks * columns, dtype=torch.bfloat16, device=META)
        return GpuMatrix(kind, rows, cols, filled, chunks, weights, None, None, 0, 0, 0)
    groups = chunks * columns // group if group else 1
    words = torch.empty(filled // PANEL, chunks, PANEL, 16, dtype=torch.int32, device=META)
    scale = torch.empty(filled // PANEL, groups, PANEL, dtype=torch.float16, device=META)
    zero = 0 if affine else 8 if kind == "int4" else 128
    return GpuMatrix(kind, rows, cols, filled, chunks, words, scale, scale if affine else None, zero, group, groups)


def cases(arch: int) -> Iterator[Case]:
    yield from _product_cases(arch)
    yield from _narrow_cases(arch)
    yield from _attention_cases(arch)
    yield from _row_cases(arch)
    yield from _draw_cases(arch)


def _product_cases(arch: int) -> Iterator[Case]:
    kinds = (
        ("bf16", matrix("float", COLS, COLS), matrix("float", 2 * INNER, COLS)),
        ("W8", matrix("int8", COLS, COLS), matrix("int8", 2 * INNER, COLS)),
        ("W4", matrix("int4", COLS, COLS), matrix("int4", 2 * INNER, COLS)),
        ("W4 with minima", matrix("int4", COLS, COLS, affine=True), matrix("int4", 2 * INNER, COLS, affine=True)),
    )
    for name, square, wide in kinds:
        for rows, bound in ((1, "memory"), (64, "memory"), (4096, "products")):
            x = _rows(rows, COLS, torch.bfloat16)
            residual = _rows(rows, COLS, torch.float32)
            for launch in _recorded(arch, partial(_product, x=x, weight=square, residual=residual)):
                what = "sum of segments" if "segments" in launch.arguments else f"linear {name}"
                yield Case(f"{what}, {rows} rows", bound, launch)
            gated = _recorded(arch, partial(_gated, x=x, weight=wide))
            yield Case(f"gated linear {name}, {rows} rows", bound, gated[0])


def _narrow_cases(arch: int) -> Iterator[Case]:
    x, gain = _rows(64, COLS, torch.float32), _rows(1, COLS, torch.float32)[0]
    for kind in KINDS if arch >= FP8_ARCH else ("int8",):
        square, wide = _narrow(COLS, kind), _narrow(2 * INNER, kind)
        for rows, bound in ((1, "memory"), (64, "memory"), (4096, "products")):
            given, residual = _narrow(rows, kind), _rows(rows, COLS, torch.float32)
            plain = _recorded(arch, partial(_narrow_product, x=given, weight=square, residual=residual))
            yield Case(f"linear {kind} by {kind}, {rows} rows", bound, plain[0])
            gated = _recorded(arch, partial(_narrow_gated, x=given, weight=wide))
            yield Case(f"gated linear {kind} by {kind}, {rows} rows", bound, gated[0])
        for name, call in (("rows", partial(_narrowed, x=x)), ("rms_norm", partial(_narrow_normed, x=x, gain=gain))):
            yield Case(f"{name} to {kind}", "memory", _recorded(arch, partial(call, kind=kind))[0])


def _narrow(rows: int, kind: str) -> NarrowRows:
    codes = torch.empty(rows, COLS, dtype=KINDS[kind], device=META)
    return NarrowRows(kind, COLS, codes, torch.empty(rows, device=META))


def _narrow_product(ops: GpuOps, x: NarrowRows, weight: NarrowRows, residual: Tensor) -> Tensor:
    return narrow_product(ops.target, x, weight, residual=residual)


def _narrow_gated(ops: GpuOps, x: NarrowRows, weight: NarrowRows) -> Tensor:
    return narrow_product(ops.target, x, weight, gated=True, out_type=torch.bfloat16)


def _narrowed(ops: GpuOps, x: Tensor, kind: str) -> Tensor:
    return narrow_rows(ops.target, x, kind).codes


def _narrow_normed(ops: GpuOps, x: Tensor, gain: Tensor, kind: str) -> Tensor:
    return narrow_norm(ops.target, x, gain, 1e-5, kind).codes


def _attention_cases(arch: int) -> Iterator[Case]:
    plain, windowed = attention.NO_EXTRAS, attention.Extras(window=128, sinks=_rows(1, 64, torch.float32)[0])
    capped = attention.Extras(window=4096, softcap=50.0)
    shapes = {
        "D=64": (replace(SHAPE, heads=64, head_dim=64), windowed),
        "D=80": (replace(SHAPE, heads=32, kv_heads=32, head_dim=80), plain),
        "D=96": (replace(SHAPE, heads=32, kv_heads=32, head_dim=96), plain),
        "D=128": (SHAPE, plain),
        "D=256": (replace(SHAPE, heads=16, kv_heads=8, head_dim=256), capped),
    }
    for page in ("bf16", "fp8", "int8"):
        for name, (shape, extras) in shapes.items():
            if page != "bf16" and name != "D=128":
                continue
            yield from _attention(arch, page, name, shape, extras)
    for size in (64, 256):
        yield from _attention(arch, "bf16", f"D=128, blocks of {size}", replace(SHAPE, block_size=size), plain)


def _attention(arch: int, page: str, name: str, shape: AttentionShape, extras: attention.Extras) -> Iterator[Case]:
    """Decodes and prefills are one kernel."""
    pages = PAGE_FORMATS[page]
    tensor = torch.empty(
        64, *pages.page(shape.block_size, shape.kv_heads, shape.head_dim), dtype=pages.dtype, device=META
    )
    q = torch.empty(64, shape.heads, shape.head_dim, device=META)
    work = attention.GpuPlan(
        rows=attention.NO_ROWS,
        shape=shape,
        window=extras.window,
        items=torch.empty(64, 8, dtype=torch.int32, device=META),
        merges=torch.empty(16, 4, dtype=torch.int32, device=META),
        tables=torch.empty(16, 64, dtype=torch.int32, device=META),
        parts=64,
    )
    both = _recorded(
        arch,
        lambda ops: attention.attend(ops.target, q, tensor, tensor, work, pages, 0.125, extras, torch.bfloat16),
    )
    yield Case(f"attention {page} {name}", "products", both[0])
    if page == "bf16":
        yield Case(f"merge of splits {name}", "memory", both[1])


def _row_cases(arch: int) -> Iterator[Case]:
    x = _rows(64, COLS, torch.float32)
    gain = _rows(1, COLS, torch.float32)[0]
    yield Case("rms_norm", "memory", _recorded(arch, lambda ops: ops.rms_norm(x, gain, 1e-5))[0])
    wide = _rows(64, 2 * INNER, torch.float32)
    yield Case("silu_mul", "memory", _recorded(arch, lambda ops: ops.silu_mul(wide))[0])
    ids = torch.empty(64, dtype=torch.int64, device=META)
    for kind in ("float", "int8", "int4"):
        table = matrix(kind, VOCAB, COLS)
        found = _recorded(arch, partial(GpuOps.embedding, token_ids=ids, weight=table))
        yield Case(f"embedding {kind}", "memory", found[0])
    angles = _rows(64, SHAPE.head_dim // 2, torch.float32)
    qkv = _rows(64, (SHAPE.heads + 2 * SHAPE.kv_heads) * SHAPE.head_dim, torch.float32)
    for page in ("bf16", "fp8", "int8"):
        pages = PAGE_FORMATS[page]
        tensor = torch.empty(64, *pages.page(16, SHAPE.kv_heads, SHAPE.head_dim), dtype=pages.dtype, device=META)
        launches = _recorded(arch, partial(_rotated, qkv=qkv, angles=angles, pages=tensor, slots=ids), page)
        yield Case(f"rope and cache write {page}", "memory", launches[0])


def _draw_cases(arch: int) -> Iterator[Case]:
    logits = _rows(8, VOCAB, torch.float32)
    integers = torch.empty(4096, dtype=torch.int32, device=META)
    orders = draws.Orders(
        orders=torch.empty(8, ORDER.value, dtype=torch.int64, device=META),
        numbers=torch.empty(8, NUMBERS.value, dtype=torch.float64, device=META),
        tokens=integers,
        bias_ids=integers,
        biases=torch.empty(4096, device=META),
        bans=integers,
        mask_words=integers,
        longest=4096,
        top_width=20,
        adjusts=True,
    )
    found = _recorded(arch, lambda ops: draws.draw(ops.target, logits, orders).token_ids)
    names = (("count of seen tokens", "scattered"), ("adjusted logits", "memory"), ("draw", "memory"))
    for (name, bound), launch in zip(names, found, strict=True):
        yield Case(name, bound, launch)
    yield Case("greedy", "memory", _recorded(arch, lambda ops: draws.greedy(ops.target, logits).token_ids)[0])


def _product(ops: GpuOps, x: Tensor, weight: GpuMatrix, residual: Tensor) -> Tensor:
    return product(ops.target, x, weight, residual=residual)


def _gated(ops: GpuOps, x: Tensor, weight: GpuMatrix) -> Tensor:
    return product(ops.target, x, weight, gated=True, out_type=torch.bfloat16)


def _rotated(ops: GpuOps, qkv: Tensor, angles: Tensor, pages: Tensor, slots: Tensor) -> Tensor:
    return ops.rope_and_cache(qkv, angles, angles, pages, pages, slots, SHAPE)


def _recorded(arch: int, call: Callable[[GpuOps], Tensor], page: str = "bf16") -> list[Launch]:
    launches: list[Launch] = []
    target = Target(META, arch, _PROCESSORS[arch], torch.bfloat16, launches.append)
    call(GpuOps(target, PAGE_FORMATS[page]))
    return launches


def _rows(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(rows, cols, dtype=dtype, device=META)
