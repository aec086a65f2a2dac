"""The generator against Random123's published vectors, and the noise made of it."""

import math

import pytest
import torch

from kernels.philox import GUMBEL_RANGE, gumbel, philox4x32

# Random123, tests/kat_vectors, "philox4x32 10": counter, key, result.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in words(counter))
    k0, k1 = words(key)
    assert [int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1))] == words(expected)


def test_noise_depends_on_each_of_its_arguments() -> None:
    ids = torch.arange(100)
    base = gumbel(ids, seed=5, position=7, choice=0)
    others = [
        gumbel(ids, seed=6, position=7, choice=0),
        gumbel(ids, seed=5 + (1 << 32), position=7, choice=0),
        gumbel(ids, seed=5, position=8, choice=0),
        gumbel(ids, seed=5, position=7, choice=1),
        gumbel(ids + 100, seed=5, position=7, choice=0),
    ]
    assert torch.equal(base, gumbel(ids, seed=5, position=7, choice=0))
    assert torch.equal(base[40:60], gumbel(ids[40:60], seed=5, position=7, choice=0))
    for other in others:
        assert not torch.isclose(base, other).any()


def test_noise_has_the_moments_of_a_gumbel_and_stays_in_its_range() -> None:
    noise = gumbel(torch.arange(200_000), seed=2**64 - 1, position=2**31, choice=3)
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.05)
    smallest, largest = (-math.log(-math.log(u)) for u in (0.5 * 2**-32, 1 - 0.5 * 2**-32))
    assert GUMBEL_RANGE[0] <= smallest <= noise.min()
    assert noise.max() <= largest <= GUMBEL_RANGE[1]
