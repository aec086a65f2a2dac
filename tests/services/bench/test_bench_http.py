"""The HTTP side against a server with faults: what is counted, and what each failure is called."""

import asyncio
import itertools

import pytest
from fake_stack import until
from hypothesis import given
from hypothesis import strategies as st
from openai_server import OpenAiServer, Play, openai_server

from services.bench.http1 import EventReader, ProtocolError, ResponseReader
from services.bench.http_client import BadUrl, parse_url
from services.bench.http_target import HttpTarget
from services.bench.plan import Settings, stages
from services.bench.prompts import PromptError, make_prompts
from services.bench.record import Failure, Reply
from services.bench.session import open_session
from services.bench.summary import figures
from services.bench.target import Drawing, TargetError
from services.simulate.load import Request
from services.simulate.summary import Objectives

GREEDY = Drawing(0.0, 7)


def target(at: OpenAiServer, **options: object) -> HttpTarget:
    return HttpTarget(parse_url(at.url), GREEDY, **options)  # type: ignore[arg-type]


async def played(play: Play, output: int = 6, owner: str = "llamacpp", limit_s: float = 30.0) -> Reply:
    async with openai_server(owner=owner, play=lambda number: play) as server:
        asked = target(server)
        await asked.describe()
        return await asked.ask("The one two", output, limit_s)


async def test_an_answer_is_counted() -> None:
    reply = await played(Play())
    assert (reply.failure, reply.prompt_tokens, reply.output_tokens) == (None, 3, 6)
    assert reply.tokens == (1,) * 6
    assert sorted(reply.arrivals) == list(reply.arrivals)
    assert reply.ended_ns >= reply.arrivals[-1]


async def test_several_tokens_a_message() -> None:
    told = await played(Play(per_message=4, counts=True), owner="vllm")
    assert (told.tokens, told.output) == ((4, 2), 6)
    untold = await played(Play(per_message=4))
    assert (untold.tokens, len(untold.arrivals), untold.output) == ((), 2, 6)


async def test_without_usage_messages_are_counted() -> None:
    reply = await played(Play(usage=False), owner="somebody")
    assert (reply.failure, reply.output_tokens, reply.output) == (None, None, 6)


@pytest.mark.parametrize(
    ("play", "failure", "detail"),
    [
        (Play(status=429), Failure.REFUSED, "HTTP 429: as the script says"),
        (Play(status=503), Failure.REFUSED, "HTTP 503"),
        (Play(status=504), Failure.TIMEOUT, "HTTP 504"),
        (Play(status=400), Failure.INVALID, "HTTP 400"),
        (Play(status=500), Failure.FAILED, "HTTP 500"),
        (Play(cut_after=0), Failure.CUT, "without a finish reason"),
        (Play(cut_after=3), Failure.CUT, "without a finish reason"),
        (Play(finish=None), Failure.CUT, "without a finish reason"),
        (Play(finish="time_limit"), Failure.TIMEOUT, "time_limit"),
        (Play(finish="content_filter"), Failure.FAILED, "content_filter"),
        (Play(junk=True), Failure.CUT, "no chunk"),
        (Play(junk=True, tokens=0), Failure.FAILED, "no chunk"),
        (Play(error="out of memory"), Failure.CUT, "out of memory"),
        (Play(tokens=0), Failure.WRONG_COUNT, "no token"),
    ],
)
async def test_each_failure_has_its_name(play: Play, failure: Failure, detail: str) -> None:
    reply = await played(play)
    assert reply.failure is failure
    assert detail in reply.detail


async def test_a_first_token_that_does_not_come_is_a_timeout() -> None:
    never = asyncio.Event()
    reply = await played(Play(held=never), limit_s=0.05)
    never.set()
    assert (reply.failure, reply.arrivals) == (Failure.TIMEOUT, ())


async def test_nobody_there_is_refused() -> None:
    async with openai_server() as server:
        asked = target(server, model="toy", server="llama")
        await asked.describe()
    reply = await asked.ask("The one", 4, 5.0)
    assert reply.failure is Failure.REFUSED
    with pytest.raises(TargetError, match=r"127\.0\.0\.1"):
        await target(server).describe()


@pytest.mark.parametrize(
    ("owner", "kind", "exact"),
    [("llamacpp", "llama", True), ("vllm", "vllm", True), ("tercet", "tercet", True), ("openai", "openai", False)],
)
async def test_a_server_is_recognised(owner: str, kind: str, exact: bool) -> None:
    async with openai_server(owner=owner) as server:
        asked = target(server)
        facts = await asked.describe()
        assert (facts.kind, facts.model, facts.max_model_len, facts.exact) == (kind, "toy", 4096, exact)
        await asked.ask("The", 3, 30.0)
        assert server.bodies[0].get("ignore_eos", False) is exact
        assert server.bodies[0]["max_tokens"] == 3


async def test_the_key_and_more_fields_are_sent() -> None:
    async with openai_server() as server:
        asked = HttpTarget(parse_url(server.url, "s3cret"), GREEDY, extra={"ignore_eos": True})
        assert (await asked.describe()).exact
        await asked.ask("The", 1, 30.0)
        assert server.bodies[0]["ignore_eos"] is True
        assert all("Authorization: Bearer s3cret" in head for head in server.headers)


@pytest.mark.parametrize("tokenize", [True, False])
@pytest.mark.parametrize("chat", [True, False])
async def test_prompts_have_the_exact_length(tokenize: bool, chat: bool) -> None:
    """Also where some words are several tokens, and where the server puts a template around."""
    long = {"government", "community", "water"}
    async with openai_server(
        owner="vllm", tokenize=tokenize, word_tokens=lambda word: 2 if word in long else 1
    ) as server:
        asked = target(server, chat=chat)
        await asked.describe()
        if not chat and not tokenize:
            with pytest.raises(TargetError, match="HTTP 404"):
                await make_prompts(asked.count, 1)
            return
        prompts = await make_prompts(asked.count, 1)
        assert not long & set(prompts.words)
        assert prompts.overhead == (4 if chat else 1)
        for length in (10, 333):
            text = prompts.text(f"a/{length}", Request(0, length, 1))
            assert await asked.count(text) == length
        assert bool(server.tokenized) is (tokenize and not chat)


async def test_prompts_differ_and_are_always_the_same() -> None:
    async def count(text: str) -> int:
        return len(text.split())

    one, other = await make_prompts(count, 1), await make_prompts(count, 1)
    texts = [one.text(str(index), Request(0, 40, 1)) for index in range(200)]
    assert len({text[:30] for text in texts}) == 200
    assert texts == [other.text(str(index), Request(0, 40, 1)) for index in range(200)]
    shared = await make_prompts(count, 1, shared=30)
    begins = {tuple(shared.text(str(index), Request(0, 40, 1)).split()[:30]) for index in range(20)}
    assert len(begins) == 1
    assert len({shared.text(str(index), Request(0, 40, 1)) for index in range(20)}) == 20
    with pytest.raises(PromptError, match="30 are to be shared"):
        shared.check(20)


async def test_equal_blocks_of_a_trace_get_equal_words() -> None:
    async def count(text: str) -> int:
        return len(text.split())

    prompts = await make_prompts(count, 1)
    first, second = (
        prompts.text(key, Request(0, 1100, 1, blocks)).split() for key, blocks in (("a", (1, 2, 3)), ("b", (1, 2, 9)))
    )
    assert len(first) == len(second) == 1100
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:]


async def test_a_tokenizer_that_cuts_all_words_is_refused() -> None:
    async with openai_server(word_tokens=len) as server:
        asked = target(server)
        await asked.describe()
        with pytest.raises(PromptError, match="0 of"):
            await make_prompts(asked.count, 1)


async def test_a_session_judges_every_answer() -> None:
    """Errors by kind, and nothing of the failed ones in the figures."""
    faults = {1: Play(status=503), 2: Play(cut_after=2), 3: Play(tokens=2), 4: Play(prompt_error=1)}
    async with openai_server(owner="llamacpp", tokenize=True) as server:
        server.play = lambda number: faults.get(number - 2, Play())  # two of warm-up
        settings = Settings(tiers=(20,), output=5, concurrency=(2,), requests=8, warm_up=2, repeats=1)
        (stage,) = stages(settings)
        session = await open_session(target(server), settings, [stage])
        heard: list[bool] = []
        run = await session.run(stage, 0, lambda stage, repeat: lambda outcome: heard.append(outcome.served))
        found = figures(run.outcomes, Objectives())
    assert (found.requests, found.served) == (8, 4)
    assert found.failures == {"cut": 1, "refused": 1, "wrong count": 2}
    assert len(heard) == 8
    assert len({body["prompt"] for body in server.bodies}) == 10
    assert [body["max_tokens"] for body in server.bodies] == [5] * 10


async def test_a_server_that_may_end_early_is_counted_as_served() -> None:
    async with openai_server(play=lambda number: Play(tokens=3, finish="stop")) as server:
        settings = Settings(tiers=(20,), output=5, concurrency=(1,), requests=2, warm_up=0)
        (stage,) = stages(settings)
        session = await open_session(target(server), settings, [stage])
        run = await session.run(stage, 0)
    assert [one.reply.output for one in run.outcomes] == [3, 3]
    assert all(one.served for one in run.outcomes)


async def test_a_load_beyond_the_context_is_refused_before_anything_is_sent() -> None:
    async with openai_server() as server:
        settings = Settings(tiers=(4000,), output=97)
        with pytest.raises(TargetError, match="4097 tokens"):
            await open_session(target(server), settings, stages(settings))
        assert not server.bodies


async def test_a_server_that_serves_nothing_is_told_at_once() -> None:
    async with openai_server(play=lambda number: Play(status=500)) as server:
        settings = Settings(tiers=(20,), output=5, concurrency=(2,), requests=50)
        (stage,) = stages(settings)
        session = await open_session(target(server), settings, [stage])
        with pytest.raises(TargetError, match="HTTP 500"):
            await session.run(stage, 0)
        assert len(server.bodies) == 2


async def test_an_open_loop_waits_for_nobody() -> None:
    """All of its requests are under way while not one has been answered."""
    held = asyncio.Event()
    async with openai_server(play=lambda number: Play(held=held)) as server:
        settings = Settings(tiers=(20,), output=5, rates=(1000.0,), requests=5, warm_up=0)
        (stage,) = stages(settings)
        session = await open_session(target(server), settings, [stage])
        running = asyncio.create_task(session.run(stage, 0))
        await until(lambda: len(server.bodies) == 5, "all requests")
        held.set()
        run = await running
    assert all(one.served and one.started_ns >= one.due_ns for one in run.outcomes)
    gaps = [after.due_ns - before.due_ns for before, after in itertools.pairwise(run.outcomes)]
    wanted = [after.at_ns - before.at_ns for before, after in itertools.pairwise(stage.requests)]
    assert gaps == wanted


@pytest.mark.parametrize("url", ["localhost:80", "ftp://a", "http://", "http://a:99999", "http://a/?b=c", "http://u@a"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(BadUrl):
        parse_url(url)


def test_urls() -> None:
    assert parse_url("http://[::1]:8000/v1").authority == "[::1]:8000"
    site = parse_url("https://example.test/openai/v1/")
    assert (site.host, site.port, site.secure, site.base) == ("example.test", 443, True, "/openai")


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4;x=y\r\nabcd\r\n1\r\ne\r\n0\r\n\r\n"
COUNTED = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Made\r\nContent-Length: 5\r\n\r\nabcde"


@given(st.sampled_from([CHUNKED, COUNTED]), st.lists(st.integers(0, 100), max_size=12))
def test_a_response_reads_the_same_however_it_is_cut(response: bytes, cuts: list[int]) -> None:
    reader = ResponseReader()
    edges = [0, *sorted(min(cut, len(response)) for cut in cuts), len(response)]
    body = b"".join(reader.feed(response[start:end]) for start, end in itertools.pairwise(edges))
    assert (body, reader.complete) == (b"abcde", True)


def test_a_response_without_a_length_ends_with_the_connection() -> None:
    reader = ResponseReader()
    assert reader.feed(b"HTTP/1.0 200 OK\r\n\r\nabc") == b"abc"
    assert not reader.complete
    reader.close()
    assert reader.complete


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"a" * 70_000,
    ],
)
def test_what_is_no_response_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        ResponseReader().feed(data)


@given(st.lists(st.integers(0, 60), max_size=8))
def test_events_read_the_same_however_they_are_cut(cuts: list[int]) -> None:
    stream = b": hello\ndata: one\n\nevent: x\r\ndata:two\r\n\r\nid: 3\n\ndata: [DONE]\n\n"
    reader = EventReader()
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    found = [event for start, end in itertools.pairwise(edges) for event in reader.feed(stream[start:end])]
    assert found == [b"one", b"two", b"[DONE]"]
