"""Steps on a tiny model: what they may be, what they leave behind, and that nothing but the sequence decides tokens."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from step_driver import GREEDY, generate
from tiny_model import VOCAB, TinySpec, write_tiny_model

from executor.loading.load import load_runner
from executor.runner import Runner, StepError
from executor.step import NewSequence, RowErrorCode, SamplingParams, Slice, Step

BLOCK_SIZE = 8


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", TinySpec(biases=True))


@pytest.fixture(scope="module", params=["reference", "cpu"])
def shared_runner(request: pytest.FixtureRequest, tiny_path: Path) -> Runner:
    return load_tiny(tiny_path, request.param)


@pytest.fixture
def runner(shared_runner: Runner) -> Runner:
    """Idle, its pool full of NaN."""
    shared_runner.reset()
    shared_runner.pool.fill(math.nan)
    return shared_runner


def load_tiny(path: Path, backend: str, **settings: int) -> Runner:
    capacity = {"block_size": BLOCK_SIZE, "total_blocks": 64, "max_batched_tokens": 96, "max_sequences": 6} | settings
    return load_runner(path, backend=backend, **capacity)  # type: ignore[arg-type]


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def first(slot: int, ids: list[int], blocks: tuple[int, ...], sampling: SamplingParams = GREEDY) -> Slice:
    return Slice(slot, 0, len(ids), tuple(ids), blocks, True, NewSequence(sampling, len(ids)))


# -- tokens depend on the sequence alone -------------------------------------------------------------------------------

SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=1.5, seed=7),
    SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=2**64 - 1, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, frequency_penalty=1.5, presence_penalty=0.7, min_tokens=6, stop_token_ids=(1, 2)),
    replace(GREEDY, frequency_penalty=1.05),
]
LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE]


def test_tokens_are_the_same_alone_together_chunked_and_reversed(runner: Runner) -> None:
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    alone = [
        generate(runner, [ids], 12, sampling=sampling)[0] for ids, sampling in zip(prompts, SAMPLINGS, strict=True)
    ]
    assert len({tuple(output) for output in alone}) == len(alone)
    assert generate(runner, prompts, 12, sampling=SAMPLINGS) == alone
    assert generate(runner, prompts, 12, sampling=SAMPLINGS, chunk=3) == alone
    assert generate(runner, prompts[::-1], 12, sampling=SAMPLINGS[::-1], chunk=5) == alone[::-1]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_recompute_at_any_point_changes_no_token(runner: Runner, data: st.DataObject) -> None:
    """What a preemption does: the slot starts anew, its past comes as ids, the boundary stays."""
    sampling = data.draw(st.sampled_from(SAMPLINGS))
    ids = prompt(data.draw(st.integers(1, 20)), seed=5)
    whole = generate(runner, [ids], 10, sampling=sampling)[0]
    cut = data.draw(st.integers(1, 9))
    past = ids + whole[:cut]
    runner.pool.fill(math.nan)
    blocks = tuple(range(60, 60 - (-(-(len(past) + 10) // BLOCK_SIZE)), -1))
    part = Slice(3, 0, len(past), tuple(past), blocks, True, NewSequence(sampling, len(ids)))
    output = list(runner.run(Step(1, (part,))).results[0].token_ids)
    for index in range(9 - cut):
        step = Step(index + 2, (Slice(3, len(past) + index, 1, (), (), True),))
        output += runner.run(step).results[0].token_ids
    runner.reset()
    assert output == whole[cut:]


def test_a_sequence_fills_the_context_to_its_end(runner: Runner) -> None:
    limit = runner.capacity.max_model_len
    ids = prompt(90)
    blocks = tuple(range(-(-limit // BLOCK_SIZE)))
    runner.run(Step(1, (first(0, ids, blocks),)))
    position = 90
    while position < limit:
        result = runner.run(Step(2, (Slice(0, position, 1, (), (), True),))).results[0]
        assert result.error is None
        position += 1
    with pytest.raises(StepError, match=f"{limit + 1} tokens exceed max_model_len {limit}"):
        runner.run(Step(3, (Slice(0, limit, 1, (), (), True),)))


def test_a_chunk_that_does_not_sample_gives_no_result(runner: Runner) -> None:
    ids = prompt(20)
    chunk = Slice(0, 0, 9, tuple(ids[:9]), (0, 1, 2), False, NewSequence(GREEDY, 20))
    assert runner.run(Step(1, (chunk,))).results == ()
    results = runner.run(Step(2, (Slice(0, 9, 11, tuple(ids[9:]), (), True), first(1, ids, (5, 3, 4))))).results
    assert [result.slot for result in results] == [0, 1]
    assert results[0].token_ids == results[1].token_ids


def test_an_explicit_token_replaces_the_drawn_one(runner: Runner) -> None:
    ids = prompt(5)
    drawn = runner.run(Step(1, (first(0, ids, (0,)),))).results[0].token_ids
    other = (drawn[0] + 1) % VOCAB
    forced = runner.run(Step(2, (Slice(0, 5, 1, (other,), (), True),))).results[0].token_ids
    assert forced == runner.run(Step(3, (first(1, [*ids, other], (1,)),))).results[0].token_ids


def test_a_new_sequence_replaces_what_the_slot_held(runner: Runner) -> None:
    ids = prompt(6)
    expected = runner.run(Step(1, (first(0, ids, (0,)),))).results[0].token_ids
    runner.run(Step(2, (first(0, prompt(30, seed=9), (1, 2, 3, 4)),)))
    assert runner.run(Step(3, (first(0, ids, (9,)),))).results[0].token_ids == expected
    assert runner.live_sequences == 1


def test_results_carry_logprobs_and_timings(runner: Runner) -> None:
    sampling = replace(GREEDY, logprobs=2)
    result = runner.run(Step(7, (first(0, prompt(6), (0,), sampling), first(1, prompt(6), (1,)))))
    with_them, without = result.results
    assert result.step_id == 7
    assert with_them.token_ids == without.token_ids
    assert without.logprobs == ()
    (logprobs,) = with_them.logprobs
    assert logprobs.top[0] == (with_them.token_ids[0], logprobs.drawn)
    assert logprobs.top[0][1] > logprobs.top[1][1]
    assert result.timings.forward_ns > 0


def test_a_row_that_is_no_number_fails_alone_and_in_the_step_already_sent(runner: Runner) -> None:
    ids = prompt(9)
    good = generate(runner, [ids], 3)[0]
    runner.reset()
    runner.run(Step(1, (first(0, ids, (0, 1, 2)), first(1, ids, (3, 4, 5)))))
    for page in runner.pool.keys:
        page[3] = math.nan  # where slot 1 keeps its first tokens
    bad_step = runner.run(Step(2, (Slice(0, 9, 1, (), (), True), Slice(1, 9, 1, (), (), True))))
    after = runner.run(Step(3, (Slice(0, 10, 1, (), (), True), Slice(1, 10, 1, (), (), True))))
    for step, token in ((bad_step, good[1]), (after, good[2])):
        healthy, failed = step.results
        assert healthy.token_ids == (token,)
        assert failed.token_ids == ()
        assert failed.error is not None
        assert failed.error.code is RowErrorCode.NAN_LOGITS


# -- steps that are refused --------------------------------------------------------------------------------------------


def new(count: int = 4, *, slot: int = 1, blocks: tuple[int, ...] = (9,), **sampling: object) -> Slice:
    params = replace(GREEDY, **sampling)  # type: ignore[arg-type]
    return Slice(slot, 0, count, (1,) * count, blocks, True, NewSequence(params, count))


REFUSED = {
    "no slices": ((), "step 2 has no slices"),
    "slot out of range": ((new(slot=6),), "slot 6 is out of range, max_sequences is 6"),
    "negative slot": ((new(slot=-1),), "slot -1 is out of range"),
    "slot twice": ((new(), new(blocks=(10,))), "slot 1 occurs twice"),
    "unknown slot": ((Slice(2, 0, 1, (1,), (9,), True),), "slot 2 holds no sequence"),
    "gap": ((Slice(0, 11, 1, (1,), (), True),), "start is 11, 10 positions are computed"),
    "overlap": ((Slice(0, 9, 1, (1,), (), True),), "start is 9, 10 positions are computed"),
    "new not at 0": ((replace(new(), start=1),), "start is 1, 0 positions are computed"),
    "count 0": ((Slice(0, 10, 0, (), (), True),), "count must be at least 1, got 0"),
    "too many tokens": ((new(97, blocks=tuple(range(9, 22))),), "97 tokens, max_batched_tokens is 96"),
    "ids and count differ": ((Slice(0, 10, 2, (1,), (), True),), "1 token_ids for count 2"),
    "ids absent for two": ((Slice(0, 10, 2, (), (), True),), "token_ids are absent"),
    "ids absent in a new sequence": ((replace(new(1), token_ids=()),), "token_ids are absent"),
    "token out of range": ((Slice(0, 10, 1, (VOCAB,), (), True),), f"token id {VOCAB} is out of range"),
    "negative token": ((Slice(0, 10, 1, (-1,), (), True),), "token id -1 is out of range"),
    "block out of range": ((new(blocks=(64,)),), "block 64 is out of range, total_blocks is 64"),
    "negative block": ((new(blocks=(-1,)),), "block -1 is out of range"),
    "block twice": ((new(blocks=(9, 9)),), "a block occurs twice"),
    "block of its own again": ((Slice(0, 10, 1, (1,), (0,), True),), "a block occurs twice"),
    "too few blocks": ((Slice(0, 10, 7, (1,) * 7, (), True),), "17 tokens need more than 2 blocks of 8"),
    "two writers of a block": ((new(), new(slot=2)), "slots 1 and 2 both write to block 9"),
    "draw inside the prompt": (
        (Slice(1, 0, 2, (1, 1), (9,), True, NewSequence(GREEDY, 3)),),
        "a draw at position 2 lies inside the prompt of 3",
    ),
    "empty prompt": ((Slice(1, 0, 1, (1,), (9,), True, NewSequence(GREEDY, 0)),), "prompt_len must be at least 1"),
    "bias on no token": ((new(logit_bias=((VOCAB, 1.0),)),), f"logit_bias has token id {VOCAB}"),
    "infinite bias": ((new(logit_bias=((1, math.inf),)),), "logit_bias must be finite"),
    "stop that is no token": ((new(stop_token_ids=(-1,)),), "stop_token_ids has token id -1"),
    "NaN temperature": ((new(temperature=math.nan),), "temperature must be at least 0 and finite"),
    "infinite temperature": ((new(temperature=math.inf),), "temperature must be at least 0 and finite"),
    "top_p 0": ((new(top_p=0.0),), r"top_p must be in \(0, 1\], got 0.0"),
    "min_p above 1": ((new(min_p=1.5),), "min_p must be in"),
    "negative top_k": ((new(top_k=-1),), "top_k must be at least 0"),
    "repetition penalty 0": ((new(repetition_penalty=0.0),), "repetition_penalty must be above 0"),
    "seed too large": ((new(seed=1 << 64),), "seed must be an unsigned number of 64 bits"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_step_is_named_and_changes_nothing(runner: Runner, name: str) -> None:
    slices, message = REFUSED[name]
    ids = prompt(10)
    runner.run(Step(1, (first(0, ids, (0, 1)),)))
    expected = runner.run(Step(1, (first(3, ids, (20, 21)),))).results[0].token_ids
    with pytest.raises(StepError, match=message):
        runner.run(Step(2, slices))
    assert runner.live_sequences == 2
    after = runner.run(Step(2, (Slice(0, 10, 1, (), (), True), Slice(3, 10, 1, expected, (), True))))
    assert after.results[0].token_ids == after.results[1].token_ids


# -- the runner's other verbs ------------------------------------------------------------------------------------------


def test_reset_forgets_every_sequence(runner: Runner) -> None:
    runner.run(Step(1, (first(0, prompt(4), (0,)),)))
    runner.reset()
    assert runner.live_sequences == 0
    with pytest.raises(StepError, match="slot 0 holds no sequence"):
        runner.run(Step(1, (Slice(0, 4, 1, (1,), (), True),)))


def test_warm_up_leaves_nothing_and_refuses_to_disturb(runner: Runner) -> None:
    runner.warm_up()
    assert runner.live_sequences == 0
    runner.run(Step(1, (first(0, prompt(4), (0,)),)))
    with pytest.raises(RuntimeError, match="idle"):
        runner.warm_up()


def test_score_equals_the_logprobs_of_serving(runner: Runner) -> None:
    """More ids than one step takes, so that chunks and their seams are scored, too."""
    ids = prompt(130)
    scores = runner.score(ids, 1)
    assert len(scores) == 129
    assert runner.live_sequences == 0
    assert runner.score(ids, 100) == scores[99:]
    bias = tuple((token, 1e6) for token in (ids[60],))
    part = first(0, ids[:60], tuple(range(8)), replace(GREEDY, logit_bias=bias, logprobs=0))
    (logprobs,) = runner.run(Step(1, (part,))).results[0].logprobs
    assert scores[59] == pytest.approx(logprobs.drawn, abs=1e-9)
    with pytest.raises(RuntimeError, match="idle"):
        runner.score(ids, 1)


def test_the_number_of_threads_changes_no_bit(runner: Runner) -> None:
    ids = prompt(130)
    alone = runner.score(ids, 1)
    torch.set_num_threads(2)
    assert runner.score(ids, 1) == alone


def test_score_refuses_an_impossible_first(runner: Runner) -> None:
    with pytest.raises(ValueError, match="first must be from 1 to 3, got 0"):
        runner.score([1, 2, 3], 0)


def test_numerics_name_what_results_depend_on(tiny_path: Path, tmp_path: Path) -> None:
    one, again = load_tiny(tiny_path, "cpu"), load_tiny(tiny_path, "cpu", block_size=16, total_blocks=20)
    other_backend = load_tiny(tiny_path, "reference")
    other_model = load_tiny(write_tiny_model(tmp_path / "other.gguf", TinySpec(seed=1)), "cpu")
    assert one.model_hash == again.model_hash == other_backend.model_hash != other_model.model_hash
    assert one.numerics != other_backend.numerics
    assert len({one.numerics, other_backend.numerics, other_model.numerics}) == 3


def test_back_ends_agree_on_logprobs(tiny_path: Path) -> None:
    ids = prompt(90)
    exact, fast = (torch.tensor(load_tiny(tiny_path, name).score(ids, 1)) for name in ("reference", "cpu"))
    assert (exact - fast).abs().max() < 0.1
    assert (exact - fast).abs().mean() < 0.02
