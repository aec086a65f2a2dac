"""Products whose both operands have 8 bits, and the kernels that give activations 8 bits.

A row of activations has one scale, found when the row is at hand; a row of weights has one, stored. So both scales are
taken after the sum: out = scale of weights * scale of activations * sum. The sum is of int8 products in int32, exact in
any order; or of e4m3 products in float32, chunk by chunk of 128 columns, for any number of rows in the same order.

Layouts: weights [N, wide], activations [rows, wide]; wide is the columns filled up to chunks with zeros.
"""

import triton
import triton.language as tl

from kernels.gpu.device.linear import _finish
from kernels.gpu.device.numbers import FP8_LARGEST, FP8_UNIT, from_fp8, to_fp8, to_int8


@triton.jit
def _store_narrow(values, row, at, out, scale, wide, KIND: tl.constexpr):
    """values float32 [BLOCK], zero beyond the columns: the row in 8 bits, and its scale. One that holds a NaN or an
    infinity has the scale NaN."""
    LARGEST: tl.constexpr = FP8_LARGEST if KIND == "fp8" else 127.0
    size = tl.maximum(tl.max(tl.abs(values), axis=0), 1e-30)
    near = values * (LARGEST / size)
    codes = to_fp8(near) if KIND == "fp8" else to_int8(near)
    tl.store(out + row * wide + at, codes, mask=at < wide)
    tl.store(scale + row, size / LARGEST + tl.sum(values * 0.0, axis=0))


@triton.jit
def narrow_rows_kernel(x, out, scale, x_row, cols, wide, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows). BLOCK is the power of two above wide."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row * x_row + at, mask=at < cols, other=0.0).to(tl.float32)
    _store_narrow(values, row, at, out, scale, wide, KIND)


@triton.jit
def narrow_norm_kernel(
    x, weight, out, scale, x_row, eps, wide, COLS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (rows): `rms_norm_kernel`, and its result in 8 bits without a float32 one between."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < COLS
    values = tl.load(x + row * x_row + at, mask=inside, other=0.0)
    gain = tl.load(weight + at, mask=inside, other=0.0)
    mean = tl.sum(values * values, axis=0) / COLS
    _store_narrow(values * (1.0 / tl.sqrt(mean + eps)) * gain, row, at, out, scale, wide, KIND)


@triton.jit
def _add(acc, ws, xs, KIND: tl.constexpr, BLOCK_K: tl.constexpr, INTERPRET: tl.constexpr):
    """acc [N, rows] + ws [N, BLOCK_K] times xs [rows, BLOCK_K]."""
    if KIND == "int8":
        return tl.dot(ws, tl.trans(xs), acc, out_dtype=tl.int32)
    elif INTERPRET:
        wide = from_fp8(ws).to(tl.float32) * FP8_UNIT
        return tl.dot(wide, tl.trans(from_fp8(xs).to(tl.float32) * FP8_UNIT), acc, input_precision="ieee")
    else:
        # The tensor core of sm_90 adds e4m3 products in fewer bits than float32 has: a chunk at most goes by that.
        return tl.dot(ws, tl.trans(xs), acc, max_num_imprecise_acc=BLOCK_K)


@triton.jit
def narrow_linear_kernel(
    x,
    x_scale,
    w,
    w_scale,
    bias,
    residual,
    out,
    rows,
    wide,
    n_out,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_T: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Grid (tiles of N x tiles of rows), ordered as in `linear_kernel`. n_out: columns of the result; gated, the
    weights have twice as many rows, gate first."""
    tiles_n = tl.cdiv(n_out, BLOCK_N)
    tiles_t = tl.cdiv(rows, BLOCK_T)
    tile = tl.program_id(0)
    in_group = GROUP_T * tiles_n
    first_t = tile // in_group * GROUP_T
    together = tl.minimum(tiles_t - first_t, GROUP_T)
    row = (first_t + tile % in_group % together) * BLOCK_T + tl.arange(0, BLOCK_T)
    number = tile % in_group // together * BLOCK_N + tl.arange(0, BLOCK_N)
    inside, known = row < rows, number < n_out
    # What lies beyond the end is read from the first row, and not stored.
    x_base = tl.where(inside, row, 0).to(tl.int64) * wide
    stored = tl.where(known, number, 0).to(tl.int64)
    SUM: tl.constexpr = tl.int32 if KIND == "int8" else tl.float32
    acc = tl.zeros((BLOCK_N, BLOCK_T), SUM)
    acc_up = acc
    for first in range(0, wide, BLOCK_K):
        at = first + tl.arange(0, BLOCK_K)
        xs = tl.load(x + x_base[:, None] + at[None, :])
        acc = _add(acc, tl.load(w + (stored * wide)[:, None] + at[None, :]), xs, KIND, BLOCK_K, INTERPRET)
        if GATED:
            ups = tl.load(w + ((stored + n_out) * wide)[:, None] + at[None, :])
            acc_up = _add(acc_up, ups, xs, KIND, BLOCK_K, INTERPRET)
    each = tl.load(x_scale + row, mask=inside, other=0.0)[None, :]
    values = acc.to(tl.float32) * tl.load(w_scale + stored)[:, None] * each
    other = values
    if GATED:
        other = acc_up.to(tl.float32) * tl.load(w_scale + stored + n_out)[:, None] * each
    _finish(
        values, other, number, row, known[:, None] & inside[None, :], bias, residual, out, n_out, n_out,
        HAS_BIAS, HAS_RESIDUAL, GATED, INTERPRET,
    )  # fmt: skip
