"""Device functions: how numbers are rounded where they are stored, and read where they are narrow.

INTERPRET is true in Triton's interpreter, whose own conversion to bfloat16 cuts off instead of rounding.
fp8 is e4m3 (arXiv:2209.05433) in uint8, read and made with whole-number arithmetic: so it is the same on targets
without an instruction for it, and in the interpreter.
"""

import triton
import triton.language as tl


@triton.jit
def rounded(values, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """float32 -> DTYPE, to the nearest, ties to even."""
    if INTERPRET and DTYPE == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        near = bits + 0x7FFF + ((bits >> 16) & 1)
        # A NaN could overflow into a number: its high half is kept as it is, with a bit that keeps it a NaN.
        kept = tl.where(values == values, near >> 16, (bits >> 16) | 0x40)
        return kept.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(DTYPE)


@triton.jit
def from_small_unsigned(u, ZERO: tl.constexpr):
    """uint8 -> float32(u) - ZERO, exact: the integer is put into the mantissa of 2^23, which is cheaper to undo than
    a conversion instruction."""
    whole = (u.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
    return whole - (8388608.0 + ZERO)


@triton.jit
def from_fp8(u):
    """uint8 e4m3 -> float16, of a 256th of the value; exact, for all but NaN."""
    bits = u.to(tl.int16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


FP8_UNIT = tl.constexpr(256.0)  # what `from_fp8` leaves out
FP8_LARGEST = tl.constexpr(448.0)


@triton.jit
def to_fp8(values):
    """float32 -> uint8 e4m3, to the nearest, ties to even; what is larger than 448 becomes 448, NaN becomes NaN."""
    size = tl.minimum(tl.abs(values), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the step is 2^-9. Adding 1.5 * 2^23 rounds to whole steps; times 512 is exact, fused or not.
    small = (size * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(values == values, code, 0x7F)
    sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def to_int8(values):
    """float32 within [-127.5, 127.5) -> int8, to the nearest, ties to even."""
    whole = (values + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return whole.to(tl.int8)
