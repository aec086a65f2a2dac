"""The prefix cache over the wire: usage, salts, pins, and the events that others route by."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from chain import Chain, chain

from services.executor.fake import Faults
from services.executor.fake_tokens import expected_hash_tokens
from services.rpc_errors import from_rpc_error
from services.scheduler.core.calls import CoreConfig
from services.scheduler.engine import EngineConfig
from services.scheduler.prefixes import PrefixConfig
from tercet.v1 import common_pb2, scheduler_pb2

PROMPT = list(range(10, 30))
EVENTS = CoreConfig(kv_events=True)


async def generate(
    running: Chain, prompt: Sequence[int], tokens: int = 4, *, tenant: str = "t", **cache: object
) -> tuple[list[int], common_pb2.Usage]:
    message = scheduler_pb2.SchedulerServiceGenerateRequest(
        context=common_pb2.RequestContext(tenant=tenant),
        prompt_ids=prompt,
        sampling=common_pb2.SamplingParams(temperature=0, max_tokens=tokens),
        cache=common_pb2.CacheControl(**cache),  # type: ignore[arg-type]
    )
    output: list[int] = []
    async for event in running.stub.Generate(message):
        output += event.delta.token_ids
        if event.HasField("finished"):
            return output, event.finished.usage
    raise AssertionError("no end")


def pin(prompt: Sequence[int], ttl_ns: int, tenant: str = "t") -> scheduler_pb2.SchedulerServicePinPrefixRequest:
    return scheduler_pb2.SchedulerServicePinPrefixRequest(
        context=common_pb2.RequestContext(tenant=tenant), prompt_ids=prompt, ttl_ns=ttl_ns
    )


async def read(call: Any) -> scheduler_pb2.SchedulerServiceWatchKvEventsResponse:
    event = await call.read()
    assert isinstance(event, scheduler_pb2.SchedulerServiceWatchKvEventsResponse)
    return event


async def test_usage_tells_what_was_cached_and_the_load_what_is() -> None:
    async with chain() as (running, fake):
        outputs = []
        for cached in (0, 20):
            output, usage = await generate(running, [*PROMPT, 5])
            assert usage.cached_tokens == cached
            outputs.append(output)
        new = fake.runner.steps[0].slices[0].new
        assert new is not None
        assert outputs == [list(expected_hash_tokens([*PROMPT, 5], 4, 1000, sampling=new.sampling))] * 2
        load = await running.stub.GetLoad(scheduler_pb2.SchedulerServiceGetLoadRequest())
        assert load.lanes[0].cached_blocks == 6


async def test_salts_over_the_wire() -> None:
    async with chain() as (running, _):
        assert (await generate(running, [*PROMPT, 5], salt="a"))[1].cached_tokens == 0
        assert (await generate(running, [*PROMPT, 5], salt="a"))[1].cached_tokens == 20
        assert (await generate(running, [*PROMPT, 5]))[1].cached_tokens == 0
        assert (await generate(running, [*PROMPT, 5], tenant="u", salt="a"))[1].cached_tokens == 0
        assert (await generate(running, [*PROMPT, 5], tenant="a"))[1].cached_tokens == 0
        assert (await generate(running, [*PROMPT, 5], salt="a", bypass=True))[1].cached_tokens == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(running, PROMPT, salt="x" * 257)
        error = from_rpc_error(caught.value)
        assert (error.field, error.limit) == ("cache.salt", "256")


async def test_without_a_cache_nothing_is_kept_and_pinning_is_refused() -> None:
    off = EngineConfig(prefix=PrefixConfig(enabled=False))
    async with chain(config=off) as (running, _):
        for _ in range(2):
            assert (await generate(running, [*PROMPT, 5]))[1].cached_tokens == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.PinPrefix(pin(PROMPT, 1000))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_pinning_tells_how_much_and_for_how_long() -> None:
    config = EngineConfig(prefix=PrefixConfig(pin_max_ns=500))
    async with chain(config=config) as (running, _):
        assert (await running.stub.PinPrefix(pin(PROMPT, 10))).pinned_tokens == 0
        await generate(running, PROMPT)
        pinned = await running.stub.PinPrefix(pin(PROMPT, 10**12))
        assert (pinned.pinned_tokens, pinned.ttl_ns) == (20, 500)
        assert (await running.stub.PinPrefix(pin(PROMPT, 10, tenant="u"))).pinned_tokens == 0
        assert (await running.stub.PinPrefix(pin(PROMPT, 0))).pinned_tokens == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.PinPrefix(pin([], 10))
        assert from_rpc_error(caught.value).field == "prompt_ids"


async def test_a_flush_forgets_what_every_tenant_has_and_tells_those_who_watch() -> None:
    flush = scheduler_pb2.SchedulerServiceFlushCacheRequest()
    async with chain(core=EVENTS) as (running, fake):
        outputs = []
        for _ in range(2):
            for tenant in ("t", "u"):
                output, usage = await generate(running, [*PROMPT, 5], tenant=tenant)
                assert usage.cached_tokens == 0
                outputs.append(output)
            await running.stub.PinPrefix(pin(PROMPT, 10**9))
            answer = await running.stub.FlushCache(flush)
            assert (answer.removed_blocks, answer.held_blocks) == (12, 0)
        assert outputs[0] == outputs[2]
        assert outputs[1] == outputs[3]
        watch = running.stub.WatchKvEvents(scheduler_pb2.SchedulerServiceWatchKvEventsRequest(from_sequence=1))
        stored: set[bytes] = set()
        for _ in range(2):
            while len(stored) < 12:
                stored |= set((await read(watch)).stored.keys)
            while stored:
                removed = set((await read(watch)).removed.keys)
                assert removed <= stored
                assert removed
                stored -= removed
        watch.cancel()
        fake.runner.faults = Faults(delay_s=0.02)
        call = running.stub.Generate(
            scheduler_pb2.SchedulerServiceGenerateRequest(
                prompt_ids=[*PROMPT, 5], sampling=common_pb2.SamplingParams(temperature=0, max_tokens=40)
            )
        )
        while not (await call.read()).HasField("delta"):
            pass
        answer = await running.stub.FlushCache(flush)
        assert answer.removed_blocks == 0
        assert answer.held_blocks >= 5
        call.cancel()


async def test_events_are_replayed_from_a_number_and_go_on() -> None:
    async with chain(core=EVENTS) as (running, fake):
        await generate(running, PROMPT[:9], 1)
        watch = running.stub.WatchKvEvents(scheduler_pb2.SchedulerServiceWatchKvEventsRequest(from_sequence=1))
        first = await read(watch)
        assert first.sequence == 1
        assert (len(first.stored.keys), first.stored.parent_key, first.stored.block_size) == (2, b"", 4)
        assert first.stored.executor == fake.target
        new = running.stub.WatchKvEvents(scheduler_pb2.SchedulerServiceWatchKvEventsRequest())
        waiting = asyncio.create_task(read(watch))
        newest = asyncio.create_task(read(new))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await generate(running, PROMPT[:13], 1)
        for event in (await waiting, await newest):
            assert event.sequence == 2
            assert (len(event.stored.keys), event.stored.parent_key) == (1, first.stored.keys[-1])
        for call in (watch, new):
            call.cancel()


async def test_a_watcher_too_late_or_ahead_is_told_the_limits() -> None:
    config = EngineConfig(prefix=PrefixConfig(kept_event_keys=2))
    async with chain(core=EVENTS, config=config) as (running, _):
        for first in (10, 30, 50):
            await generate(running, range(first, first + 9), 1)
        for number, code, limit in ((1, "FAILED_PRECONDITION", "3"), (5, "INVALID_ARGUMENT", "4")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await running.stub.WatchKvEvents(
                    scheduler_pb2.SchedulerServiceWatchKvEventsRequest(from_sequence=number)
                ).read()
            assert caught.value.code().name == code
            error = from_rpc_error(caught.value)
            assert (error.field, error.limit) == ("from_sequence", limit)
