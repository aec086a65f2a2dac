"""The default model end to end on the GPU's kernels, operands in float32: the golden greedy tokens."""

import json
from pathlib import Path

import pytest
from step_driver import generate

from executor.loading.load import load_runner

GOLDEN = Path(__file__).parents[2] / "golden" / "llama_smollm2.json"
PROMPT_TOKENS = 4
OUTPUT_TOKENS = 2


@pytest.mark.model
@pytest.mark.timeout(300)
def test_golden_tokens(default_model_path: Path) -> None:
    """Prompts of one batch, then decodes of one batch. A token takes half a minute, so there are few."""
    runner = load_runner(
        default_model_path, backend="gpu", block_size=16, total_blocks=8, max_batched_tokens=32, max_sequences=2
    )
    cases = [case for case in json.loads(GOLDEN.read_text())["cases"] if len(case["prompt"]) == PROMPT_TOKENS]
    assert len(cases) == 2
    outputs = generate(runner, [case["prompt"] for case in cases], OUTPUT_TOKENS)
    assert outputs == [case["output"][:OUTPUT_TOKENS] for case in cases]
