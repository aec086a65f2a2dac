"""Rotation angles under every scaling, against formulas written out, and figures of transformers 4.57.6."""

import math

import pytest
import torch

from executor.models.rope import Rope, Yarn, rope_frequencies, rope_tables

YARN_ATTENTION_FACTOR = 1.138629436111989
YARN_FREQUENCIES = [
    1,
    0.7498942,
    0.56234133,
    0.42169651,
    0.31622776,
    0.23713736,
    0.17782794,
    0.13335215,
    0.1,
    0.070663102,
    0.049745575,
    0.034871057,
    0.024325214,
    0.016873235,
    0.011627212,
    0.0079498393,
    0.0053846152,
    0.0036052607,
    0.0023791364,
    0.0015408141,
    0.00097300857,
    0.00059284345,
    0.00044456986,
    0.00033338036,
    0.00025000001,
    0.00018747355,
    0.00014058533,
    0.00010542412,
    7.9056947e-05,
    5.9284346e-05,
    4.4456985e-05,
    3.3338038e-05,
]


def test_plain_frequencies() -> None:
    frequencies, magnitude = rope_frequencies(Rope(8, 10000.0))
    assert frequencies.tolist() == pytest.approx([1, 0.1, 0.01, 0.001])
    assert magnitude == 1


def test_tables_are_cosines_and_sines_of_position_times_frequency() -> None:
    tables = rope_tables(Rope(4, 100.0), 50)
    for position in (0, 1, 7, 49):
        for pair, frequency in enumerate((1.0, 0.1)):
            assert tables.cos[position, pair].item() == pytest.approx(math.cos(position * frequency), abs=1e-7)
            assert tables.sin[position, pair].item() == pytest.approx(math.sin(position * frequency), abs=1e-7)


def test_linear_scaling_stretches_positions() -> None:
    plain, stretched = rope_tables(Rope(64, 1e4), 40), rope_tables(Rope(64, 1e4, linear_factor=4.0), 157)
    torch.testing.assert_close(stretched.cos[::4], plain.cos, rtol=0, atol=1e-6)


def test_divisors_divide_frequencies() -> None:
    plain, _ = rope_frequencies(Rope(8, 1e4))
    divided, _ = rope_frequencies(Rope(8, 1e4), torch.tensor([1.0, 2.0, 4.0, 8.0]))
    assert divided.tolist() == pytest.approx((plain / torch.tensor([1, 2, 4, 8])).tolist())


def test_yarn() -> None:
    """head_dim 64, base 10000, factor 4, original context 2048: `_compute_yarn_parameters` of transformers."""
    frequencies, magnitude = rope_frequencies(Rope(64, 10000.0, yarn=Yarn(4.0, 2048)))
    assert magnitude == pytest.approx(YARN_ATTENTION_FACTOR, rel=1e-6)
    assert frequencies.tolist() == pytest.approx(YARN_FREQUENCIES, rel=1e-5)
