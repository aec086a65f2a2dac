"""Logprobs of a prompt's tokens: the same however it is cut, those that drawing there would give, and right."""

import math
from pathlib import Path

import numpy as np
import pytest
from plain_llama import plain_logprobs
from tiny_model import VOCAB, TinySpec, write_tiny_model

from executor.loading.load import load_runner
from executor.runner import Runner, StepError
from executor.step import NewSequence, RowErrorCode, SamplingParams, Slice, SliceResult, Step, TokenLogprobs

PROMPT = [(7 * position * position + 3) % VOCAB for position in range(41)]
BLOCKS = tuple(range(8))


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", TinySpec())


@pytest.fixture(scope="module", params=["reference", "cpu"])
def runner(request: pytest.FixtureRequest, tiny_path: Path) -> Runner:
    return load_runner(
        tiny_path, backend=request.param, block_size=8, total_blocks=32, max_batched_tokens=96, max_sequences=6
    )


def chunks(runner: Runner, cuts: list[int], sampling: SamplingParams, slot: int = 0) -> list[SliceResult]:
    """The prompt in pieces that end at `cuts`; the last one samples."""
    runner.reset()
    results: list[SliceResult] = []
    for step_id, (start, end) in enumerate(zip([0, *cuts[:-1]], cuts, strict=True), 1):
        new = NewSequence(sampling, len(PROMPT)) if start == 0 else None
        ids = tuple(PROMPT[start:end])
        blocks = BLOCKS if start == 0 else ()
        part = Slice(slot, start, end - start, ids, blocks, samples=end == len(PROMPT), new=new)
        results += runner.run(Step(step_id, (part,))).results
    runner.reset()
    return results


def scores(results: list[SliceResult]) -> list[TokenLogprobs]:
    return [row for result in results for row in result.prompt_logprobs]


def test_they_are_the_same_however_the_prompt_is_cut(runner: Runner) -> None:
    asked = SamplingParams(temperature=0.0, prompt_logprobs=3)
    whole = chunks(runner, [41], asked)
    assert len(scores(whole)) == len(PROMPT) - 1
    assert all(len(row.top) == 3 and row.top[0][1] >= row.drawn for row in scores(whole))
    for cuts in ([1, 41], [1, 2, 3, 40, 41], [8, 16, 41], [20, 40, 41]):
        results = chunks(runner, cuts, asked)
        assert [len(result.prompt_logprobs) for result in results] == [
            end - max(start, 1) for start, end in zip([0, *cuts[:-1]], cuts, strict=True)
        ]
        assert scores(results) == scores(whole)
        assert results[-1].token_ids == whole[-1].token_ids
    plain = chunks(runner, [20, 41], SamplingParams(temperature=0.0))
    assert [result.token_ids for result in plain] == [whole[-1].token_ids]


def test_they_are_what_drawing_those_tokens_gives(runner: Runner) -> None:
    whole = scores(chunks(runner, [41], SamplingParams(prompt_logprobs=2)))
    for position in (1, 2, 17, 40):
        runner.reset()
        forced = SamplingParams(temperature=0.0, logit_bias=((PROMPT[position], 100.0),), logprobs=2)
        part = Slice(0, 0, position, tuple(PROMPT[:position]), BLOCKS, True, NewSequence(forced, position))
        (drawn,) = runner.run(Step(1, (part,))).results
        assert drawn.token_ids == (PROMPT[position],)
        assert drawn.logprobs == (whole[position - 1],)
    runner.reset()


def test_they_are_right(runner: Runner, tiny_path: Path) -> None:
    found = np.array([row.drawn for row in scores(chunks(runner, [41], SamplingParams(prompt_logprobs=0)))])
    independent = plain_logprobs(tiny_path, PROMPT)
    worst = 1e-3 if runner.backend == "reference" else 0.15  # `cpu` rounds activations to 8 bits
    assert np.abs(found - independent).max() < worst
    assert np.abs(found - np.array(runner.score(PROMPT, 1))).max() < 1e-5


def test_neighbours_do_not_matter_and_rows_are_told_apart(runner: Runner) -> None:
    asked = SamplingParams(temperature=0.0, prompt_logprobs=1)
    alone = chunks(runner, [41], asked)
    runner.reset()
    first = (
        Slice(0, 0, 5, tuple(PROMPT[:5]), (8,), False, NewSequence(SamplingParams(), 9)),
        Slice(1, 0, 30, tuple(PROMPT[:30]), BLOCKS, False, NewSequence(asked, 41)),
        Slice(2, 0, 3, (5, 6, 7), (9,), True, NewSequence(SamplingParams(temperature=0.0), 3)),
    )
    then = (
        Slice(0, 5, 4, tuple(PROMPT[5:9]), (10,), True),
        Slice(1, 30, 11, tuple(PROMPT[30:]), (), True),
        Slice(2, 3, 1, (), (), True),
    )
    one, two = runner.run(Step(1, first)).results, runner.run(Step(2, then)).results
    assert [result.slot for result in one] == [1, 2]
    assert [result.slot for result in two] == [0, 1, 2]
    assert scores([one[0], two[1]]) == scores(alone)
    runner.reset()


def test_the_shortest_prompt_has_none(runner: Runner) -> None:
    new = NewSequence(SamplingParams(temperature=0.0, prompt_logprobs=5), 1)
    (result,) = runner.run(Step(1, (Slice(0, 0, 1, (5,), (0,), True, new),))).results
    assert (result.prompt_logprobs, len(result.token_ids)) == ((), 1)
    runner.reset()


def test_never_more_logits_at_once_than_a_step_draws(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    logits = runner._model.logits
    monkeypatch.setattr(runner._model, "logits", lambda hidden: rows.append(hidden.shape[0]) or logits(hidden))
    chunks(runner, [41], SamplingParams(prompt_logprobs=0))
    assert sum(rows) == len(PROMPT)
    assert max(rows) == runner.capacity.max_sequences


def test_a_prompt_that_does_not_compute_is_that_sequences_failure(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = runner._model.logits
    monkeypatch.setattr(runner._model, "logits", lambda hidden: logits(hidden) * math.nan)
    results = chunks(runner, [20, 41], SamplingParams(temperature=0.0, prompt_logprobs=0))
    assert [result.error and result.error.code for result in results] == [RowErrorCode.NAN_LOGITS] * 2
    assert all(not result.prompt_logprobs and not result.token_ids for result in results)


def test_a_cached_start_is_refused(runner: Runner) -> None:
    new = NewSequence(SamplingParams(prompt_logprobs=0), 12, tuple(PROMPT[:8]))
    with pytest.raises(StepError, match="prompt_logprobs need a start at 0"):
        runner.run(Step(1, (Slice(0, 8, 4, tuple(PROMPT[8:12]), (0, 1), True, new),)))
