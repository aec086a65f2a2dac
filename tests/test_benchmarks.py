"""The benchmarks of batching still run, and say of a tiny model what holds of any: figures in steps, not in seconds."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_model import TinySpec, write_tiny_model

ROOT = Path(__file__).parents[1]
SEVEN_AND_ONE = ("--batch", "8", "--groups", "4", "--short", "3", "--long", "40", "--equal", "6", "--rounds", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", TinySpec())


def report(script: str, model: Path, arguments: Sequence[str]) -> dict[str, object]:
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--model", str(model), "--threads", "1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=55)
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_continuous_batching_needs_fewer_steps_and_equal_lengths_the_same(model: Path) -> None:
    told = report("continuous_batching.py", model, (*SEVEN_AND_ONE, "--seconds", "10000"))
    assert told["groups"] == 4
    ratios: dict[str, float] = told["ratios"]  # type: ignore[assignment]
    assert ratios["tokens_per_step_to_padded"] > 2
    assert ratios["tokens_per_step_to_padded"] == ratios["tokens_per_step_to_compact"]
    assert 1 <= ratios["equal_lengths_tokens_per_step"] <= 1.05


def test_a_short_request_is_three_steps_behind_a_long_prompt(model: Path) -> None:
    told = report(
        "short_behind_long.py", model, ("--batched", "32", "--long", "200", "--context", "256", "--short", "5")
    )
    assert told["steps"] == 3
    assert told["tokens_of_steps"][-1] >= 5  # type: ignore[index]
