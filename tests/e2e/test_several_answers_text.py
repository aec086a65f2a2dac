"""Several answers, echo and prompt logprobs through the whole chain: what callers see, whatever dies meanwhile."""

import asyncio
from pathlib import Path

import pytest
from fake_stack import RunningExecutor, until
from processes import fake_chain, processes
from resumable import running_edge
from scheduler_behind import MODEL, PATIENT, ROOMY, Edges, behind

import tercet
from executor.step import SamplingParams
from services.errors import Unavailable
from services.executor.fake_tokens import expected_hash_tokens, fake_prompt_logprobs
from services.tokenizer.answer import Answer, AnswerRules

PROMPT = "he said hello"
N = 4
TOKENS = 90
STOPS = ("he", "\x1b", "1")


def alone(index: int, tokens: int = TOKENS) -> tuple[str, tuple[int, ...]]:
    """What answer `index` is by itself: drawn as choice `index`, cut at the first stop string."""
    sampling = SamplingParams(choice=index, stop_token_ids=(1,), min_tokens=5)
    ids = expected_hash_tokens(
        MODEL.encode(PROMPT, add_special=True), tokens, ROOMY.vocab_size, sampling=sampling, eos_every=300
    )
    answer = Answer(MODEL, AnswerRules(STOPS, False, False, 5, frozenset((1,))))
    deltas = [delta for token_id in ids for delta in answer.push([token_id], ())]
    deltas += answer.finish()
    return "".join(delta.text for delta in deltas), tuple(one for delta in deltas for one in delta.token_ids)


async def ask(client: tercet.AsyncClient, heard: list[int], **options: object) -> tuple[tercet.Answer, ...]:
    stream = client.generate(PROMPT, **{"n": N, "max_tokens": TOKENS, "stop": STOPS, "min_tokens": 5, **options})  # type: ignore[arg-type]
    async for delta in stream:
        heard.append(delta.index)  # noqa: PERF401  (others look at it meanwhile)
    return stream.answers


def seen(answers: tuple[tercet.Answer, ...]) -> list[tuple[str, tuple[int, ...]]]:
    return [(answer.text, answer.token_ids) for answer in answers]


async def test_each_answer_has_its_own_stop_strings_and_end() -> None:
    async with behind(0.0) as back, running_edge(MODEL, back.target) as edge, tercet.AsyncClient(edge.target) as client:
        answers = await ask(client, [])
        assert seen(answers) == [alone(index) for index in range(N)]
        assert {answer.finish_reason for answer in answers} == {tercet.FinishReason.STOP}
        assert len({len(answer.token_ids) for answer in answers}) > 1
        for answer in answers:
            assert answer.stop_match in STOPS
            assert answer.usage is not None
            assert answer.usage.delivered_tokens == len(answer.token_ids)
            assert answer.usage.sampled_tokens == answer.usage.delivered_tokens + answer.usage.discarded_tokens
        plain = await ask(client, [], stop=None, min_tokens=None, max_tokens=20)
        assert len({answer.text for answer in plain}) == N


@pytest.mark.parametrize("dies", ["scheduler", "edge", "executor"])
async def test_they_go_on_over_what_dies(dies: str) -> None:
    """Until one has ended and the others have not, and then once more."""
    async with behind(0.01) as back:
        heard: list[int] = []
        whole = [alone(index) for index in range(N)]
        edges = Edges(back)
        await edges.start()
        try:
            async with tercet.AsyncClient(edges.target, retry=PATIENT, resume=dies == "edge") as client:
                asking = asyncio.ensure_future(ask(client, heard))
                for _ in range(3):
                    before = len(heard)
                    await until(lambda before=before: len(heard) > before + 8 or asking.done(), "progress")
                    match dies:
                        case "scheduler":
                            await back.restart()
                        case "edge":
                            await edges.restart()
                        case "executor":
                            _evict(back.fake)
                assert seen(await asking) == whole
        finally:
            await edges.end()


def _evict(fake: RunningExecutor) -> None:
    fake.service.evict(Unavailable("gone"))


async def test_a_client_that_leaves_ends_all() -> None:
    async with (
        behind(0.01) as back,
        running_edge(MODEL, back.target) as edge,
        tercet.AsyncClient(edge.target) as client,
    ):
        stream = client.generate(PROMPT, n=N, max_tokens=100, ignore_eos=True)
        async for _ in stream:
            stream.cancel()
            break
        await back.current.drained()


async def test_echo_comes_first_and_the_prompts_logprobs_before_it() -> None:
    prompt = MODEL.encode(PROMPT, add_special=True)
    rows = [fake_prompt_logprobs(prompt[:at], prompt[at], 2) for at in range(1, len(prompt))]
    async with behind(0.0) as back, running_edge(MODEL, back.target) as edge, tercet.AsyncClient(edge.target) as client:
        stream = client.generate(PROMPT, n=2, max_tokens=6, echo=True, prompt_logprobs=2, ignore_eos=True)
        first: dict[int, tercet.Delta] = {}
        async for delta in stream:
            assert len(stream.prompt_logprobs) == len(rows), "a delta before all of the prompt's logprobs"
            first.setdefault(delta.index, delta)
        assert {index: (delta.text, delta.token_ids) for index, delta in first.items()} == dict.fromkeys(
            range(2), (PROMPT, ())
        )
        for index, answer in enumerate(stream.answers):
            ids = expected_hash_tokens(prompt, 6, ROOMY.vocab_size, sampling=SamplingParams(choice=index))
            assert answer.token_ids == ids
            assert answer.text == PROMPT + MODEL.decode(ids)
        for token_id, row, found in zip(prompt[1:], rows, stream.prompt_logprobs, strict=True):
            assert (found.drawn.token_id, found.drawn.logprob) == (token_id, row.drawn)
            assert found.drawn.bytes == MODEL.token_bytes(token_id)
            assert [(top.token_id, top.logprob) for top in found.top] == list(row.top)


@pytest.mark.parametrize("dies", ["scheduler", "edge"])
async def test_prompt_logprobs_come_once_whatever_dies_before_the_first_token(dies: str) -> None:
    prompt = [3 + index % 60 for index in range(90)]
    rows = [fake_prompt_logprobs(prompt[:at], prompt[at], 0).drawn for at in range(1, len(prompt))]
    async with behind(0.15) as back:
        edges = Edges(back)
        await edges.start()
        try:
            async with tercet.AsyncClient(edges.target, retry=PATIENT) as client:
                options = {"n": 2, "max_tokens": 8, "echo": True, "prompt_logprobs": 0, "ignore_eos": True}
                stream = client.generate(prompt, **options)  # type: ignore[arg-type]
                reading = asyncio.ensure_future(_read(stream))
                await until(lambda: bool(stream.prompt_logprobs), "the first of them")
                if dies == "scheduler":
                    await back.restart()
                else:
                    await edges.restart()
                await reading
        finally:
            await edges.end()
        assert [row.drawn.logprob for row in stream.prompt_logprobs] == rows
        for index, answer in enumerate(stream.answers):
            ids = expected_hash_tokens(prompt, 8, ROOMY.vocab_size, sampling=SamplingParams(choice=index))
            assert (answer.token_ids, answer.text) == (ids, MODEL.decode(prompt) + MODEL.decode(ids))


async def _read(stream: tercet.AsyncStream) -> None:
    async for _ in stream:
        pass


async def test_a_resumed_echo_does_not_come_twice() -> None:
    async with behind(0.01) as back:
        edges = Edges(back)
        await edges.start()
        heard: list[int] = []
        try:
            async with tercet.AsyncClient(edges.target, retry=PATIENT) as client:
                asking = asyncio.ensure_future(ask(client, heard, echo=True))
                for _ in range(2):
                    before = len(heard)
                    await until(lambda before=before: len(heard) > before + 8 or asking.done(), "progress")
                    await edges.restart()
                assert seen(await asking) == [(PROMPT + text, ids) for text, ids in map(alone, range(N))]
        finally:
            await edges.end()


@pytest.mark.model
async def test_an_executor_killed_under_several_answers_costs_no_token(default_model_path: Path) -> None:
    async with processes() as started:
        edge = await fake_chain(started, default_model_path, "--fake-delay-s", "0.02")
        executor = started.running[0]
        async with tercet.AsyncClient(edge.target) as client:
            whole = await client.generate("hello", n=N, max_tokens=50, seed=5, ignore_eos=True).collect()
            assert len({answer.token_ids for answer in whole}) == N
            heard = 0
            stream = client.generate("hello", n=N, max_tokens=50, seed=5, ignore_eos=True)
            async for _ in stream:
                heard += 1
                if heard == 60:
                    executor.process.kill()
                    await executor.process.wait()
                    await started.start("executor", "--model", str(default_model_path), "--fake", "hash")
            assert seen(stream.answers) == seen(whole)
