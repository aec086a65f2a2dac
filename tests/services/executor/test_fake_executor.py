"""The fake runner: what it draws can be foretold, and a scheduler's mistakes show."""

import subprocess
import sys
import threading
from dataclasses import replace
from math import log

import pytest
from step_stream import first, further

from executor.step import Capacity, NewSequence, RowErrorCode, SamplingParams, Slice, Step, StepResult
from services.executor.fake import SMALL, At, BadStep, FakeRunner, Faults, InjectedFault
from services.executor.fake_tokens import MODES, expected_hash_tokens, expected_position_tokens

PROMPT = (5, 6, 7, 8, 9)
VOCAB = SMALL.vocab_size


def tokens(result: StepResult) -> tuple[int, ...]:
    return tuple(token_id for piece in result.results for token_id in piece.token_ids)


def generate(runner: FakeRunner, n: int, *, first_id: int = 1, **sampling: object) -> tuple[int, ...]:
    """PROMPT and n tokens in slot 0, blocks in falling order."""
    blocks = tuple(range(31, -1, -1))
    drawn = list(tokens(runner.run(Step(first_id, (first(0, PROMPT, blocks, **sampling),)))))
    for index in range(1, n):
        drawn += tokens(runner.run(Step(first_id + index, (further(0, len(PROMPT) + index - 1),))))
    return tuple(drawn)


def test_hash_mode_is_what_tests_expect() -> None:
    runner = FakeRunner("hash")
    assert generate(runner, 20) == expected_hash_tokens(PROMPT, 20, VOCAB)
    assert runner.violations == []


def test_hash_mode_knows_the_whole_history() -> None:
    one = expected_hash_tokens(PROMPT, 3, VOCAB)
    assert expected_hash_tokens((*PROMPT, one[0]), 2, VOCAB) == one[1:]
    for index in range(len(PROMPT)):
        other = list(PROMPT)
        other[index] += 1
        assert expected_hash_tokens(other, 3, VOCAB) != one


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_chunks_give_the_same_tokens(size: int) -> None:
    runner = FakeRunner("hash")
    whole = first(0, PROMPT, (0, 1))
    for step_id, start in enumerate(range(0, len(PROMPT), size), 1):
        ids = PROMPT[start : start + size]
        at_start = start == 0
        piece = Slice(
            0,
            start,
            len(ids),
            ids,
            whole.new_block_ids if at_start else (),
            start + len(ids) == len(PROMPT),
            whole.new if at_start else None,
        )
        result = runner.run(Step(step_id, (piece,)))
    assert tokens(result) == expected_hash_tokens(PROMPT, 1, VOCAB)


def test_recompute_after_preemption_gives_the_same_tokens() -> None:
    runner = FakeRunner("hash")
    drawn = generate(runner, 3)
    again = Slice(5, 0, len(PROMPT) + 3, (*PROMPT, *drawn), (40, 41), True, NewSequence(SamplingParams(), len(PROMPT)))
    assert tokens(runner.run(Step(4, (again,)))) == expected_hash_tokens(PROMPT, 4, VOCAB)[3:]
    assert runner.violations == []


def test_hash_mode_never_stops_unless_asked_to() -> None:
    stops = tuple(range(0, VOCAB, 2))
    drawn = generate(FakeRunner("hash"), 60, stop_token_ids=stops)
    assert not set(drawn) & set(stops)
    sampling = SamplingParams(stop_token_ids=stops)
    assert drawn == expected_hash_tokens(PROMPT, 60, VOCAB, sampling=sampling)


def test_hash_mode_stops_as_often_as_asked_to_but_not_before_min_tokens() -> None:
    sampling = SamplingParams(stop_token_ids=(2,), min_tokens=7)
    ends = []
    for seed in range(50):
        drawn = expected_hash_tokens((seed, 1), 100, VOCAB, sampling=sampling, eos_every=3)
        assert drawn[-1] == 2
        assert 2 not in drawn[:-1]
        ends.append(len(drawn))
    assert min(ends) == 8
    assert 8 < sum(ends) / len(ends) < 16
    runner = FakeRunner("hash", eos_every=3)
    expected = expected_hash_tokens(PROMPT, 100, VOCAB, sampling=sampling, eos_every=3)
    assert generate(runner, len(expected), stop_token_ids=(2,), min_tokens=7) == expected


def test_positions_mode_echoes_the_last_position() -> None:
    drawn = generate(FakeRunner("positions"), 4)
    assert drawn == (4, 5, 6, 7) == expected_position_tokens(len(PROMPT), 4, VOCAB)


def test_script_mode_plays_by_prompt_and_then_ends() -> None:
    runner = FakeRunner("script", scripts={PROMPT: (11, 12), (): (13,)})
    assert generate(runner, 4, stop_token_ids=(2,)) == (11, 12, 2, 2)
    assert tokens(runner.run(Step(5, (first(1, (1,), (30,)),)))) == (13,)
    with pytest.raises(LookupError, match="no script"):
        FakeRunner("script").run(Step(1, (first(0, PROMPT, (0, 1)),)))
    with pytest.raises(LookupError, match="no stop id"):
        generate(FakeRunner("script", scripts={(): (13,)}), 2)


def test_modes_have_their_names() -> None:
    assert set(MODES) == {"script", "hash", "positions"}
    with pytest.raises(ValueError, match="nonsense"):
        FakeRunner("nonsense")


def test_rows_of_one_step_do_not_mix() -> None:
    runner = FakeRunner("hash")
    other = (100, 101)
    one = runner.run(Step(1, (first(3, other, (7, 8)), first(0, PROMPT, (0, 1)))))
    two = runner.run(Step(2, (further(0, 5), further(3, 2))))
    assert [piece.slot for piece in one.results] == [3, 0]
    a, b = expected_hash_tokens(other, 2, VOCAB), expected_hash_tokens(PROMPT, 2, VOCAB)
    assert (tokens(one), tokens(two)) == ((a[0], b[0]), (b[1], a[1]))
    assert runner.violations == []


# What a scheduler could do wrong


def test_block_given_away_too_early_shows() -> None:
    runner = FakeRunner("hash")
    runner.run(Step(1, (first(0, PROMPT, (0, 1)),)))
    runner.run(Step(2, (first(1, (50, 51), (0,)),)))  # block 0 still belongs to slot 0
    result = runner.run(Step(3, (further(0, 5),)))
    assert {(violation.kind, violation.position) for violation in runner.violations} == {("foreign", 0), ("foreign", 1)}
    assert tokens(result) != expected_hash_tokens(PROMPT, 2, VOCAB)[1:]


def test_block_given_away_in_the_same_step_shows() -> None:
    runner = FakeRunner("hash")
    runner.run(Step(1, (first(0, PROMPT, (0, 1)),)))
    runner.run(Step(2, (further(0, 5), first(1, (50, 51), (0,)))))
    assert {violation.kind for violation in runner.violations} == {"foreign"}


def test_two_writes_to_one_place_show() -> None:
    runner = FakeRunner("hash")
    runner.run(Step(1, (first(0, PROMPT, (0, 1)), first(1, PROMPT, (0, 2)))))
    assert "written twice" in {violation.kind for violation in runner.violations}


def test_a_slots_former_sequence_is_foreign() -> None:
    runner = FakeRunner("hash")
    runner.run(Step(1, (first(0, PROMPT, (0, 1)), first(1, (1,), (5,)))))
    runner.run(Step(2, (first(0, (1, 2), (3,)),)))  # the slot is reused, its old blocks are free
    runner.run(Step(3, (further(1, 1), first(0, (60,), (1,)))))
    assert runner.violations == []
    runner.run(Step(4, (first(2, PROMPT, (6, 7)),)))
    runner.run(Step(5, (first(3, (9,), (6,)),)))
    runner.run(Step(6, (further(2, 5),)))
    assert [violation.slot for violation in runner.violations] == [2]
    assert runner.violations[0].found is not None
    assert runner.violations[0].found.slot == 3


def test_reset_leaves_nothing() -> None:
    runner = FakeRunner("hash")
    generate(runner, 3)
    assert runner.entries == len(PROMPT) + 2
    runner.reset()
    assert (runner.entries, runner.resets) == (0, 1)
    with pytest.raises(BadStep, match="holds no sequence"):
        runner.run(Step(1, (further(0, 8),)))
    assert generate(runner, 3) == expected_hash_tokens(PROMPT, 3, VOCAB)


BAD_SLICES = [
    (further(4, 0), "slot 4 holds no sequence"),
    (further(0, 4), "start is 4, 5 positions are computed"),
    (further(0, 6), "start is 6, 5 positions are computed"),
    (first(8, (1,), (5,)), "there are 8 slots"),
    (first(1, (1,), (64,)), "block 64 of 64"),
    (first(1, (1000,), (5,)), "token 1000 of 1000"),
    (first(1, (1, 2, 3, 4, 5), (5,)), "position 5 is beyond the 4 of its blocks"),
    (first(1, (1,), (5, 5)), "a block comes twice"),
    (further(0, 5, (0,)), "a block comes twice"),
    (replace(first(1, (1, 2), (5,)), count=3), "2 ids for 3"),
    (replace(first(1, (1,), (5,)), count=0, token_ids=()), "count is 0"),
    (replace(first(1, (1,), (5,)), token_ids=()), "no drawn token"),
    (replace(further(0, 5), count=2), "no drawn token"),
    (first(1, (1,), (5,), stop_token_ids=(1000,)), "sampling names token 1000"),
    (replace(first(1, (1,), (5,)), new=NewSequence(SamplingParams(), 2)), "inside the prompt of 2"),
    (replace(first(1, (1,), (5,)), new=NewSequence(SamplingParams(), 0)), "prompt_len is 0"),
]


@pytest.mark.parametrize(("piece", "message"), BAD_SLICES)
def test_bad_slice_is_refused_and_changes_nothing(piece: Slice, message: str) -> None:
    runner = FakeRunner("hash")
    runner.run(Step(1, (first(0, PROMPT, (0, 1)),)))
    good = first(2, (1,), (9,))
    with pytest.raises(BadStep, match=message):
        runner.run(Step(2, (good, piece)))
    assert runner.entries == len(PROMPT)
    assert tokens(runner.run(Step(2, (further(0, 5),)))) == expected_hash_tokens(PROMPT, 2, VOCAB)[1:]


def test_bad_step_is_refused() -> None:
    runner = FakeRunner(capacity=Capacity(4, 64, 8, 8, 16, VOCAB))
    with pytest.raises(BadStep, match="no slices"):
        runner.run(Step(1, ()))
    with pytest.raises(BadStep, match="a slot comes twice"):
        runner.run(Step(1, (first(0, (1,), (0,)), first(0, (1,), (1,)))))
    with pytest.raises(BadStep, match="9 tokens; the limit is 8"):
        runner.run(Step(1, (first(0, (1,) * 9, (0, 1, 2)),)))
    runner.run(Step(1, (first(0, (1,) * 8, (0, 1, 2, 3, 4)),)))
    runner.run(Step(2, (Slice(0, 8, 8, (1,) * 8, (), True),)))
    with pytest.raises(BadStep, match="position 17 is beyond 16"):
        runner.run(Step(3, (further(0, 16),)))


# Fault points


def test_nan_row_fails_alone_and_so_does_what_was_already_in_flight() -> None:
    runner = FakeRunner(faults=Faults(nan_slots=frozenset({1}), nan_at=At(step_id=2)))
    runner.run(Step(1, (first(0, PROMPT, (0, 1)), first(1, PROMPT, (2, 3)))))
    for step_id in (2, 3):
        result = runner.run(Step(step_id, (further(0, step_id + 3), further(1, step_id + 3))))
        assert [piece.error.code if piece.error else None for piece in result.results] == [
            None,
            RowErrorCode.NAN_LOGITS,
        ]
    assert tokens(runner.run(Step(4, (first(1, PROMPT, (4, 5)),)))) == expected_hash_tokens(PROMPT, 1, VOCAB)


def test_crash_by_step_id_and_by_count() -> None:
    for at in (At(step_id=2), At(count=2)):
        runner = FakeRunner(faults=Faults(crash=at))
        runner.run(Step(1, (first(0, PROMPT, (0, 1)),)))
        with pytest.raises(InjectedFault):
            runner.run(Step(2, (further(0, 5),)))
        runner.reset()
        assert generate(runner, 1) == expected_hash_tokens(PROMPT, 1, VOCAB)


def test_die_calls_back_in_mid_step() -> None:
    died: list[int] = []
    runner = FakeRunner(faults=Faults(die=At(step_id=1)), on_die=lambda: died.append(runner.count))
    generate(runner, 1)
    assert died == [1]


def test_hang_waits_for_release() -> None:
    runner = FakeRunner(faults=Faults(hang=At(step_id=1)))
    drawn: list[tuple[int, ...]] = []
    thread = threading.Thread(target=lambda: drawn.append(generate(runner, 1)))
    thread.start()
    assert runner.entered.wait(10)
    assert drawn == []
    runner.release()
    thread.join(10)
    assert drawn == [expected_hash_tokens(PROMPT, 1, VOCAB)]


def test_delay_is_per_step_and_token() -> None:
    runner = FakeRunner(faults=Faults(delay_s=0.005, delay_per_token_s=0.001))
    result = runner.run(Step(1, (first(0, PROMPT, (0, 1)),)))
    assert result.timings.prepare_ns >= 10_000_000


# Logprobs and identity


def test_logprobs_come_only_where_asked_for() -> None:
    runner = FakeRunner("positions")
    result = runner.run(
        Step(1, (first(0, PROMPT, (0, 1), logprobs=2), first(1, PROMPT, (2, 3)), first(2, PROMPT, (4, 5), logprobs=0)))
    )
    with_two, without, drawn_only = (piece.logprobs for piece in result.results)
    assert [(entry.drawn, entry.top) for entry in with_two] == [(-log(2), ((4, -log(2)), (5, -2 * log(2))))]
    assert without == ()
    assert [(entry.drawn, entry.top) for entry in drawn_only] == [(-log(2), ())]


def test_numerics_are_equal_where_tokens_are() -> None:
    assert FakeRunner("hash").numerics == FakeRunner("hash", replace(SMALL, total_blocks=9)).numerics
    different = {
        FakeRunner("hash").numerics,
        FakeRunner("positions").numerics,
        FakeRunner("hash", eos_every=3).numerics,
        FakeRunner("hash", replace(SMALL, vocab_size=9)).numerics,
    }
    assert len(different) == 4


def test_the_fake_needs_no_torch() -> None:
    code = "import sys, services.executor.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
