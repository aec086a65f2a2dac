"""The fake runner and prefixes that others wrote: right ones are read, and every kind of wrong one shows."""

import pytest
from step_stream import first

from executor.step import NewSequence, SamplingParams, Slice, Step
from services.executor.fake import SMALL, BadStep, FakeRunner
from services.executor.fake_tokens import expected_hash_tokens

PROMPT = tuple(range(20, 30))  # blocks of 4


def behind(ids: tuple[int, ...], cached: int, blocks: tuple[int, ...]) -> Slice:
    new = NewSequence(SamplingParams(temperature=0.0), len(ids), ids[:cached])
    return Slice(1, cached, len(ids) - cached, ids[cached:], blocks, True, new)


@pytest.fixture
def runner() -> FakeRunner:
    """Blocks 0, 1, 2 hold PROMPT."""
    made = FakeRunner("hash")
    made.run(Step(1, (first(0, PROMPT, (0, 1, 2)),)))
    return made


def test_a_cached_prefix_is_read_back(runner: FakeRunner) -> None:
    prompt = (*PROMPT[:8], 1, 2)
    result = runner.run(Step(2, (behind(prompt, 8, (0, 1, 5)),)))
    assert result.results[0].token_ids == expected_hash_tokens(prompt, 1, SMALL.vocab_size)
    assert not runner.violations


@pytest.mark.parametrize(
    ("ids", "blocks", "kind"),
    [
        ((*PROMPT[:8], 1), (0, 7, 5), "missing"),
        ((*PROMPT[:8], 1), (1, 0, 5), "wrong position"),
        ((99, *PROMPT[1:8], 1), (0, 1, 5), "other history"),
        ((*PROMPT[:7], 99, 1), (0, 1, 5), "other history"),
    ],
)
def test_a_prefix_that_is_not_there_shows(
    runner: FakeRunner, ids: tuple[int, ...], blocks: tuple[int, ...], kind: str
) -> None:
    runner.run(Step(2, (behind(ids, 8, blocks),)))
    assert runner.violations[0].kind == kind


def test_the_same_token_behind_another_history_shows(runner: FakeRunner) -> None:
    runner.run(Step(2, (first(2, (99, 99, 99, 99, *PROMPT[4:8]), (8, 9)),)))
    runner.run(Step(3, (behind((*PROMPT[:8], 1), 8, (0, 9, 5)),)))
    assert {violation.kind for violation in runner.violations} == {"other history"}


def test_who_writes_to_a_shared_block_is_found_by_its_readers(runner: FakeRunner) -> None:
    runner.run(Step(2, (behind((*PROMPT[:8], 1, 2), 8, (0, 1, 5)),)))
    assert not runner.violations
    runner.run(Step(3, (first(3, (7, 7, 7, 7), (1,)),)))
    runner.run(Step(4, (Slice(1, 10, 1, (), (), True),)))
    assert {violation.block_id for violation in runner.violations} == {1}


@pytest.mark.parametrize(
    ("ids", "cached", "message"), [((*PROMPT[:8],), 6, "6 cached ids"), ((5000, *PROMPT[:8]), 8, "cached token 5000")]
)
def test_cached_ids_that_make_no_sense_are_refused(
    runner: FakeRunner, ids: tuple[int, ...], cached: int, message: str
) -> None:
    with pytest.raises(BadStep, match=message):
        runner.run(Step(2, (behind(ids, cached, (0, 1, 5)),)))
