"""A sequence that starts behind blocks which another one wrote: same tokens, and nothing taken on trust in the step."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_model import VOCAB, write_tiny_model

from executor.loading.load import load_runner
from executor.runner import Runner, StepError
from executor.step import NewSequence, SamplingParams, Slice, Step

SIZE = 4
IDS = [(37 * index) % 250 for index in range(18)]
PENALIZED = SamplingParams(
    temperature=0.8, seed=3, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.3, min_tokens=2
)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    path: Path = write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    return load_runner(
        path, backend=request.param, block_size=SIZE, total_blocks=16, max_batched_tokens=64, max_sequences=4
    )


@pytest.fixture
def runner(shared: Runner) -> Runner:
    shared.reset()
    shared.pool.fill(math.nan)
    return shared


def whole(ids: list[int], blocks: tuple[int, ...], sampling: SamplingParams, prompt_len: int | None = None) -> Slice:
    return Slice(0, 0, len(ids), tuple(ids), blocks, True, NewSequence(sampling, prompt_len or len(ids)))


def behind(
    cached: int, ids: list[int], blocks: tuple[int, ...], sampling: SamplingParams, prompt_len: int | None = None
) -> Slice:
    new = NewSequence(sampling, prompt_len or len(ids), tuple(ids[:cached]))
    return Slice(1, cached, len(ids) - cached, tuple(ids[cached:]), blocks, True, new)


def drawn(runner: Runner, part: Slice, count: int, step_id: int = 1) -> list[int]:
    tokens = list(runner.run(Step(step_id, (part,))).results[0].token_ids)
    for index in range(1, count):
        more = Slice(part.slot, part.start + part.count + index - 1, 1, (), (), True)
        tokens += runner.run(Step(step_id + index, (more,))).results[0].token_ids
    return tokens


@pytest.mark.parametrize("cached", [4, 8, 16])
@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), PENALIZED], ids=["greedy", "penalties"])
@pytest.mark.parametrize("prompt_len", [18, 6])
def test_tokens_are_those_of_a_sequence_that_computed_everything(
    runner: Runner, cached: int, sampling: SamplingParams, prompt_len: int
) -> None:
    alone = drawn(runner, whole(IDS, (0, 1, 2, 3, 4, 5), sampling, prompt_len), 5)
    blocks = (*range(cached // SIZE), 8, 9, 10, 11, 12, 13)
    assert drawn(runner, behind(cached, IDS, blocks, sampling, prompt_len), 5, step_id=6) == alone


def test_who_shares_goes_on_undisturbed(runner: Runner) -> None:
    greedy = SamplingParams(temperature=0.0)
    alone = drawn(runner, whole(IDS, (0, 1, 2, 3, 4, 5, 6), greedy), 8)
    runner.reset()
    first = list(runner.run(Step(1, (whole(IDS, (0, 1, 2, 3, 4, 5, 6), greedy),))).results[0].token_ids)
    other = behind(8, [*IDS[:8], 1, 2, 3], (0, 1, 8, 9, 10), greedy)
    step = Step(2, (Slice(0, 18, 1, (), (), True), other))
    first += runner.run(step).results[0].token_ids
    for index in range(2, 8):
        rows = (Slice(0, 17 + index, 1, (), (), True), Slice(1, 9 + index, 1, (), (), True))
        first += runner.run(Step(index + 1, rows)).results[0].token_ids
    assert first == alone


def change(part: Slice, **new: object) -> Slice:
    assert part.new is not None
    return replace(part, new=replace(part.new, **new))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            lambda part: behind(7, IDS, (0, 1, 8, 9, 10), SamplingParams(temperature=0.0)),
            "7 cached_token_ids do not fill blocks of 4",
        ),
        (lambda part: change(part, cached_token_ids=()), "start is 8, 0 positions are computed"),
        (lambda part: change(part, cached_token_ids=tuple(IDS[:12])), "start is 8, 12 positions are computed"),
        (lambda part: change(part, cached_token_ids=(VOCAB,) * 8), f"token id {VOCAB} is out of range"),
        (lambda part: replace(part, new_block_ids=(0, 1)), "18 tokens need more than 2 blocks"),
        (lambda part: replace(part, new_block_ids=(0, 1, 1, 8, 9)), "a block occurs twice"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused(runner: Runner, broken: Callable[[Slice], Slice], message: str) -> None:
    part = behind(8, IDS, (0, 1, 8, 9, 10), SamplingParams(temperature=0.0))
    with pytest.raises(StepError, match=message):
        runner.run(Step(1, (broken(part),)))
    assert runner.live_sequences == 0


def test_a_block_is_not_shared_in_the_step_that_writes_it(runner: Runner) -> None:
    greedy = SamplingParams(temperature=0.0)
    parts = (whole(IDS, (0, 1, 2, 3, 4), greedy), behind(8, IDS, (0, 1, 8, 9, 10), greedy))
    for order in (parts, parts[::-1]):
        with pytest.raises(StepError, match=r"slot 0 writes to block \d, which slot 1 brings cached"):
            runner.run(Step(1, order))
