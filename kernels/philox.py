"""Counter-based random numbers: Philox4x32-10.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; constants from its table 2
and the Random123 library. A number is a function of key and counter alone, so a draw can be repeated anywhere.
"""

import torch
from torch import Tensor

from kernels.written_out import log

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Words of 32 bits, held in int64 tensors that broadcast together; key words as integers. Four words out."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The products have up to 64 bits: int64 wraps, and the masks take the right bits whatever the sign.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, ((p0 >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = p1 & _MASK, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def gumbel(token_ids: Tensor, *, seed: int, position: int, choice: int) -> Tensor:
    """Standard Gumbel noise, float64, like `token_ids` (int64).

    Counter (position, token id, choice, 0), key = the seed's low and high word; the first word w gives the uniform
    (w + 1/2) / 2^32, which is exact in float64 and never 0 or 1. So noise lies within GUMBEL_RANGE.
    """
    at, which, zero = (torch.tensor([value], device=token_ids.device) for value in (position, choice, 0))
    counter = (at, token_ids, which, zero)  # single words stay single for the first rounds
    word = philox4x32(counter, (seed & _MASK, seed >> 32))[0]
    uniform = (word.to(torch.float64) + 0.5) * 2.0**-32
    return -log(-log(uniform))


GUMBEL_RANGE = (-3.14, 22.88)  # -log(-log(u)) at the smallest and the largest uniform, rounded outward
