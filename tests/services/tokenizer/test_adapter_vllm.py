"""VllmEngine over gRPC, without a gateway in front."""

import asyncio
import hashlib
import io
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_stack import until
from keys_support import make_key, write_keys
from smg_grpc_proto.generated import common_pb2 as smg_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_support import vllm_chain

from services.errors import Unavailable
from services.gate import Gate
from services.rpc_errors import from_rpc_error
from services.scheduler.core.calls import CoreConfig
from services.tokenizer.chain import ChainState
from services.tokenizer.vllm_messages import request_id

pytestmark = pytest.mark.model

ANSWER = "One two three four five."


def asked(prompt: list[int], *, stream: bool = True, name: str = "r", **params: Any) -> Any:
    return pb.GenerateRequest(
        request_id=name,
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(**params),
        stream=stream,
    )


async def all_of(call: Any) -> list[Any]:
    return [one async for one in call] if hasattr(call, "__aiter__") else [await call]


async def code_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await all_of(call)
    return failed.value.code(), from_rpc_error(failed.value).reason


async def test_a_stream_is_chunks_and_one_complete_and_without_it_the_complete_holds_all(
    default_model_path: Path,
) -> None:
    async with vllm_chain(default_model_path, ANSWER) as (chain, stub, _):
        ids = [*chain.model.encode(ANSWER, add_special=False), min(chain.model.eos_ids)]
        events = [one async for one in stub.Generate(asked([5, 6, 7], logprobs=1))]
        *chunks, last = events
        assert [token_id for one in chunks for token_id in one.chunk.token_ids] == ids
        assert [token_id for one in chunks for token_id in one.chunk.output_logprobs.token_ids] == ids
        assert all(len(row.values) == 1 for one in chunks for row in one.chunk.output_logprobs.top_logprobs)
        assert {one.chunk.prompt_tokens for one in chunks} == {3}
        assert sum(one.chunk.completion_tokens for one in chunks) == len(ids)
        assert (last.complete.finish_reason, list(last.complete.output_ids)) == ("stop", [])
        assert last.complete.WhichOneof("matched_stop") is None  # the model's own end is none that was asked for
        assert (last.complete.prompt_tokens, last.complete.completion_tokens) == (3, len(ids))

        (whole,) = [one async for one in stub.Generate(asked([5, 6, 7], stream=False, max_tokens=3, logprobs=0))]
        assert list(whole.complete.output_ids) == ids[:3]
        assert list(whole.complete.output_logprobs.token_ids) == ids[:3]
        assert whole.complete.finish_reason == "length"

        (stopped,) = [one async for one in stub.Generate(asked([5], stream=False, stop=[" thr"]))]
        assert stopped.complete.matched_stop_str == " thr"
        assert list(stopped.complete.output_ids) == ids[:3]
        (by_id,) = [one async for one in stub.Generate(asked([5], stream=False, stop_token_ids=[ids[1]]))]
        assert by_id.complete.matched_token_id == ids[1]

        by_text = pb.GenerateRequest(text="Hello 2024", stream=False, sampling_params=pb.SamplingParams(max_tokens=1))
        (answer,) = [one async for one in stub.Generate(by_text)]
        assert answer.complete.prompt_tokens == 6


async def test_refusals_are_statuses_with_the_reason(default_model_path: Path) -> None:
    async with vllm_chain(default_model_path, ANSWER) as (_, stub, _):
        refused = {
            "no input": (pb.GenerateRequest(request_id="r"), grpc.StatusCode.INVALID_ARGUMENT),
            "beyond the vocabulary": (asked([10**6]), grpc.StatusCode.INVALID_ARGUMENT),
            "no temperature": (asked([5], temperature=-1), grpc.StatusCode.INVALID_ARGUMENT),
            "negative bias": (asked([5], logit_bias={-1: 1.0}), grpc.StatusCode.INVALID_ARGUMENT),
            "rank": (pb.GenerateRequest(text="a", data_parallel_rank=1), grpc.StatusCode.INVALID_ARGUMENT),
            "all logprobs": (asked([5], logprobs=-1), grpc.StatusCode.UNIMPLEMENTED),
            "truncation": (asked([5], truncate_prompt_tokens=4), grpc.StatusCode.UNIMPLEMENTED),
            "structural tag": (asked([5], structural_tag="{}"), grpc.StatusCode.UNIMPLEMENTED),
            "image": (pb.GenerateRequest(text="a", mm_inputs=pb.MultimodalInputs()), grpc.StatusCode.UNIMPLEMENTED),
            "transfer": (pb.GenerateRequest(text="a", kv_transfer_params_json="{}"), grpc.StatusCode.UNIMPLEMENTED),
        }
        for what, (request, code) in refused.items():
            assert (await code_of(stub.Generate(request)))[0] == code, what
        assert await code_of(stub.Embed(pb.EmbedRequest())) == (grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED")


async def test_a_time_limit_behind_the_first_token_is_deadline_exceeded_here(default_model_path: Path) -> None:
    async with vllm_chain(default_model_path, "and so on " * 60) as (chain, stub, _):
        chain.runner.faults = replace(chain.runner.faults, delay_s=0.02)
        stream = aiter(stub.Generate(asked([5]), timeout=0.6))
        assert (await anext(stream)).HasField("chunk")
        assert await code_of(stream) == (grpc.StatusCode.DEADLINE_EXCEEDED, "TIME_LIMIT")
        told = chain.registry.get_sample_value("tercet_requests_total", {"outcome": "time_limit"})
        assert told == 1


@pytest.mark.parametrize("name", ["plain", "with a blank and a / in it"])
async def test_abort_ends_what_runs_and_what_comes_later(default_model_path: Path, name: str) -> None:
    async with vllm_chain(default_model_path, "and so on " * 60) as (chain, stub, _):
        chain.runner.faults = replace(chain.runner.faults, delay_s=0.02)
        stream = aiter(stub.Generate(asked([5], name=name)))
        assert (await anext(stream)).HasField("chunk")
        (live,) = chain.scheduler.engine.live_requests()
        assert live.admission.caller.request_id == request_id(name)
        await stub.Abort(pb.AbortRequest(request_ids=["unknown", name]))
        assert await code_of(stream) == (grpc.StatusCode.CANCELLED, "ABORTED_BY_CALLER")
        await until(lambda: not chain.scheduler.engine.live_requests(), "the end")
        await stub.Abort(pb.AbortRequest(request_ids=[name]))
        assert await code_of(stub.Generate(asked([5], name=name))) == (grpc.StatusCode.CANCELLED, "ABORTED_EARLY")
        assert [one async for one in stub.Generate(asked([5], name=name, max_tokens=1))][-1].HasField("complete")
        wanted = {"cancelled": 2, "length": 1}
        for outcome, count in wanted.items():
            assert chain.registry.get_sample_value("tercet_requests_total", {"outcome": outcome}) == count


async def test_health_before_the_first_readiness_and_after(default_model_path: Path) -> None:
    async with vllm_chain(default_model_path) as (chain, stub, _):
        ready, missing = chain.watch.state, ChainState(Unavailable("nobody there", reason="NO_SCHEDULER"))
        chain.watch.state = missing
        assert (await code_of(stub.HealthCheck(pb.HealthCheckRequest())))[0] == grpc.StatusCode.UNAVAILABLE
        assert (await code_of(stub.GetModelInfo(pb.GetModelInfoRequest())))[0] == grpc.StatusCode.UNAVAILABLE
        chain.watch.state = ready
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
        chain.watch.state = missing
        sick = await stub.HealthCheck(pb.HealthCheckRequest())
        assert (sick.healthy, sick.message) == (False, "nobody there")
        chain.watch.state = ready


async def test_what_gateways_ask_about_model_load_and_tokenizer(default_model_path: Path) -> None:
    async with vllm_chain(default_model_path, ANSWER) as (chain, stub, _):
        model = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.served_model_name, model.max_context_length, model.is_generation) == ("smollm2-135m", 512, True)
        assert model.vocab_size == chain.model.vocab_size
        assert set(model.eos_token_ids) == set(chain.model.eos_ids)
        async for _ in stub.Generate(asked([5, 6, 7])):
            pass
        server = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert server.active_requests == 0
        assert server.last_receive_timestamp > 0
        (load,) = (await stub.GetLoads(pb.GetLoadsRequest())).loads
        assert (load.num_running_reqs, load.num_waiting_reqs) == (0, 0)
        assert load.gen_throughput > 0
        chunks = [one async for one in stub.GetTokenizer(smg_pb2.GetTokenizerRequest())]
        data = b"".join(one.data for one in chunks)
        assert hashlib.sha256(data).hexdigest() == chunks[-1].sha256
        assert "tokenizer.json" in zipfile.ZipFile(io.BytesIO(data)).namelist()


async def test_cached_blocks_are_told_in_tokens(default_model_path: Path) -> None:
    async with vllm_chain(default_model_path, ANSWER, core=CoreConfig(kv_events=True)) as (chain, stub, _):
        prompt = list(range(100, 111))
        answer = [*chain.model.encode(ANSWER, add_special=False), min(chain.model.eos_ids)]
        stream = stub.SubscribeKvEvents(smg_pb2.SubscribeKvEventsRequest())
        first = await stream.read()
        assert first.snapshot.count == 1
        assert [one.WhichOneof("data") for one in first.events] == ["cleared"]
        async for _ in stub.Generate(asked(prompt)):
            pass
        told: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        whole = (len(prompt) + len(answer) - 1) // 4  # the last drawn token is not computed
        async with asyncio.timeout(10):
            last = first.sequence_number
            while len(told) < whole:
                batch = await stream.read()
                assert batch.sequence_number == last + 1
                last = batch.sequence_number
                for event in batch.events:
                    (block,) = event.stored.blocks
                    parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
                    told[block.block_hash] = (parent, tuple(block.token_ids))
        assert next(iter(told.values()))[0] is None
        assert [parent for parent, _ in told.values()][1:] == list(told)[:-1]
        ids = [token_id for _, block in told.values() for token_id in block]
        assert ids == [*prompt, *answer][: 4 * whole]
        later = await stub.SubscribeKvEvents(smg_pb2.SubscribeKvEventsRequest()).read()
        assert later.snapshot.blocks == whole
        assert len(later.events) == whole + 1
        resumed = stub.SubscribeKvEvents(
            smg_pb2.SubscribeKvEventsRequest(start_sequence_number=first.sequence_number + 1)
        )
        assert (await resumed.read()).sequence_number == first.sequence_number + 1
        for one in (stream, resumed):
            one.cancel()


async def test_the_cache_is_flushed_once_nobody_holds_it(default_model_path: Path) -> None:
    async with vllm_chain(default_model_path, "and so on " * 60) as (chain, stub, _):
        prompt = list(range(100, 121))

        async def cached(name: str) -> int:
            events = [one async for one in stub.Generate(asked(prompt, name=name, max_tokens=1))]
            return int(events[-1].complete.cached_tokens)

        assert [await cached("first"), await cached("second")] == [0, 20]
        done = await stub.FlushCache(smg_pb2.FlushCacheRequest())
        assert (done.success, done.message) == (True, "5 blocks forgotten")
        assert await cached("third") == 0

        chain.runner.faults = replace(chain.runner.faults, delay_s=0.02)
        stream = aiter(stub.Generate(asked(prompt, name="runs")))
        assert (await anext(stream)).HasField("chunk")
        held = await stub.FlushCache(smg_pb2.FlushCacheRequest())
        assert not held.success
        assert "are held by requests that run" in held.message
        waiting = asyncio.ensure_future(stub.FlushCache(smg_pb2.FlushCacheRequest(timeout_s=50)))
        await stub.Abort(pb.AbortRequest(request_ids=["runs"]))
        assert (await code_of(stream))[0] == grpc.StatusCode.CANCELLED
        assert (await waiting).success
        chain.runner.faults = replace(chain.runner.faults, delay_s=0.0)
        assert await cached("last") == 0
        for timeout_s in (-1.0, 601.0, float("nan")):
            refused = stub.FlushCache(smg_pb2.FlushCacheRequest(timeout_s=timeout_s))
            assert (await code_of(refused))[0] == grpc.StatusCode.INVALID_ARGUMENT


async def test_keys_are_asked_for_and_one_tenant_can_not_abort_anothers(
    default_model_path: Path, tmp_path: Path
) -> None:
    (alice, alice_key), (bob, bob_key) = make_key(1, "alice"), make_key(2, "bob")
    gate = Gate(str(write_keys(tmp_path / "keys.json", alice, bob)))
    async with vllm_chain(default_model_path, "and so on " * 60, gate=gate) as (chain, stub, _):
        chain.runner.faults = replace(chain.runner.faults, delay_s=0.02)
        as_alice, as_bob = ((("authorization", f"Bearer {key}"),) for key in (alice_key, bob_key))
        assert await code_of(stub.Generate(asked([5]))) == (grpc.StatusCode.UNAUTHENTICATED, "NO_API_KEY")
        events = stub.SubscribeKvEvents(smg_pb2.SubscribeKvEventsRequest(), metadata=as_alice)
        assert (await code_of(events))[0] == grpc.StatusCode.PERMISSION_DENIED
        flush = stub.FlushCache(smg_pb2.FlushCacheRequest(), metadata=as_alice)
        assert (await code_of(flush))[0] == grpc.StatusCode.PERMISSION_DENIED
        stream = aiter(stub.Generate(asked([5], name="one"), metadata=as_alice))
        assert (await anext(stream)).HasField("chunk")
        await stub.Abort(pb.AbortRequest(request_ids=["one"]), metadata=as_bob)
        (live,) = chain.scheduler.engine.live_requests()
        assert live.admission.caller.tenant == "alice"
        assert (await anext(stream)).HasField("chunk")
        await stub.Abort(pb.AbortRequest(request_ids=["one"]), metadata=as_alice)
        assert await code_of(stream) == (grpc.StatusCode.CANCELLED, "ABORTED_BY_CALLER")
