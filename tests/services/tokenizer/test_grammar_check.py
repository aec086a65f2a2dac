"""Grammars compiled once in a worker process: what they become, what is refused, what a worker's death costs."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fake_stack import until

from executor.grammar.engine import GrammarVocabulary
from services.errors import InvalidArgument, ResourceExhausted, Unimplemented
from services.tokenizer.grammar_check import GrammarCheck, GrammarLimits
from tercet.v1 import common_pb2

VOCABULARY = GrammarVocabulary((*(bytes([byte]) for byte in range(256)), b"<end>"), (256,), (256,))
EBNF = common_pb2.GRAMMAR_KIND_EBNF
REGEX = common_pb2.GRAMMAR_KIND_REGEX


# The opening is answered, then nothing comes.
ANSWERS_ONCE = (
    "import sys, struct, time; sys.stdin.buffer.read(sum(struct.unpack('=II', sys.stdin.buffer.read(8)))); "
    "sys.stdout.buffer.write(struct.pack('=II', 2, 0) + b'{}'); sys.stdout.buffer.flush(); "
)


def pids(check: GrammarCheck) -> frozenset[int]:
    return frozenset() if check._workers is None else check._workers.pids


def sampling(kind: common_pb2.GrammarKind.ValueType, source: str) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(grammar=common_pb2.Grammar(kind=kind, source=source))


@asynccontextmanager
async def checking(**more: object) -> AsyncIterator[GrammarCheck]:
    check = GrammarCheck(lambda: VOCABULARY, **more)  # type: ignore[arg-type]
    try:
        yield check
    finally:
        await check.close()


async def test_good_grammars_pass_and_gbnf_is_translated() -> None:
    async with checking() as check:
        assert await check.checked(common_pb2.SamplingParams()) is None
        regex = sampling(REGEX, "[a-z]+")
        assert await check.checked(regex) == regex.grammar
        lark = await check.checked(sampling(EBNF, 'root ::= "a" | "b" root'))
        assert lark is not None
        assert "start:" in lark.source


async def test_bad_grammars_name_the_field_and_what_is_wrong() -> None:
    async with checking() as check:
        for kind, source, message in (
            (REGEX, "(a", "unclosed group"),
            (EBNF, "root ::= unknown", "'unknown' not found"),
            (common_pb2.GRAMMAR_KIND_JSON_SCHEMA, '{"type":"array","uniqueItems":true}', "uniqueItems"),
        ):
            for _ in range(2):  # the second time from memory
                with pytest.raises(InvalidArgument, match=message) as refused:
                    await check.checked(sampling(kind, source))
                assert (refused.value.field, refused.value.reason) == ("sampling.grammar.source", "INVALID_GRAMMAR")
        with pytest.raises(InvalidArgument) as refused:
            await check.checked(sampling(common_pb2.GRAMMAR_KIND_UNSPECIFIED, "x"))
        assert refused.value.field == "sampling.grammar.kind"


async def test_equal_grammars_are_compiled_once() -> None:
    async with checking() as check:
        await asyncio.gather(*(check.checked(sampling(REGEX, "a+")) for _ in range(10)))
        (pid,) = pids(check)
        os.kill(pid, signal.SIGKILL)
        workers = check._workers
        assert workers is not None
        await until(lambda: workers._idle[0].returncode is not None, "its end")
        assert await check.checked(sampling(REGEX, "a+")), "from memory: no worker is needed"
        assert await check.checked(sampling(REGEX, "b+")), "a new worker takes its place"
        assert pid not in pids(check)


async def test_what_is_kept_is_bounded() -> None:
    async with checking(limits=GrammarLimits(kept=3, kept_bytes=40)) as check:
        for text in ("a", "b", "c", "d", "e" * 15):
            await check.checked(sampling(REGEX, text))
        assert len(check._kept) == 3
        await check.checked(sampling(REGEX, "f" * 18))
        assert len(check._kept) == 1
        assert check._kept_bytes == 36


async def test_a_worker_that_takes_too_long_is_killed() -> None:
    script = ANSWERS_ONCE + "time.sleep(60)"
    limits = GrammarLimits(compile_s=0.1)
    async with checking(limits=limits, command=(sys.executable, "-c", script)) as check:
        with pytest.raises(InvalidArgument, match=r"takes longer than 0\.1 s"):
            await check.checked(sampling(REGEX, "a"))
        assert not pids(check)


async def test_a_worker_that_dies_refuses_its_grammar() -> None:
    script = ANSWERS_ONCE + "sys.stdin.buffer.read(1)"
    async with checking(command=(sys.executable, "-c", script)) as check:
        with pytest.raises(InvalidArgument, match="too much for the compiler"):
            await check.checked(sampling(REGEX, "a\n"))


async def test_a_worker_that_does_not_start_is_no_fault_of_the_grammar() -> None:
    async with checking(command=(sys.executable, "-c", "raise SystemExit(3)")) as check:
        with pytest.raises(ResourceExhausted) as refused:
            await check.checked(sampling(REGEX, "a"))
        assert refused.value.reason == "NO_GRAMMAR_WORKER"


async def test_a_request_that_leaves_keeps_nobody_waiting() -> None:
    async with checking() as check:
        leaving = asyncio.create_task(check.checked(sampling(REGEX, "a")))
        await until(lambda: pids(check), "the worker")
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert await check.checked(sampling(REGEX, "b"))


async def test_no_more_than_so_many_wait() -> None:
    async with checking(limits=GrammarLimits(waiting=2)) as check:
        tasks = [asyncio.create_task(check.checked(sampling(REGEX, text))) for text in ("a", "b")]
        await asyncio.sleep(0)
        with pytest.raises(ResourceExhausted) as refused:
            await check.checked(sampling(REGEX, "c"))
        assert refused.value.reason == "GRAMMARS_BUSY"
        assert all(await asyncio.gather(*tasks))


async def test_an_edge_without_grammars_refuses_them_by_name() -> None:
    with pytest.raises(Unimplemented) as refused:
        await GrammarCheck(None).checked(sampling(REGEX, "a"))
    assert refused.value.field == "sampling.grammar"
