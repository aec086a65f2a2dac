"""Sequences with a grammar on a tiny model: every output is of the form, and follows from the sequence alone."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from step_driver import generate
from tiny_model import BYTE_TOKENS, VOCAB, TinySpec, write_tiny_model

from executor.grammar.engine import GrammarVocabulary
from executor.loading.load import load_runner
from executor.runner import Runner, StepError
from executor.step import Grammar, GrammarKind, NewSequence, RowErrorCode, SamplingParams, Slice, SliceResult, Step

END = BYTE_TOKENS + 2
VOCABULARY = GrammarVocabulary(
    tuple(bytes([byte]) for byte in range(BYTE_TOKENS)) + (b"<special>",) * 4,  # fewer than the weights have rows
    tuple(range(BYTE_TOKENS, BYTE_TOKENS + 4)),
    (END,),
)
DIGITS = Grammar(GrammarKind.REGEX, "[0-9]{3}-[0-9]{3}")
SCHEMA = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {"a": {"type": "string", "maxLength": 4}, "b": {"type": "boolean"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    ),
)
PROMPT = list(b"a prompt of some length")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", TinySpec(biases=True))


@pytest.fixture(scope="module", params=["reference", "cpu"])
def runner(request: pytest.FixtureRequest, path: Path) -> Iterator[Runner]:
    made = load(path, request.param)
    yield made
    assert made.grammars is not None
    made.grammars.close()


def load(path: Path, backend: str, vocabulary: GrammarVocabulary | None = VOCABULARY) -> Runner:
    return load_runner(
        path,
        backend=backend,
        block_size=8,
        total_blocks=64,
        max_batched_tokens=96,
        max_sequences=6,
        grammar_vocabulary=None if vocabulary is None else lambda: vocabulary,
    )


def asking(grammar: Grammar, **more: object) -> SamplingParams:
    return replace(SamplingParams(grammar=grammar, stop_token_ids=(END,)), **more)


def run(runner: Runner, sampling: SamplingParams, *, known: Sequence[int] = (), limit: int = 40) -> list[int]:
    """Output ids until one ends it; `known` are those of a run before."""
    runner.reset()
    ids = [*PROMPT, *known]
    blocks = tuple(range(-(-(len(PROMPT) + limit + 1) // 8)))
    new = NewSequence(sampling, len(PROMPT))
    part = Slice(0, 0, len(ids), tuple(ids), blocks, True, new)
    output = list(known)
    for step_id in range(1, limit + 1):
        (result,) = runner.run(Step(step_id, (part,))).results
        assert result.error is None, result.error
        output += result.token_ids
        if result.token_ids[0] in sampling.stop_token_ids:
            break
        part = Slice(0, len(PROMPT) + len(output) - 1, 1, (), (), True)
    return output


def text(output: Sequence[int]) -> str:
    assert output[-1] == END
    return bytes(output[:-1]).decode()


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_outputs_are_of_the_form(runner: Runner, temperature: float) -> None:
    for seed in range(3):
        output = run(runner, asking(DIGITS, temperature=temperature, seed=seed))
        assert re.fullmatch(DIGITS.source, text(output))
        value = json.loads(text(run(runner, asking(SCHEMA, temperature=temperature, seed=seed))))
        assert list(value) == ["a", "b"]
        assert len(value["a"]) <= 4
        assert isinstance(value["b"], bool)


def test_an_output_goes_on_as_it_was_from_any_point(runner: Runner) -> None:
    """As after a preemption, at another executor, or for an answer that another server began."""
    sampling = asking(SCHEMA, seed=11, temperature=2.0)
    whole = run(runner, sampling)
    assert len(whole) > 10
    for count in range(1, len(whole) - 1):
        assert run(runner, sampling, known=whole[:count]) == whole


def test_neighbours_with_and_without_a_grammar_change_nothing(runner: Runner) -> None:
    params = [
        asking(DIGITS, seed=1),
        SamplingParams(seed=2),
        asking(SCHEMA, seed=3),
        SamplingParams(temperature=0.0),
        asking(DIGITS, temperature=0.0),
    ]
    prompts = [PROMPT] * len(params)
    together = generate(runner, prompts, 7, sampling=params, chunk=5)
    alone = [generate(runner, [PROMPT], 7, sampling=one)[0] for one in params]
    assert together == alone
    assert re.fullmatch(DIGITS.source, bytes(together[0]).decode())
    assert re.fullmatch(DIGITS.source, bytes(together[4]).decode())


def test_answers_to_one_prompt_have_places_of_their_own(runner: Runner) -> None:
    params = [asking(SCHEMA, seed=5, choice=choice) for choice in range(4)]
    together = generate(runner, [PROMPT] * 4, 12, sampling=params)
    assert together == [generate(runner, [PROMPT], 12, sampling=one)[0] for one in params]
    assert len(set(map(tuple, together))) > 1


def test_a_stop_id_of_the_callers_ends_where_the_grammar_allows_it(runner: Runner) -> None:
    output = run(runner, asking(DIGITS, stop_token_ids=(END, ord("-"))))
    assert output[-1] == ord("-")
    assert len(output) == 4


def first(slot: int, sampling: SamplingParams, ids: Sequence[int] = PROMPT, prompt_len: int | None = None) -> Slice:
    blocks = tuple(range(slot * 8, slot * 8 + 8))
    return Slice(slot, 0, len(ids), tuple(ids), blocks, True, NewSequence(sampling, prompt_len or len(ids)))


def failed(result: SliceResult) -> str:
    assert result.error is not None
    assert result.error.code is RowErrorCode.GRAMMAR_DEAD_END
    return result.error.message


def test_a_dead_end_fails_its_row_alone(runner: Runner) -> None:
    runner.reset()
    banned = asking(Grammar(GrammarKind.CHOICE, "x"), min_tokens=5)  # complete after one token, and may not end
    results = runner.run(Step(1, (first(0, banned), first(1, asking(DIGITS))))).results
    assert results[0].token_ids == (ord("x"),)
    decode = [Slice(slot, len(PROMPT), 1, (), (), True) for slot in range(2)]
    results = runner.run(Step(2, tuple(decode))).results
    assert "no token is allowed" in failed(results[0])
    assert results[1].error is None
    decode = [Slice(slot, len(PROMPT) + 1, 1, (), (), True) for slot in range(2)]
    results = runner.run(Step(3, tuple(decode))).results  # sent before the error was known
    assert "no token is allowed" in failed(results[0])
    assert results[1].error is None


def test_outputs_that_the_grammar_does_not_allow_are_a_dead_end(runner: Runner) -> None:
    runner.reset()
    results = runner.run(Step(1, (first(0, asking(DIGITS), [*PROMPT, ord("x")], len(PROMPT)),))).results
    assert "the grammar allows nothing at position" in failed(results[0])


def test_a_source_that_is_no_grammar_fails_its_row_alone(runner: Runner) -> None:
    runner.reset()
    bad = asking(Grammar(GrammarKind.REGEX, "(a"))
    results = runner.run(Step(1, (first(0, bad), first(1, asking(DIGITS))))).results
    assert "unclosed group" in failed(results[0])
    assert results[1].error is None


def test_logprobs_are_of_the_raw_distribution(runner: Runner) -> None:
    runner.reset()
    plain, masked = runner.run(
        Step(1, (first(0, SamplingParams(logprobs=3)), first(1, asking(DIGITS, logprobs=3))))
    ).results
    assert plain.logprobs[0].top == masked.logprobs[0].top
    assert masked.logprobs[0].drawn < 0


def test_an_executor_without_a_vocabulary_refuses_grammars(path: Path) -> None:
    runner = load(path, "reference", None)
    with pytest.raises(StepError, match="serves no grammars"):
        runner.run(Step(1, (first(0, asking(DIGITS)),)))


def test_more_rows_than_tokens_are_never_drawn(runner: Runner) -> None:
    assert len(VOCABULARY.tokens) < VOCAB
    output = run(runner, asking(Grammar(GrammarKind.REGEX, "(?s:.)*"), temperature=100.0, seed=1), limit=30)
    assert max(output) < len(VOCABULARY.tokens)
