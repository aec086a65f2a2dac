"""A scheduler or an edge that dies in the middle of answers: who asked sees a pause, and the same text and tokens."""

import asyncio
import itertools
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import pytest
from chain import scheduler
from fake_stack import running_executor, until
from resumable import RunningEdge, running_edge
from scheduler_behind import MODEL, PATIENT, ROOMY, behind

import tercet
from services.executor.fake import FakeRunner
from tercet.errors import AbortedError, UnavailableError

PROMPTS = ["hello 123", "he said hello", "1212 hell", "äöü 世界"]


@dataclass
class Seen:
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: tercet.FinishReason | None
    stop_match: str | None
    delivered: int


async def ask(client: tercet.AsyncClient, number: int, heard: list[int]) -> Seen:
    """heard: one entry a delta, as it comes. Every second one draws with penalties, some end at stop strings."""
    drawn = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.2}
    stream = client.generate(
        PROMPTS[number % len(PROMPTS)],
        max_tokens=60 + number,
        seed=number,
        logprobs=1,
        min_tokens=5,
        stop=["he", "\x1b"] if number % 3 == 0 else None,
        **(drawn if number % 2 else {"temperature": 0.0}),  # type: ignore[arg-type]
    )
    async for delta in stream:
        heard.append(len(delta.text))  # noqa: PERF401  (others look at it meanwhile)
    answer = stream.answers[0]
    assert answer.usage is not None
    assert answer.usage.sampled_tokens == answer.usage.delivered_tokens + answer.usage.discarded_tokens
    return Seen(
        answer.text,
        answer.token_ids,
        tuple(row.drawn.logprob for row in answer.logprobs),
        answer.finish_reason,
        answer.stop_match,
        answer.usage.delivered_tokens,
    )


async def undisturbed(target: str, count: int) -> list[Seen]:
    async with tercet.AsyncClient(target) as client:
        return list(await asyncio.gather(*(ask(client, number, []) for number in range(count))))


async def test_streams_go_on_over_schedulers_that_die() -> None:
    async with behind() as back, running_edge(MODEL, back.target) as edge:
        whole = await undisturbed(edge.target, 8)
        assert len({seen.finish for seen in whole}) > 1
        heard: list[int] = []
        async with tercet.AsyncClient(edge.target, resume=False) as client:
            asking = [asyncio.ensure_future(ask(client, number, heard)) for number in range(8)]
            for _ in range(3):
                before = len(heard)
                await until(lambda before=before: len(heard) > before + 30, "progress")  # type: ignore[misc]
                await back.restart()
            assert await asyncio.gather(*asking) == whole
        await until(lambda: back.current.engine.live_requests() == (), "every request is let go")


async def test_the_sdk_goes_on_over_edges_that_die() -> None:
    async with behind() as back:
        async with running_edge(MODEL, back.target) as edge:
            whole = await undisturbed(edge.target, 8)
        heard: list[int] = []
        async with tercet.AsyncClient(edge.target, retry=PATIENT) as client:
            asking = []
            for turn in itertools.count():
                async with running_edge(MODEL, back.target, listen=edge.target):
                    asking = asking or [asyncio.ensure_future(ask(client, number, heard)) for number in range(8)]
                    if turn == 3:
                        assert await asyncio.gather(*asking) == whole
                        break
                    before = len(heard)
                    await until(lambda before=before: len(heard) > before + 30, "progress")  # type: ignore[misc]


async def test_both_may_die_and_the_tokens_stay() -> None:
    async with behind() as back:
        async with running_edge(MODEL, back.target) as edge:
            whole = await undisturbed(edge.target, 4)
        heard: list[int] = []
        async with tercet.AsyncClient(edge.target, retry=PATIENT) as client:
            async with running_edge(MODEL, back.target, listen=edge.target):
                asking = [asyncio.ensure_future(ask(client, number, heard)) for number in range(4)]
                await until(lambda: len(heard) > 20, "progress")
                await back.restart()
                await until(lambda: len(heard) > 40, "progress")
            await back.restart()
            async with running_edge(MODEL, back.target, listen=edge.target):
                assert await asyncio.gather(*asking) == whole


async def test_a_scheduler_that_stays_away_ends_the_stream_after_the_grace() -> None:
    async with behind() as back, running_edge(MODEL, back.target, grace_s=0.3) as edge:
        heard: list[int] = []
        async with tercet.AsyncClient(edge.target, resume=False) as client:
            asking = asyncio.ensure_future(ask(client, 1, heard))
            await until(lambda: len(heard) > 5, "progress")
            await back.end()
            with pytest.raises(UnavailableError):
                await asking
        await back.start()


async def test_other_numerics_end_the_stream_and_nothing_is_made_up() -> None:
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(
            running_executor(runner=FakeRunner("hash", ROOMY), tokenizer_hash=MODEL.hash, eos_token_ids=(1,))
        )
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.01)
        first = AsyncExitStack()
        running = await first.enter_async_context(scheduler(fake.target))
        await until(lambda: not running.lease.state.reason, "the lease")
        edge: RunningEdge = await stack.enter_async_context(running_edge(MODEL, running.target))
        heard: list[int] = []
        async with tercet.AsyncClient(edge.target) as client:
            asking = asyncio.ensure_future(ask(client, 1, heard))
            await until(lambda: len(heard) > 5, "progress")
            await first.aclose()
            other = FakeRunner("hash", ROOMY, eos_every=7)  # other numerics
            changed = await stack.enter_async_context(
                running_executor(runner=other, tokenizer_hash=MODEL.hash, eos_token_ids=(1,))
            )
            again = await stack.enter_async_context(scheduler(changed.target, listen=running.target))
            await until(lambda: not again.lease.state.reason, "the lease")
            with pytest.raises(AbortedError) as ended:
                await asking
            assert ended.value.reason == "NUMERICS_CHANGED"
