"""Decode steps in static buffers on the GPU's kernels, as a recording would run them: the runner's tokens."""

from array import array
from pathlib import Path

import pytest
import torch
from device_step import decode_as_runner
from tiny_model import TinySpec, write_tiny_model

from executor.device.decode import FAULT
from executor.device.draws import SlotSampler
from executor.step import SamplingParams
from kernels.gpu.target import present_target
from kernels.sampling import SampledSequence, sample


@pytest.mark.timeout(200)
def test_tokens_are_those_of_the_runner(tmp_path: Path) -> None:
    """Rows that fill up, keys that are split and merged, and tokens that the host has not seen."""
    model = write_tiny_model(tmp_path / "tiny.gguf", TinySpec(context=600))
    decode_as_runner(model, "gpu", prompts=[3, 262], tokens=3, sequences=3, processors=8)


def test_slots_draw_as_their_sequences_ask() -> None:
    """In any order of rows, at the position that the step says; a row of NaN is a fault of its own."""
    target = present_target()
    asked = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, seed=7),
        SamplingParams(temperature=1.2, top_k=20, top_p=0.9, seed=(1 << 64) - 3, choice=2),
        SamplingParams(temperature=1.0, min_p=0.05, seed=11),
    ]
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(3)) * 3
    sampler = SlotSampler(target, max_sequences=4, vocab=300)
    for slot, params in enumerate(asked):
        sampler.enter(slot, SampledSequence(params, array("i"), 1))
    order, lengths = [2, 0, 3, 1], [5, 1, 900, 33]
    pairs = zip(order, lengths, strict=True)
    sequences = [SampledSequence(asked[slot], array("i", [1] * length), 1) for slot, length in pairs]
    expected = [drawn.token_id for drawn in sample(logits, sequences)]
    positions = torch.tensor(lengths) - 1
    assert sampler.draw(logits, torch.tensor(order), positions).tolist() == expected
    logits[1] = torch.nan
    found = sampler.draw(logits, torch.tensor(order), positions).tolist()
    assert found == [expected[0], FAULT, *expected[2:]]
    with pytest.raises(ValueError, match="slot 1: penalties, biases, bans"):
        sampler.enter(1, SampledSequence(SamplingParams(presence_penalty=0.5), array("i"), 1))
