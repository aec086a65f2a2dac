"""log, exp and random words on the device: operation by operation `kernels.written_out` and `kernels.philox`.

Only additions, multiplications, divisions and shifts, in float64 and in whole numbers, so a draw is the same token on
every back end. Launches set `fused=False`: a fused multiply-add would round once where these round twice.
"""

import triton
import triton.language as tl

from kernels import written_out

_ROUNDER = tl.constexpr(6755399441055744.0)  # 1.5 * 2^52
_LN2 = tl.constexpr(0.6931471805599453)
_SQRT2 = tl.constexpr(1.4142135623730951)
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2_HIGH = tl.constexpr(0.6931467056274414)
_LN2_LOW = tl.constexpr(4.7493250390316726e-07)
_WEIGHTLESS = tl.constexpr(-32.0)
_WEIGHT_BITS = tl.constexpr(written_out.WEIGHT_BITS)


@triton.jit
def log(x):
    """Natural logarithm of positive normal float64."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    high = mantissa > _SQRT2
    mantissa = tl.where(high, mantissa * 0.5, mantissa)
    exponent = tl.where(high, exponent + 1, exponent)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    series = z * 0.0 + 0.047619047619047616  # 1 / 21, 1 / 19, ... 1 / 3
    series = series * z + 0.05263157894736842
    series = series * z + 0.058823529411764705
    series = series * z + 0.06666666666666667
    series = series * z + 0.07692307692307693
    series = series * z + 0.09090909090909091
    series = series * z + 0.1111111111111111
    series = series * z + 0.14285714285714285
    series = series * z + 0.2
    series = series * z + 0.3333333333333333
    return exponent.to(tl.float64) * _LN2 + (s + s) * (series * z + 1.0)


@triton.jit
def weights(scores):
    """float64, at most 0 -> int64 round(exp(score) * 2^WEIGHT_BITS); below -32 nothing."""
    light = scores < _WEIGHTLESS
    x = tl.where(light, _WEIGHTLESS, scores)
    power = (x * _LOG2E + _ROUNDER) - _ROUNDER
    r = (x - power * _LN2_HIGH) - power * _LN2_LOW
    series = r * 0.0 + 1.6059043836821613e-10  # 1 / 13!, 1 / 12!, ... 1 / 0!
    series = series * r + 2.08767569878681e-09
    series = series * r + 2.505210838544172e-08
    series = series * r + 2.755731922398589e-07
    series = series * r + 2.7557319223985893e-06
    series = series * r + 2.48015873015873e-05
    series = series * r + 0.0001984126984126984
    series = series * r + 0.001388888888888889
    series = series * r + 0.008333333333333333
    series = series * r + 0.041666666666666664
    series = series * r + 0.16666666666666666
    series = series * r + 0.5
    series = series * r + 1.0
    series = series * r + 1.0
    scaled = series * ((power.to(tl.int64) + (1023 + _WEIGHT_BITS)) << 52).to(tl.float64, bitcast=True)
    whole = tl.where(light, 0.0, (scaled + _ROUNDER) - _ROUNDER)
    return whole.to(tl.int64)


@triton.jit
def philox_word(c0, c1, c2, k0, k1):
    """The first word of Philox4x32-10 of counter (c0, c1, c2, 0) and key (k0, k1); all uint32, of one shape."""
    c3 = c0 ^ c0
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, tl.full(c0.shape, 0xD2511F53, tl.uint32))
        low0 = c0 * 0xD2511F53
        high1 = tl.umulhi(c2, tl.full(c2.shape, 0xCD9E8D57, tl.uint32))
        low1 = c2 * 0xCD9E8D57
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0


@triton.jit
def gumbel(token, position, choice, key_low, key_high):
    """Standard Gumbel noise in float64; token uint32 [n], the others uint32 scalars."""
    zero = token ^ token
    word = philox_word(zero + position, token, zero + choice, zero + key_low, zero + key_high)
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
    return -log(-log(uniform))
