"""Going on with a text at another edge: whatever was delivered, the two parts are the whole."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import tiny_model

from services.errors import InvalidArgument
from services.tokenizer.answer import Answer, AnswerRules
from services.tokenizer.resume import Rest, check_resume, unknown_logprobs
from tercet.v1 import common_pb2, tokenizer_pb2

MODEL = tiny_model()
PIECES = [
    MODEL.encode(text, add_special=False) for text in ("h", "he", "hell", "hello", " hello", "é", "世", "👩", "12")
]
IDS = st.lists(
    st.one_of(st.sampled_from([one for piece in PIECES for one in piece]), st.integers(0, MODEL.vocab_size - 1)),
    min_size=1,
    max_size=24,
)
Delta = tokenizer_pb2.TextDelta


def rules(stops: Sequence[str], include: bool) -> AnswerRules:
    return AnswerRules(tuple(stops), include, keep_special=False, min_tokens=0, stop_ids=frozenset({1}))


def logprobs(token_ids: Sequence[int]) -> list[common_pb2.TokenLogprobs]:
    return [common_pb2.TokenLogprobs(drawn=-float(token_id) - 1) for token_id in token_ids]


def drawn(deltas: Sequence[Delta]) -> list[tuple[int, float]]:
    """Ids with their logprobs."""
    return [
        (token_id, row.drawn.logprob)
        for delta in deltas
        for token_id, row in zip(delta.token_ids, delta.logprobs, strict=True)
    ]


def text(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@settings(max_examples=150, deadline=None)
@given(IDS, st.lists(st.sampled_from(["hello12", "llo", "he", "é世"]), max_size=2, unique=True), st.booleans())
def test_the_rest_behind_every_cut_completes_the_answer(ids: list[int], stops: list[str], include: bool) -> None:
    ends = ids.index(1) + 1 if 1 in ids else len(ids)
    ids = ids[:ends]  # nothing comes behind a stop id
    whole = Answer(MODEL, rules(stops, include))
    deltas: list[Delta] = []
    for token_id in ids:
        deltas += whole.push([token_id], logprobs([token_id]))
    deltas += whole.finish()
    for cut in range(len(deltas) + 1):
        had = deltas[:cut]
        output = [token_id for delta in had for token_id in delta.token_ids]
        second, rest = Answer(MODEL, rules(stops, include)), Rest(len(text(had)), len(output))
        later = list(rest.of(second.push(output, unknown_logprobs(len(output), True))))
        for token_id in ids[len(output) :]:
            later += rest.of(second.push([token_id], logprobs([token_id])))
        later += rest.of(second.finish())
        assert text(had) + text(later) == text(deltas)
        assert drawn([*had, *later]) == drawn(deltas)
        assert all(delta.text or delta.token_ids for delta in later)
        assert (second.stop_match, second.kept_tokens) == (whole.stop_match, whole.kept_tokens)


def test_only_the_ids_name_the_prompt() -> None:
    resume = common_pb2.Resume(prompt_ids=[1, 2])
    ids = tokenizer_pb2.TokenIds
    check_resume(tokenizer_pb2.TokenizerServiceGenerateRequest(resume=resume))
    check_resume(tokenizer_pb2.TokenizerServiceGenerateRequest(resume=resume, token_ids=ids(ids=[1, 2])))
    for wrong, field in (
        (tokenizer_pb2.TokenizerServiceGenerateRequest(resume=common_pb2.Resume()), "resume.prompt_ids"),
        (tokenizer_pb2.TokenizerServiceGenerateRequest(resume=resume, token_ids=ids(ids=[1])), "prompt"),
        (tokenizer_pb2.TokenizerServiceGenerateRequest(resume=resume, text="x"), "prompt"),
    ):
        with pytest.raises(InvalidArgument) as refusal:
            check_resume(wrong)
        assert refusal.value.field == field
