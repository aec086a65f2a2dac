"""Decode steps in static buffers on the GPU's kernels, as a recording would run them: the runner's tokens."""

from pathlib import Path

import pytest
from device_step import decode_as_runner
from tiny_model import TinySpec, write_tiny_model


@pytest.mark.timeout(200)
def test_tokens_are_those_of_the_runner(tmp_path: Path) -> None:
    """Rows that fill up, keys that are split and merged, and tokens that the host has not seen."""
    model = write_tiny_model(tmp_path / "tiny.gguf", TinySpec(context=600))
    decode_as_runner(model, "gpu", prompts=[3, 262], tokens=3, sequences=3, processors=8)
