"""The product with a weight matrix, transposed: weights are the left operand, activations the right one.

So the tensor core's instruction is the same for one row and for thousands (its width differs, its order of summing
along K does not), and dequantized weights go to it from registers.
K is summed in segments of SEGMENT chunks: from zero within a segment, in float32, chunk by chunk; then segments are
added in order. A small batch gives each segment a program of its own and adds the partial sums in `reduce_kernel`; a
large one does both in one program. Both orders are the same, so a row's bits do not depend on which it was.

Layouts (`kernels.gpu.pack`), N filled up to panels of 64 rows and K to whole chunks, with zeros:
  float  [N, K]; a chunk is 64 columns
  int8   words [N / 64][K / 64][64 rows][16]: byte i of word j is column 16 i + j; unsigned, ZERO is taken off
  int4   words [N / 64][K / 128][64 rows][16]: likewise with half bytes
  scale, minimum [N / 64][groups][64 rows]; w = scale * (q - ZERO) + minimum
So a tile of weights is one piece of memory, read 16 bytes a thread, and each half byte's place in a word gives 16
columns of one group: no scale is spread along a row, nothing is shuffled.
"""

import triton
import triton.language as tl

from kernels.gpu.device.numbers import from_small_unsigned, rounded
from kernels.gpu.device.rows import silu


@triton.jit
def _activations(x, base, inside, column, cols, EVEN_K: tl.constexpr, OPERAND: tl.constexpr, WIDTH: tl.constexpr):
    """[WIDTH, rows]: WIDTH columns from `column` on, transposed."""
    at = column + tl.arange(0, WIDTH)
    mask = inside[:, None] if EVEN_K else inside[:, None] & (at < cols)[None, :]
    return tl.trans(tl.load(x + base[:, None] + at[None, :], mask=mask, other=0.0).to(OPERAND))


@triton.jit
def _add_chunk(
    acc, x, base, inside, cols, chunk, w, scale, minimum, number, panel, line, chunks, groups,
    KIND: tl.constexpr, ZERO: tl.constexpr, AFFINE: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    OPERAND: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """acc [N, rows] plus the product of one chunk's columns."""
    if KIND == "float":
        wide = tl.arange(0, 64)
        weights = tl.load(w + number[:, None] * (chunks * 64) + (chunk * 64 + wide)[None, :])
        if weights.dtype != OPERAND:
            weights = rounded(weights.to(tl.float32), OPERAND, INTERPRET)
        xs = _activations(x, base, inside, chunk * 64, cols, EVEN_K, OPERAND, 64)
        acc = tl.dot(weights, xs, acc, input_precision="ieee")
    else:
        BITS: tl.constexpr = 4 if KIND == "int4" else 8
        SLICES: tl.constexpr = 32 // BITS
        words = tl.load(w + ((panel * chunks + chunk) * 64 + line)[:, None] * 16 + tl.arange(0, 16)[None, :])
        for i in tl.static_range(SLICES):
            column = chunk * (16 * SLICES) + i * 16
            if i == 0 or GROUP == 16 or (GROUP == 32 and i % 2 == 0) or (GROUP == 64 and i % 4 == 0):
                group = column // GROUP if GROUP > 0 else 0
                place = (panel * groups + group) * 64 + line
                factor = tl.load(scale + place).to(tl.float32)[:, None]
                if AFFINE:
                    least = tl.load(minimum + place).to(tl.float32)[:, None]
            values = from_small_unsigned((words >> (BITS * i)) & ((1 << BITS) - 1), ZERO) * factor
            if AFFINE:
                values += least
            xs = _activations(x, base, inside, column, cols, EVEN_K, OPERAND, 16)
            acc = tl.dot(rounded(values, OPERAND, INTERPRET), xs, acc, input_precision="ieee")
    return acc


@triton.jit
def _finish(
    values, other, number, row, mask, bias, residual, out, n_out, inner,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """values [N, rows], and in the gated form `other`, the up's: bias, gate, residual, store."""
    if HAS_BIAS:
        values += tl.load(bias + number, mask=number < n_out, other=0.0)[:, None]
    if GATED:
        values = silu(values) * other
    place = row.to(tl.int64)[None, :] * n_out + number[:, None]
    if HAS_RESIDUAL:
        values += tl.load(residual + place, mask=mask, other=0.0)
    tl.store(out + place, rounded(values, out.dtype.element_ty, INTERPRET), mask=mask)


@triton.jit
def linear_kernel(
    x,
    w,
    scale,
    minimum,
    bias,
    residual,
    out,
    partial,
    rows,
    cols,
    n_out,
    n_filled,
    chunks,
    groups,
    x_row,
    KIND: tl.constexpr,
    ZERO: tl.constexpr,
    AFFINE: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    OPERAND: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP_T: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Grid (tiles of N x tiles of rows, segments if SPLIT else 1). Tile BLOCK_N x BLOCK_T, a chunk a time; sums in
    float32. n_out: columns of the result; gated, the weights have twice as many, gate first.

    Programs that run together share weights: GROUP_T tiles of rows, then the next tile of N.
    """
    tiles_n = tl.cdiv(n_out, BLOCK_N)
    tiles_t = tl.cdiv(rows, BLOCK_T)
    tile = tl.program_id(0)
    in_group = GROUP_T * tiles_n
    first_t = tile // in_group * GROUP_T
    wide = tl.minimum(tiles_t - first_t, GROUP_T)
    tile_t = first_t + tile % in_group % wide
    tile_n = tile % in_group // wide

    row = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = row < rows
    base = row.to(tl.int64) * x_row
    number = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows of weights beyond the end are read again from the last panel, and not stored.
    stored = tl.where(number < n_filled, number, n_filled - 64 + number % 64).to(tl.int64)
    panel, line = stored // 64, stored % 64
    if GATED:
        up = tl.where(number < n_filled, number, n_filled - 64 + number % 64).to(tl.int64) + n_out
        up_panel = up // 64

    segments = tl.cdiv(chunks, SEGMENT)
    if SPLIT:
        first = tl.program_id(1)
        last = first + 1
    else:
        first = 0
        last = segments
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    total_up = total
    for segment in range(first, last):
        acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        acc_up = acc
        for chunk in range(segment * SEGMENT, tl.minimum((segment + 1) * SEGMENT, chunks)):
            acc = _add_chunk(
                acc, x, base, inside, cols, chunk, w, scale, minimum, stored, panel, line, chunks, groups,
                KIND, ZERO, AFFINE, GROUP, EVEN_K, OPERAND, INTERPRET,
            )  # fmt: skip
            if GATED:
                acc_up = _add_chunk(
                    acc_up, x, base, inside, cols, chunk, w, scale, minimum, up, up_panel, line, chunks, groups,
                    KIND, ZERO, AFFINE, GROUP, EVEN_K, OPERAND, INTERPRET,
                )  # fmt: skip
        total += acc
        if GATED:
            total_up += acc_up

    mask = (number < n_out)[:, None] & inside[None, :]
    if SPLIT:
        # partial [segments][rows][N], gated [segments][rows][2 N]
        width = n_out * 2 if GATED else n_out
        place = (first.to(tl.int64) * rows + row)[None, :] * width + number[:, None]
        tl.store(partial + place, total, mask=mask)
        if GATED:
            tl.store(partial + place + n_out, total_up, mask=mask)
    else:
        _finish(
            total, total_up, number, row, mask, bias, residual, out, n_out, n_out,
            HAS_BIAS, HAS_RESIDUAL, GATED, INTERPRET,
        )  # fmt: skip


@triton.jit
def reduce_kernel(
    partial,
    bias,
    residual,
    out,
    rows,
    n_out,
    segments,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Grid (rows, N / BLOCK): the segments' sums in order, and what `linear_kernel` does at its end."""
    row = tl.program_id(0)
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = number < n_out
    width = n_out * 2 if GATED else n_out
    total = tl.zeros((BLOCK,), tl.float32)
    total_up = total
    place = row.to(tl.int64) * width + number
    for _ in range(0, segments):
        total += tl.load(partial + place, mask=inside, other=0.0)
        if GATED:
            total_up += tl.load(partial + place + n_out, mask=inside, other=0.0)
        place += rows * width
    total, total_up = total[:, None], total_up[:, None]
    one = row + tl.arange(0, 1)
    _finish(
        total, total_up, number, one, inside[:, None], bias, residual, out, n_out, n_out,
        HAS_BIAS, HAS_RESIDUAL, GATED, INTERPRET,
    )  # fmt: skip
