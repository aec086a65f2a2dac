"""Every field of every value survives the wire; what this build does not serve is refused by name."""

import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor.step import (
    Capacity,
    Grammar,
    GrammarKind,
    NewSequence,
    RowError,
    RowErrorCode,
    SamplingParams,
    Slice,
    SliceResult,
    Step,
    StepResult,
    StepTimings,
    TokenLogprobs,
)
from services import wire, wire_sampling
from services.description import ExecutorDescription, ModelIdentity, description_from_proto, description_to_proto
from services.errors import InvalidArgument, Unimplemented
from tercet.v1 import common_pb2, executor_pb2

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
ids = st.lists(uint32, max_size=6).map(tuple)
text = st.text("aZ0.:é😀", max_size=8)
whatever_the_load = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
traceparents = st.none() | st.just("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


def float32(low: float, high: float, *, above_low: bool = False) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32, exclude_min=above_low)


sampling_params = st.builds(
    SamplingParams,
    logit_bias=st.lists(st.tuples(uint32, float32(-100, 100)), max_size=4, unique_by=lambda row: row[0]).map(tuple),
    repetition_penalty=float32(0, 10, above_low=True),
    presence_penalty=float32(-2, 2),
    frequency_penalty=float32(-2, 2),
    min_tokens=uint32,
    stop_token_ids=ids,
    temperature=float32(0, 100),
    top_k=uint32,
    top_p=float32(0, 1, above_low=True),
    min_p=float32(0, 1),
    seed=uint64,
    choice=uint32,
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)
slices = st.builds(
    Slice,
    slot=uint32,
    start=uint32,
    count=uint32,
    token_ids=ids,
    new_block_ids=ids,
    samples=st.booleans(),
    new=st.none() | st.builds(NewSequence, sampling=sampling_params, prompt_len=uint32),
)


@st.composite
def orders(draw: st.DrawFn) -> wire.StepOrder:
    pieces = tuple(draw(st.lists(slices, max_size=4, unique_by=lambda piece: piece.slot)))
    return wire.StepOrder(
        step=Step(draw(uint64), pieces),
        epoch=draw(uint64),
        predicted_ns=draw(st.none() | uint64),
        traceparent=draw(traceparents),
        labels=tuple(
            (piece.slot, wire.RequestLabel(draw(text), draw(traceparents))) for piece in pieces if piece.new is not None
        ),
    )


logprobs = st.builds(
    TokenLogprobs,
    drawn=st.floats(max_value=0, width=32, allow_nan=False),
    top=st.lists(st.tuples(uint32, st.floats(max_value=0, width=32, allow_nan=False)), max_size=3).map(tuple),
)
results = st.builds(
    StepResult,
    step_id=uint64,
    results=st.lists(
        st.builds(
            SliceResult,
            slot=uint32,
            token_ids=ids,
            logprobs=st.lists(logprobs, max_size=3).map(tuple),
            error=st.none() | st.builds(RowError, code=st.sampled_from(RowErrorCode), message=text),
            prompt_logprobs=st.lists(logprobs, max_size=3).map(tuple),
        ),
        max_size=4,
    ).map(tuple),
    timings=st.builds(StepTimings, wait_ns=uint64, prepare_ns=uint64, forward_ns=uint64, sample_ns=uint64),
)
models = st.builds(
    ModelIdentity,
    name=text,
    model_hash=text,
    tokenizer_hash=text,
    max_model_len=uint32,
    vocab_size=uint32,
    eos_token_ids=ids,
)


@st.composite
def descriptions(draw: st.DrawFn) -> ExecutorDescription:
    model = draw(models)
    return ExecutorDescription(
        model=model,
        capacity=Capacity(
            block_size=draw(uint32),
            total_blocks=draw(uint32),
            max_batched_tokens=draw(uint32),
            max_sequences=draw(uint32),
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
        ),
        numerics=draw(text),
        backend=draw(text),
        instance_id=draw(text),
        config_hash=draw(text),
        capabilities=tuple(draw(st.lists(st.integers(0, 5), max_size=3))),
        weight_bytes=draw(uint64),
        kv_bytes=draw(uint64),
        kv_format=draw(text),
        schema_revision=draw(st.integers(0, 1)),
    )


@whatever_the_load
@given(orders())
def test_step_round_trip(order: wire.StepOrder) -> None:
    raw = wire.step_to_proto(order).SerializeToString()
    assert wire.step_from_proto(executor_pb2.Step.FromString(raw)) == order


@whatever_the_load
@given(results)
def test_result_round_trip(result: StepResult) -> None:
    raw = wire.result_to_proto(result).SerializeToString()
    assert wire.result_from_proto(executor_pb2.StepResult.FromString(raw)) == result


@whatever_the_load
@given(sampling_params)
def test_sampling_round_trip(params: SamplingParams) -> None:
    raw = wire_sampling.sampling_to_proto(params).SerializeToString()
    back = wire_sampling.sampling_from_proto(common_pb2.SamplingParams.FromString(raw), choice=params.choice)
    assert back == params


@whatever_the_load
@given(descriptions())
def test_description_round_trip(held: ExecutorDescription) -> None:
    raw = description_to_proto(held).SerializeToString()
    message = executor_pb2.ExecutorServiceDescribeResponse.FromString(raw)
    assert description_from_proto(message) == held


@pytest.mark.parametrize("kind", [SamplingParams, Slice, StepTimings])
def test_each_field_reaches_the_wire(kind: Any) -> None:
    """A value that differs in one field only gives other bytes: no field of the dataclass is forgotten."""
    changed: dict[str, object] = {"logit_bias": ((1, 2.0),), "stop_token_ids": (7,), "temperature": 0.5, "logprobs": 0}
    changed |= {"grammar": Grammar(GrammarKind.CHOICE, "a")}
    changed |= {"repetition_penalty": 2.0, "top_p": 0.5, "min_p": 0.5, "presence_penalty": 0.5}
    changed |= {"token_ids": (1,), "new_block_ids": (1,), "samples": True, "new": NewSequence(SamplingParams(), 1)}
    base = (
        Slice(0, 0, 0, (), (), False) if kind is Slice else kind()  # the others have defaults throughout
    )

    def encode(value: Any) -> bytes:
        if isinstance(value, StepTimings):
            return wire.result_to_proto(StepResult(1, (), value)).SerializeToString()
        piece = value if isinstance(value, Slice) else Slice(0, 0, 1, (1,), (), True, NewSequence(value, 1))
        return wire.step_to_proto(wire.StepOrder(Step(1, (piece,)), 1)).SerializeToString()

    for field in dataclasses.fields(kind):
        other = dataclasses.replace(base, **{field.name: changed.get(field.name, 5)})
        assert encode(other) != encode(base), field.name


def test_absent_fields_are_the_contracts_defaults() -> None:
    assert wire_sampling.sampling_from_proto(common_pb2.SamplingParams()) == SamplingParams()


def test_explicit_zero_is_no_default() -> None:
    params = wire_sampling.sampling_from_proto(common_pb2.SamplingParams(temperature=0.0, logprobs=0))
    assert (params.temperature, params.logprobs) == (0.0, 0)


def test_how_many_answers_is_not_how_one_is_drawn() -> None:
    message = common_pb2.SamplingParams(n=128)
    assert wire_sampling.sampling_from_proto(message) == SamplingParams()
    assert wire_sampling.answers_from_proto(message) == 128
    assert wire_sampling.answers_from_proto(common_pb2.SamplingParams()) == 1
    for bad in (0, 129):
        with pytest.raises(InvalidArgument) as caught:
            wire_sampling.answers_from_proto(common_pb2.SamplingParams(n=bad))
        assert (caught.value.field, caught.value.limit) == ("sampling.n", "128")
    step = executor_pb2.Step(step_id=1, slices=[executor_pb2.Slice()])
    new = executor_pb2.NewSequence(sampling=wire_sampling.sampling_to_proto(SamplingParams()))
    new.sampling.n = 2
    step.slices[0].new_sequence.CopyFrom(new)
    with pytest.raises(InvalidArgument, match="a slot holds one answer"):
        wire.step_from_proto(step)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (common_pb2.SamplingParams(temperature=float("nan")), "temperature"),
        (common_pb2.SamplingParams(temperature=float("inf")), "temperature"),
        (common_pb2.SamplingParams(temperature=-0.5), "temperature"),
        (common_pb2.SamplingParams(top_p=0.0), "top_p"),
        (common_pb2.SamplingParams(top_p=1.5), "top_p"),
        (common_pb2.SamplingParams(min_p=-0.1), "min_p"),
        (common_pb2.SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        (common_pb2.SamplingParams(presence_penalty=3.0), "presence_penalty"),
        (common_pb2.SamplingParams(frequency_penalty=float("nan")), "frequency_penalty"),
        (common_pb2.SamplingParams(logprobs=21), "logprobs"),
        (common_pb2.SamplingParams(prompt_logprobs=21), "prompt_logprobs"),
        (common_pb2.SamplingParams(stop_token_ids=range(65)), "stop_token_ids"),
        (common_pb2.SamplingParams(stop_token_ids=[100]), "stop_token_ids"),
        (common_pb2.SamplingParams(logit_bias=[common_pb2.LogitBias(token_id=100)]), "logit_bias.token_id"),
        (common_pb2.SamplingParams(logit_bias=[common_pb2.LogitBias(bias=101)]), "logit_bias.bias"),
        (common_pb2.SamplingParams(logit_bias=[common_pb2.LogitBias(), common_pb2.LogitBias()]), "logit_bias"),
    ],
)
def test_bad_sampling_names_field(message: common_pb2.SamplingParams, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        wire_sampling.sampling_from_proto(message, vocab_size=100)
    assert caught.value.field == f"sampling.{field}"


@pytest.mark.parametrize("kind", GrammarKind)
def test_grammars_travel(kind: GrammarKind) -> None:
    sampling = SamplingParams(grammar=Grammar(kind, "söurce"))
    assert wire_sampling.sampling_from_proto(wire_sampling.sampling_to_proto(sampling)) == sampling


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (common_pb2.SamplingParams(grammar=common_pb2.Grammar()), "grammar.kind"),
        (common_pb2.SamplingParams(grammar=common_pb2.Grammar(kind=9)), "grammar.kind"),  # type: ignore[arg-type]
        (
            common_pb2.SamplingParams(
                grammar=common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_REGEX, source="ä" * 32_769)
            ),
            "grammar.source",
        ),
        (
            common_pb2.SamplingParams(
                grammar=common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_JSON_OBJECT), ignore_eos=True
            ),
            "ignore_eos",
        ),
    ],
)
def test_bad_grammars_name_the_field(message: common_pb2.SamplingParams, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        wire_sampling.sampling_from_proto(message)
    assert caught.value.field == f"sampling.{field}"


def test_drafts_in_a_step_are_refused_by_name() -> None:
    step = executor_pb2.Step(step_id=1, slices=[executor_pb2.Slice(), executor_pb2.Slice(draft_token_ids=[1])])
    with pytest.raises(Unimplemented, match=r"step\.slices\[1\]\.draft_token_ids"):
        wire.step_from_proto(step)


@pytest.mark.parametrize("name", ["temperature", "seed", "min_tokens", "top_k", "top_p", "repetition_penalty"])
def test_a_step_leaves_no_default_to_the_executor(name: Any) -> None:
    new = executor_pb2.NewSequence(sampling=wire_sampling.sampling_to_proto(SamplingParams()))
    new.sampling.ClearField(name)
    with pytest.raises(InvalidArgument, match=rf"sampling\.{name} is missing"):
        wire.step_from_proto(executor_pb2.Step(slices=[executor_pb2.Slice(new_sequence=new)]))


def test_unknown_error_code_is_no_success() -> None:
    message = executor_pb2.StepResult(results=[executor_pb2.SliceResult(error=executor_pb2.SliceError())])
    with pytest.raises(InvalidArgument, match=r"result\.results\.error\.code"):
        wire.result_from_proto(message)
