"""Rotation angles: frequencies with their scaling, and the tables that rows are read from.

Owns: the scaling schemes by name. Must not know: where the numbers come from.
Sources: arXiv:2104.09864 (rotary embedding), arXiv:2306.15595 (linear), arXiv:2309.00071 (YaRN, with the correction
range and attention factor of its section 3.4). Llama 3's blend comes as a tensor of divisors, one per pair.
Invariant: everything is computed in float64 and rounded once, when the tables are made.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Yarn:
    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # on top of YaRN's own


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions become angles. At most one scaling; `divisors` (float32 [D/2]) is Llama 3's."""

    head_dim: int
    base: float
    linear_factor: float = 1.0
    yarn: Yarn | None = None


@dataclass(frozen=True, slots=True)
class RopeTables:
    """float32 [positions, D/2]."""

    cos: Tensor
    sin: Tensor

    @property
    def nbytes(self) -> int:
        return self.cos.nbytes + self.sin.nbytes


def rope_tables(rope: Rope, positions: int, divisors: Tensor | None = None) -> RopeTables:
    frequencies, magnitude = rope_frequencies(rope, divisors)
    angles = torch.arange(positions, dtype=torch.float64).unsqueeze(1) * frequencies
    return RopeTables((angles.cos() * magnitude).to(torch.float32), (angles.sin() * magnitude).to(torch.float32))


def rope_frequencies(rope: Rope, divisors: Tensor | None = None) -> tuple[Tensor, float]:
    """Radians per position, float64 [D/2], and the factor of cosines and sines."""
    exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.float64) / rope.head_dim
    frequencies = rope.base**-exponents
    if divisors is not None:
        frequencies = frequencies / divisors.to(torch.float64)
    if rope.yarn is None:
        return frequencies / rope.linear_factor, 1.0
    low, high = _correction_range(rope, rope.yarn)
    pairs = torch.arange(rope.head_dim // 2, dtype=torch.float64)
    ramp = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)  # 0: keep the frequency, 1: interpolate it
    blended = frequencies * (1 - ramp) + frequencies / rope.yarn.factor * ramp
    return blended, rope.yarn.attention_factor * (0.1 * math.log(rope.yarn.factor) + 1.0)


def _correction_range(rope: Rope, yarn: Yarn) -> tuple[float, float]:
    def pair_of(rotations: float) -> float:
        """The pair that turns so often within the original context."""
        turns = yarn.original_context / (rotations * 2 * math.pi)
        return rope.head_dim * math.log(turns) / (2 * math.log(rope.base))

    low, high = math.floor(pair_of(yarn.beta_fast)), math.ceil(pair_of(yarn.beta_slow))
    return max(low, 0), min(high, rope.head_dim - 1)
