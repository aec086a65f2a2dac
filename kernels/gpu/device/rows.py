"""Kernels over single rows: norm, gate, rows of the embedding. Sums in float32; bandwidth is all they cost."""

import triton
import triton.language as tl

from kernels.gpu.device.numbers import from_small_unsigned, rounded


@triton.jit
def rms_norm_kernel(x, weight, out, x_stride, eps, COLS: tl.constexpr, BLOCK: tl.constexpr, INTERPRET: tl.constexpr):
    """Grid (rows). A program holds its row in registers and reads it once; BLOCK is the power of two above COLS."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < COLS
    values = tl.load(x + row * x_stride + at, mask=inside, other=0.0)
    gain = tl.load(weight + at, mask=inside, other=0.0)
    mean = tl.sum(values * values, axis=0) / COLS
    normed = values * (1.0 / tl.sqrt(mean + eps)) * gain
    tl.store(out + row * COLS + at, rounded(normed, out.dtype.element_ty, INTERPRET), mask=inside)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def silu_mul_kernel(gate_up, out, stride, inner, BLOCK: tl.constexpr, INTERPRET: tl.constexpr):
    """Grid (rows, inner / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(gate_up + row * stride + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * stride + inner + at, mask=inside, other=0.0)
    tl.store(out + row * inner + at, rounded(silu(gate) * up, out.dtype.element_ty, INTERPRET), mask=inside)


@triton.jit
def embedding_kernel(
    ids,
    w,
    scale,
    minimum,
    out,
    cols,
    chunks,
    groups,
    KIND: tl.constexpr,
    ZERO: tl.constexpr,
    AFFINE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows, cols / BLOCK). The layouts are those of `kernels.gpu.pack`. Compiled without fused multiply-add: the
    result is the stored weight, exactly."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids + row)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < cols
    panel, line = token // 64, token % 64
    if KIND == "float":
        values = tl.load(w + token * chunks * 64 + at, mask=inside, other=0.0).to(tl.float32)
    else:
        BITS: tl.constexpr = 4 if KIND == "int4" else 8
        COLUMNS: tl.constexpr = 512 // BITS  # of a chunk
        place = ((panel * chunks + at // COLUMNS) * 64 + line) * 16 + at % 16
        words = tl.load(w + place, mask=inside, other=0)
        stored = (words >> (at % COLUMNS // 16 * BITS)) & ((1 << BITS) - 1)
        group = at // GROUP if GROUP > 0 else at * 0
        place = (panel * groups + group) * 64 + line
        values = from_small_unsigned(stored, ZERO) * tl.load(scale + place, mask=inside, other=0.0).to(tl.float32)
        if AFFINE:
            values += tl.load(minimum + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * cols + at, values, mask=inside)
