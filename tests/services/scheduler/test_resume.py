"""An answer that another scheduler began goes on here: exactly, or not at all."""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import pytest
from chain import CAPACITY, Chain, chain

from executor.step import SamplingParams
from services import errors
from services.executor.fake import At, FakeRunner, Faults
from services.executor.fake_tokens import expected_hash_tokens
from services.rpc_errors import from_rpc_error
from services.scheduler.core.calls import CoreConfig, Limits
from tercet.v1 import common_pb2, scheduler_pb2

if TYPE_CHECKING:
    from tercet.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub as Stub

Message = scheduler_pb2.SchedulerServiceGenerateRequest
PROMPT = [3, 10, 17, 24, 31, 38, 45]
COUNT = 12


def expected(count: int = COUNT) -> list[int]:
    return list(expected_hash_tokens(PROMPT, count, CAPACITY.vocab_size))


def resumed(running: Chain, output: list[int], max_tokens: int | None = COUNT, name: str = "r") -> Message:
    assert running.engine.model is not None
    return Message(
        context=common_pb2.RequestContext(request_id=name, attempt=2),
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=7),
        resume=common_pb2.Resume(prompt_ids=PROMPT, output_ids=output, numerics=running.engine.model.numerics),
    )


async def answer(stub: "Stub", message: Message) -> tuple[list[int], scheduler_pb2.SchedulerFinished]:
    tokens: list[int] = []
    async for event in stub.Generate(message, timeout=20):
        tokens += event.delta.token_ids
        if event.HasField("finished"):
            return tokens, event.finished
    raise AssertionError("no Finished came")


async def refusal(stub: "Stub", message: Message) -> errors.ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(stub, message)
    return from_rpc_error(caught.value)


async def test_the_usage_of_a_failure_is_the_whole_answers() -> None:
    runner = FakeRunner("hash", CAPACITY, faults=Faults(nan_slots=frozenset({0}), nan_at=At(count=3)))
    async with chain(runner=runner) as (running, _):
        error = await refusal(running.stub, resumed(running, expected()[:5]))
        assert error.reason == "NAN_LOGITS"
        told = error.metadata
        assert (told["prompt_tokens"], told["delivered_tokens"]) == (str(len(PROMPT)), str(5 + 2))


@pytest.mark.parametrize("depth", [1, 2])
async def test_it_goes_on_exactly_wherever_it_was_cut(depth: int) -> None:
    async with chain(core=CoreConfig(steps_in_flight=depth, prefill_chunk=5)) as (running, _):
        cuts = range(COUNT)
        messages = [resumed(running, expected()[:cut], name=f"cut{cut}") for cut in cuts]
        answers = await asyncio.gather(*(answer(running.stub, message) for message in messages))
        for cut, (tokens, finished) in zip(cuts, answers, strict=True):
            assert tokens == expected()[cut:]
            assert finished.reason == common_pb2.FINISH_REASON_LENGTH
            usage = finished.usage
            assert (usage.prompt_tokens, usage.delivered_tokens) == (len(PROMPT), COUNT)
            assert usage.sampled_tokens == usage.delivered_tokens + usage.discarded_tokens
        running.core.check()


async def test_min_tokens_and_the_boundary_hold() -> None:
    """Stop ids come as one draw in two, and not before 6 output tokens: counted from the prompt's end, not the cut."""
    stop = 5
    sampling = SamplingParams(temperature=0.0, min_tokens=6, stop_token_ids=(stop,))
    whole = list(expected_hash_tokens(PROMPT, 60, CAPACITY.vocab_size, sampling=sampling, eos_every=2))
    assert whole[-1] == stop
    assert len(whole) > 6
    runner = FakeRunner("hash", CAPACITY, eos_every=2)
    async with chain(runner=runner) as (running, _):
        for cut in range(len(whole)):
            message = resumed(running, whole[:cut], 60, f"cut{cut}")
            message.sampling.min_tokens = 6
            message.sampling.stop_token_ids.append(stop)
            tokens, finished = await answer(running.stub, message)
            assert tokens == whole[cut:]
            assert finished.reason == common_pb2.FINISH_REASON_STOP


async def test_an_answer_that_was_complete_ends_at_once_without_a_step() -> None:
    async with chain() as (running, fake):
        steps = fake.runner.count
        tokens, finished = await answer(running.stub, resumed(running, expected()))
        assert (tokens, finished.reason) == ([], common_pb2.FINISH_REASON_LENGTH)
        assert finished.usage.delivered_tokens == COUNT
        stopped = resumed(running, [*expected(4), 9], None)
        stopped.sampling.stop_token_ids.append(9)
        tokens, finished = await answer(running.stub, stopped)
        assert (tokens, finished.reason) == ([], common_pb2.FINISH_REASON_STOP)
        full = resumed(running, expected(CAPACITY.max_model_len - len(PROMPT)), None)
        assert (await answer(running.stub, full))[1].reason == common_pb2.FINISH_REASON_LENGTH
        assert fake.runner.count == steps
        assert running.core.totals().submitted == 0


async def test_what_would_not_go_on_exactly_is_refused_by_name() -> None:
    async with chain() as (running, _):
        no_seed = resumed(running, expected(3))
        no_seed.sampling.ClearField("seed")
        first_attempt = resumed(running, expected(3))
        first_attempt.context.attempt = 1
        other_prompt = resumed(running, expected(3))
        other_prompt.prompt_ids.extend([1, 2])
        no_prompt = resumed(running, expected(3))
        no_prompt.resume.ClearField("prompt_ids")
        cases = {
            "sampling.seed": no_seed,
            "context.attempt": first_attempt,
            "resume.prompt_ids": other_prompt,
            "prompt_ids": no_prompt,
            "resume.output_ids": resumed(running, [1, CAPACITY.vocab_size]),
        }
        for field, message in cases.items():
            error = await refusal(running.stub, message)
            assert isinstance(error, errors.InvalidArgument)
            assert error.field == field
        for output, limit in ((expected(), COUNT - 1), ([1] * CAPACITY.max_model_len, None)):
            error = await refusal(running.stub, resumed(running, output, limit))
            assert (type(error), error.field) == (errors.InvalidArgument, "resume.output_ids")
        other = resumed(running, expected(3))
        other.resume.numerics = "others"
        error = await refusal(running.stub, other)
        assert (type(error), error.reason) == (errors.Aborted, "NUMERICS_CHANGED")


async def test_it_takes_the_place_of_a_try_that_still_lives() -> None:
    async with chain() as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.01)
        first = Message(
            context=common_pb2.RequestContext(request_id="r"),
            prompt_ids=PROMPT,
            sampling=common_pb2.SamplingParams(max_tokens=100, temperature=0.0, seed=7),
        )
        call = running.stub.Generate(first)
        tokens: list[int] = []
        async for event in call:
            tokens += event.delta.token_ids
            if len(tokens) >= 4:
                break
        rest, finished = await answer(running.stub, resumed(running, tokens, 100))
        assert tokens + rest == expected(100)
        assert finished.usage.delivered_tokens == 100
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert from_rpc_error(caught.value).reason == "SUPERSEDED"


async def test_a_stop_counts_the_tokens_of_both() -> None:
    async with chain() as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.01)
        seen = 5
        finished = None
        async for event in running.stub.Generate(resumed(running, expected(5), 100)):
            seen += len(event.delta.token_ids)
            if event.HasField("delta") and seen >= 8:
                await running.stub.Stop(
                    scheduler_pb2.SchedulerServiceStopRequest(
                        context=common_pb2.RequestContext(request_id="r", attempt=2),
                        kept_tokens=7,
                        reason=scheduler_pb2.STOP_REASON_STOP_STRING,
                    )
                )
            if event.HasField("finished"):
                finished = event.finished
        assert finished is not None
        assert (finished.reason, finished.usage.delivered_tokens) == (common_pb2.FINISH_REASON_STOP, 7)


async def test_its_limit_is_the_one_between_tokens_and_ends_it_well() -> None:
    """The caller has part of the answer: neither the queue's limit nor the first token's is about it."""
    limits = Limits(queue_ns=1, first_token_ns=50_000_000, between_tokens_ns=300_000_000)
    async with chain(limits=limits) as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.1)
        tokens, _ = await answer(running.stub, resumed(running, expected(10)))
        assert tokens == expected()[10:]
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.6)
        tokens, finished = await answer(running.stub, resumed(running, expected(10)))
        assert (tokens, finished.reason) == ([], common_pb2.FINISH_REASON_TIME_LIMIT)
        assert finished.limit == common_pb2.TIME_LIMIT_KIND_BETWEEN_TOKENS
