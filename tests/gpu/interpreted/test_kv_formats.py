"""A tiny model whose keys and values are kept in each of the formats: from the setting to the tokens."""

from pathlib import Path

import numpy as np
import pytest
from plain_llama import plain_logprobs
from step_driver import generate
from tiny_model import VOCAB, TinySpec, write_tiny_model

from executor.loading.load import load_runner
from executor.runner import Runner
from executor.sizing.files import read_shape
from executor.sizing.formats import find_cache

# The largest and the mean difference of a token's log-probability from float32's, of weights that are random.
TOLERANCE = {"bf16": (0.2, 0.04), "fp8": (0.6, 0.15), "int8": (0.3, 0.06)}
IDS = [(7 * at * at + 3) % VOCAB for at in range(18)]


def runner(path: Path, kv: str | None) -> Runner:
    return load_runner(
        path, backend="gpu", block_size=16, total_blocks=6, max_batched_tokens=64, max_sequences=2, kv=kv
    )


@pytest.mark.timeout(200)
def test_every_format_serves(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", TinySpec(layers=1))
    expected = np.array(plain_logprobs(path, IDS))
    made = {kv: runner(path, kv) for kv in TOLERANCE}
    for kv, own in made.items():
        assert own.kv_format == kv
        assert own.memory.pool_bytes == 6 * 16 * find_cache(kv).token_bytes(read_shape(path).shape)
        apart = np.abs(np.array(own.score(IDS, 1)) - expected)
        largest, mean = TOLERANCE[kv]
        assert (apart.max() < largest, apart.mean() < mean) == (True, True), (kv, apart.max(), apart.mean())
        assert generate(own, [IDS[:17], IDS[5:14]], 2)[1] == generate(own, [IDS[5:14]], 2)[0]
    assert len({own.numerics for own in made.values()}) == len(made)
    assert runner(path, None).numerics == made["bf16"].numerics
