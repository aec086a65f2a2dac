"""What each field of VllmEngine's messages means here."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from services.errors import DeadlineExceeded, Unimplemented
from services.rpc_server import REQUEST_ID_FORMAT
from services.tokenizer import vllm_messages as messages
from tercet.v1 import common_pb2, scheduler_pb2, tokenizer_pb2

Event = tokenizer_pb2.TokenizerServiceGenerateResponse


@given(st.text(max_size=200))
def test_every_id_becomes_one_of_ours_and_ours_stay(name: str) -> None:
    made = messages.request_id(name)
    assert REQUEST_ID_FORMAT.fullmatch(made)
    assert made == messages.request_id(name)
    if REQUEST_ID_FORMAT.fullmatch(name):
        assert made == name


def test_zeros_are_absent_where_they_can_not_be_meant() -> None:
    absent = messages.sampling(pb.SamplingParams())
    for name in ("temperature", "top_p", "repetition_penalty", "max_tokens", "n", "seed", "logprobs", "grammar"):
        assert not absent.HasField(name), name
    assert (absent.top_k, absent.min_p, absent.min_tokens) == (0, 0, 0)
    greedy = messages.sampling(pb.SamplingParams(temperature=0, max_tokens=0, logprobs=0, seed=0))
    for name in ("temperature", "max_tokens", "logprobs", "seed"):
        assert greedy.HasField(name), name


def test_all_of_sampling_is_passed_on() -> None:
    given = pb.SamplingParams(
        **{"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "frequency_penalty": 1, "max_tokens": 9},
        **{"presence_penalty": -1, "repetition_penalty": 1.5, "min_tokens": 2, "stop_token_ids": [3, 4], "n": 2},
        **{"ignore_eos": True, "logprobs": 3, "prompt_logprobs": 1, "seed": -1, "logit_bias": {8: 1.5, 6: -2}},
    )
    made = messages.sampling(given)
    for name in ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "max_tokens", "n"):
        assert getattr(made, name) == getattr(given, name), name
    assert made.seed == 2**64 - 1
    assert list(made.stop_token_ids) == [3, 4]
    assert made.ignore_eos
    assert (made.logprobs, made.prompt_logprobs, made.min_tokens) == (3, 1, 2)
    assert [(one.token_id, one.bias) for one in made.logit_bias] == [(6, -2), (8, 1.5)]


@pytest.mark.parametrize(
    ("given", "kind", "source"),
    [
        ({"json_object": True}, common_pb2.GRAMMAR_KIND_JSON_OBJECT, ""),
        ({"json_schema": "{}"}, common_pb2.GRAMMAR_KIND_JSON_SCHEMA, "{}"),
        ({"regex": "a+"}, common_pb2.GRAMMAR_KIND_REGEX, "a+"),
        ({"grammar": "start: A"}, common_pb2.GRAMMAR_KIND_EBNF, "start: A"),
        ({"choice": pb.ChoiceConstraint(choices=["a", "b"])}, common_pb2.GRAMMAR_KIND_CHOICE, "a\nb"),
    ],
)
def test_constraints_are_grammars(given: dict[str, Any], kind: int, source: str) -> None:
    made = messages.sampling(pb.SamplingParams(**given)).grammar
    assert (made.kind, made.source) == (kind, source)


def test_a_choice_of_two_lines_is_refused_by_name() -> None:
    with pytest.raises(Unimplemented, match="choice"):
        messages.sampling(pb.SamplingParams(choice=pb.ChoiceConstraint(choices=["a\nb"])))


def test_stops_and_text_rules_are_the_edges() -> None:
    params = pb.SamplingParams(stop=["x"], include_stop_str_in_output=True, skip_special_tokens=True)
    made = messages.to_edge(pb.GenerateRequest(text="a", sampling_params=params), "r")
    assert list(made.stop) == ["x"]
    assert made.include_stop
    assert not made.keep_special_tokens
    assert messages.to_edge(pb.GenerateRequest(text="a"), "r").keep_special_tokens


def delta(index: int, *ids: int) -> Event:
    return Event(delta=tokenizer_pb2.TextDelta(index=index, text="t", token_ids=ids))


def finished(index: int, tokens: int, reason: int = common_pb2.FINISH_REASON_LENGTH, **more: Any) -> Event:
    usage = common_pb2.Usage(prompt_tokens=4, cached_tokens=2, delivered_tokens=tokens)
    return Event(finished=tokenizer_pb2.Finished(index=index, reason=reason, usage=usage, **more))


def test_answers_stay_apart_by_index() -> None:
    replies = messages.Replies(pb.GenerateRequest(stream=False))
    script = [delta(1, 7), delta(0, 5), delta(1, 8), finished(1, 2), delta(0, 6), finished(0, 2)]
    made = [reply.complete for event in script for reply in replies.of(event)]
    assert [(one.index, list(one.output_ids)) for one in made] == [(1, [7, 8]), (0, [5, 6])]
    assert {(one.prompt_tokens, one.cached_tokens) for one in made} == {(4, 2)}


def test_prompt_logprobs_come_once_and_begin_with_none() -> None:
    replies = messages.Replies(pb.GenerateRequest(stream=True))
    row = tokenizer_pb2.TextLogprobs(drawn=tokenizer_pb2.TextLogprob(token_id=6, logprob=-1))
    script = [
        Event(accepted=tokenizer_pb2.Accepted(prompt_ids=[5, 6], prompt_tokens=2)),
        Event(prompt_logprobs=tokenizer_pb2.TextPromptLogprobs(logprobs=[row])),
        delta(0, 7),
        delta(0, 8),
        finished(0, 2),
    ]
    first, second, last = [reply for event in script for reply in replies.of(event)]
    told = first.chunk.input_logprobs
    assert list(told.token_ids) == [5, 6]
    assert [one.HasField("value") for one in told.token_logprobs] == [False, True]
    assert not second.chunk.HasField("input_logprobs")
    assert not last.complete.HasField("input_logprobs")


def test_a_time_limit_is_a_failure() -> None:
    replies = messages.Replies(pb.GenerateRequest())
    end = finished(0, 3, common_pb2.FINISH_REASON_TIME_LIMIT, limit=common_pb2.TIME_LIMIT_KIND_TOTAL)
    with pytest.raises(DeadlineExceeded, match="total passed after 3 tokens"):
        list(replies.of(end))


def test_loads_of_several_schedulers_are_one_rank() -> None:
    lane = scheduler_pb2.LaneLoad(total_blocks=100, live_blocks=20, fenced_blocks=5, cached_blocks=50)
    one = scheduler_pb2.SchedulerServiceGetLoadResponse(
        running_requests=2, waiting_requests=1, waiting_tokens=30, lanes=[lane]
    )
    made = messages.load([one, one], 5.0, 0.5)
    assert (made.num_running_reqs, made.num_waiting_reqs, made.num_total_reqs) == (4, 2, 6)
    assert (made.token_usage, made.num_waiting_uncached_tokens) == (0.25, 60)
    assert messages.load([], 0.0, 0.0).token_usage == 0
