"""log and exp in float64, written out in additions, multiplications and divisions.

Those are exact to the last bit everywhere, while a library's log and exp are not. So a draw made of these is the same
token on every back end, instruction set and library version. `kernels/cpu/native/written_out.h` is the same, operation
by operation.
"""

import torch
from torch import Tensor

_MANTISSA = (1 << 52) - 1
_ONE = 1023 << 52  # the bits of 1.0
_LN2 = 0.6931471805599453
_SQRT2 = 1.4142135623730951
_LOG2E = 1.4426950408889634
_LN2_HIGH = 0.6931467056274414  # its last 32 bits are zero: times a small whole number it is exact
_LN2_LOW = 4.7493250390316726e-07
_ROUNDER = 6755399441055744.0  # 1.5 * 2^52: what is added to it and taken off again is rounded to an integer

WEIGHT_BITS = 44
_WEIGHTLESS = -32.0  # scores below it weigh nothing; e^-32 is less than half of 2^-WEIGHT_BITS


def log(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal float64, to about one unit in the last place.

    x = m * 2^e with m between sqrt(1/2) and sqrt(2), and ln m = 2 artanh(s) for s = (m - 1) / (m + 1), by its series.
    """
    bits = x.view(torch.int64)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & _MANTISSA) | _ONE).view(torch.float64)
    high = mantissa > _SQRT2
    mantissa = torch.where(high, mantissa * 0.5, mantissa)
    exponent = torch.where(high, exponent + 1, exponent)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    series = torch.full_like(z, 1 / 21)
    for odd in range(19, 1, -2):
        series = series * z + 1 / odd
    return exponent.to(torch.float64) * _LN2 + (s + s) * (series * z + 1.0)


def weights(scores: Tensor) -> Tensor:
    """exp of scores (float64, at most 0) as whole numbers, int64: round(exp(score) * 2^WEIGHT_BITS).

    Sums of them are exact in any order, up to 2^18 of them. -inf weighs 0.
    """
    x = torch.where(scores < _WEIGHTLESS, _WEIGHTLESS, scores)
    power = (x * _LOG2E + _ROUNDER) - _ROUNDER
    r = (x - power * _LN2_HIGH) - power * _LN2_LOW
    series = torch.full_like(r, _INVERSE_FACTORIALS[-1])
    for factor in _INVERSE_FACTORIALS[-2::-1]:
        series = series * r + factor
    scaled = series * ((power.to(torch.int64) + (1023 + WEIGHT_BITS)) << 52).view(torch.float64)
    whole = torch.where(scores < _WEIGHTLESS, 0.0, (scaled + _ROUNDER) - _ROUNDER)
    return whole.to(torch.int64)


def _inverse_factorials(count: int) -> tuple[float, ...]:
    values, factorial = [], 1
    for n in range(count):
        factorial *= max(n, 1)
        values.append(1 / factorial)
    return tuple(values)


_INVERSE_FACTORIALS = _inverse_factorials(14)
