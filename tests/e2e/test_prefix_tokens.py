"""A prefix hit changes no token: a real model with and without the cache, greedy and drawn, chats and preemption."""

from dataclasses import replace
from pathlib import Path

import pytest
from prefix_driver import Driver, output_of, usage_of
from tiny_model import write_tiny_model

from executor.loading.load import load_runner
from executor.runner import Runner
from executor.step import SamplingParams
from services.scheduler.core.calls import CoreConfig

DRAWN = SamplingParams(
    temperature=0.9, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1, seed=1234
)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    path = write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    return load_runner(
        path, backend=request.param, block_size=4, total_blocks=96, max_batched_tokens=64, max_sequences=8
    )


def chats(runner: Runner, *, cache: bool, core: CoreConfig) -> tuple[list[list[int]], int]:
    """Two rounds of six chats with a common start; outputs, and prompt tokens found in the cache."""
    driver = Driver(core, cache=cache)
    driver.attach("lane", runner)
    shared = [(7 * index) % 256 for index in range(22)]
    prompts = [[*shared, 30 + index, 40 + index] for index in range(6)]
    outputs, cached = [], 0
    for turn in range(2):
        samplings = [
            replace(DRAWN, seed=index + 10 * turn) if index % 2 else SamplingParams(temperature=0.0)
            for index in range(6)
        ]
        lives = [driver.submit(prompt, 14, sampling=one) for prompt, one in zip(prompts, samplings, strict=True)]
        driver.drain()
        outputs += [output_of(live) for live in lives]
        cached += sum(usage_of(live).cached_tokens for live in lives)
        prompts = [[*live.answers[0].ids, 60 + turn, 61] for live in lives]
    return outputs, cached


@pytest.mark.parametrize(
    "core", [CoreConfig(), CoreConfig(prefill_chunk=5, steps_in_flight=1)], ids=["whole", "chunks"]
)
def test_tokens_are_the_same_with_and_without_the_cache(tiny: Runner, core: CoreConfig) -> None:
    without, none = chats(tiny, cache=False, core=core)
    outputs, cached = chats(tiny, cache=True, core=core)
    assert none == 0
    assert cached >= 5 * 20 + 6 * 32
    assert outputs == without


def test_tokens_survive_preemption_with_the_cache(tiny: Runner) -> None:
    core = CoreConfig(prefill_chunk=16, watermark=0.0, default_output_estimate=1)
    shared = [(5 * index) % 256 for index in range(12)]
    results = []
    for cache in (False, True):
        driver = Driver(core, cache=cache)
        driver.attach("lane", tiny)
        lives = [driver.submit([*shared, index], 60 + index, sampling=replace(DRAWN, seed=index)) for index in range(8)]
        for _ in range(20):
            driver.round()
        assert len(driver.core.sequences()) == 8
        driver.drain()
        results.append([output_of(live) for live in lives])
    assert results[0] == results[1]


@pytest.mark.model
@pytest.mark.timeout(300)
def test_the_real_model_with_and_without_the_cache(default_model_path: Path) -> None:
    runner = load_runner(
        default_model_path,
        backend="reference",
        block_size=8,
        total_blocks=32,
        max_batched_tokens=64,
        max_sequences=4,
        max_model_len=64,
    )
    shared = [(31 * index) % 40000 + 5 for index in range(17)]
    results = []
    for cache in (False, True):
        driver = Driver(cache=cache)
        driver.attach("lane", runner)
        lives = [driver.submit([*shared, 100 + index], 3, sampling=replace(DRAWN, seed=index)) for index in range(3)]
        driver.drain()
        results.append([output_of(live) for live in lives])
        assert sum(usage_of(live).cached_tokens for live in lives) == (32 if cache else 0)
    assert results[0] == results[1]
