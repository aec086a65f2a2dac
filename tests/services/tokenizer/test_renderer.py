"""Chat templates in processes that are killed: what a bad one costs, and that the next chat is served."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fake_stack import until

from services.errors import InvalidArgument, ResourceExhausted
from services.tokenizer.invalid import InvalidText, TemplateFailure
from services.tokenizer.prompts import PromptLimits, Prompts
from services.tokenizer.renderer import LIMITS, Renderer
from services.tokenizer.templates import ChatMessage, ChatTemplate, TemplateLimits
from services.tokenizer.workers import WorkerLimits
from tercet.v1 import tokenizer_pb2

CHAT = "<s>{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
# What no budget sees: one comparison of two values in C, 2 ** 60 steps long.
FOREVER = (
    "{% set n = namespace(a=['x'], b=['x']) %}{% for i in range(30) %}{% set n.a = [n.a, n.a] %}"
    "{% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a == n.b }}"
)
LOOPS = "{% if messages[0].content == 'loop' %}" + FOREVER + "{% endif %}" + CHAT
QUICK = replace(LIMITS, answer_s=1.0)  # for what never ends; others must not reach it on a busy machine


def chat(content: str, **more: object) -> tokenizer_pb2.ChatPrompt:
    return tokenizer_pb2.ChatPrompt(messages=[tokenizer_pb2.ChatMessage(role="user", content=content)], **more)  # type: ignore[arg-type]


def template(source: str, **limits: int) -> ChatTemplate:
    return ChatTemplate(source, control_tokens=["<s>"], bos_token="<s>", eos_token="", limits=TemplateLimits(**limits))


@asynccontextmanager
async def rendering(source: str, limits: WorkerLimits = LIMITS, **more: int) -> AsyncIterator[Renderer]:
    renderer = Renderer(template(source, **more), limits)
    try:
        yield renderer
    finally:
        await renderer.close()
        assert not renderer.workers.pids


async def test_a_worker_writes_what_the_template_writes() -> None:
    call = '[{"type": "function", "function": {"name": "f", "arguments": {"a": "é<s>"}}}]'
    asked = tokenizer_pb2.ChatPrompt(
        messages=[
            tokenizer_pb2.ChatMessage(role="user", content="<s> \U0001f600", name="me"),
            tokenizer_pb2.ChatMessage(role="assistant", content="", tool_calls_json=call),
            tokenizer_pb2.ChatMessage(role="tool", content="", tool_call_id="7"),
        ],
        tools_json=['{"name": "f"}'],
        add_generation_prompt=False,
    )
    source = "<s>{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools }}{{ add_generation_prompt }}"
    here = template(source).render_chat(
        [
            ChatMessage("user", "<s> \U0001f600", name="me"),
            ChatMessage(
                "assistant",
                None,
                tool_calls=({"type": "function", "function": {"name": "f", "arguments": {"a": "é<s>"}}},),
            ),
            ChatMessage("tool", "", tool_call_id="7"),
        ],
        tools=[{"name": "f"}],
        add_generation_prompt=False,
    )
    async with rendering(source) as renderer:
        assert await renderer.render(asked) == here
    assert [segment.text for segment in here.segments if segment.is_control_allowed] == ["<s>"]


async def test_a_template_that_never_ends_costs_its_worker_alone() -> None:
    async with rendering(LOOPS, QUICK) as renderer:
        renderer.warm()
        await until(lambda: len(renderer.workers._idle) == 2, "two workers")
        before = renderer.workers.pids
        bad = asyncio.create_task(renderer.render(chat("loop")))
        await asyncio.sleep(0)
        served = 0
        while not bad.done():  # the loop runs, and the other worker serves
            assert (await renderer.render(chat("hi"))).text == "<s>[user]hi"
            served += 1
        assert served > 2
        with pytest.raises(TemplateFailure, match=r"takes longer than 1 s"):
            await bad
        assert (await renderer.render(chat("hi"))).text == "<s>[user]hi"
        await until(lambda: len(renderer.workers._idle) == 2, "a new worker")
        assert len(renderer.workers.pids & before) == 1


async def test_all_workers_may_be_lost_at_once() -> None:
    async with rendering(LOOPS, QUICK) as renderer:
        tasks = [asyncio.create_task(renderer.render(chat(text))) for text in ("loop", "loop", "hi", "loop", "hi")]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one).__name__ for one in done] == [
            "TemplateFailure",
            "TemplateFailure",
            "RenderedChat",
            "TemplateFailure",
            "RenderedChat",
        ]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
            "more work than the limit",
        ),
        ("{{ 'A' * 10000000000 }}", "the limit is 16777216"),
        ("{% for i in range(3000) %}" + "x" * 99 + "{% endfor %}", "writes more than 200000 characters"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "calls itself too deeply|more work than the limit"),
    ],
)
async def test_limits_inside_the_worker_are_named_and_cost_no_worker(source: str, said: str) -> None:
    more = {"output_chars": 200_000} if "writes" in said else {}
    async with rendering(source, **more) as renderer:
        for _ in range(2):
            with pytest.raises(TemplateFailure, match=said) as failure:
                await renderer.render(chat("x"))
            assert failure.value.field == "tokenizer.chat_template"
        assert len(renderer.workers._idle) == len(renderer.workers.pids) > 0


@pytest.mark.parametrize(
    ("asked", "field", "said"),
    [
        (tokenizer_pb2.ChatPrompt(), "messages", "0 given"),
        (chat("x", tools_json=["{"]), r"tools_json[0]", "is not JSON"),
        (
            tokenizer_pb2.ChatPrompt(messages=[tokenizer_pb2.ChatMessage(role="assistant", tool_calls_json="{}")]),
            "messages[0].tool_calls_json",
            "must be a JSON list",
        ),
    ],
)
async def test_a_wrong_chat_is_the_callers_own(asked: tokenizer_pb2.ChatPrompt, field: str, said: str) -> None:
    async with rendering(CHAT) as renderer:
        with pytest.raises(InvalidText, match=said) as refused:
            await renderer.render(asked)
        assert refused.value.field == field


async def test_a_worker_that_dies_is_replaced() -> None:
    one = replace(LIMITS, processes=1, warm=1)
    async with rendering(LOOPS, one) as renderer:
        bad = asyncio.create_task(renderer.render(chat("loop")))
        await until(lambda: renderer.workers.pids and not renderer.workers._waiting, "the worker at work")
        (pid,) = renderer.workers.pids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(TemplateFailure, match="ended the process"):
            await bad
        assert (await renderer.render(chat("hi"))).text == "<s>[user]hi"


async def test_who_leaves_keeps_nobody_waiting() -> None:
    async with rendering(LOOPS, replace(QUICK, processes=1, warm=1)) as renderer:
        leaving = asyncio.create_task(renderer.render(chat("loop")))
        await until(lambda: renderer.workers.pids and not renderer.workers._waiting, "the worker at work")
        queued = asyncio.create_task(renderer.render(chat("loop")))
        await asyncio.sleep(0)
        for task in (leaving, queued):
            task.cancel()
        assert (await renderer.render(chat("hi"))).text == "<s>[user]hi"


async def test_no_more_than_so_many_wait() -> None:
    async with rendering(CHAT, replace(LIMITS, processes=1, waiting=2)) as renderer:
        tasks = [asyncio.create_task(renderer.render(chat("x"))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ResourceExhausted) as refused:
            await renderer.render(chat("x"))
        assert (refused.value.reason, refused.value.limit) == ("TEMPLATES_BUSY", "2")
        assert len(await asyncio.gather(*tasks)) == 2


async def test_a_worker_that_does_not_start_is_no_fault_of_the_chat() -> None:
    renderer = Renderer(template(CHAT), LIMITS, (sys.executable, "-c", "raise SystemExit(3)"))
    for _ in range(2):
        with pytest.raises(ResourceExhausted) as refused:
            await renderer.render(chat("x"))
        assert refused.value.reason == "NO_TEMPLATE_WORKER"
    await renderer.close()


async def test_an_answer_that_is_too_large_is_not_read() -> None:
    async with rendering(CHAT, replace(LIMITS, answer_bytes=200)) as renderer:
        with pytest.raises(TemplateFailure, match="ended the process"):
            await renderer.render(chat("x" * 300))


async def test_an_orphan_ends_by_itself() -> None:
    """Its parent was killed in the middle of a message: nobody is left who could end it."""
    script = (
        "import asyncio; from test_renderer import *\n"
        "async def main():\n"
        "    renderer = Renderer(template(LOOPS), replace(LIMITS, answer_s=0.1, processes=1, warm=1))\n"
        "    asked = asyncio.create_task(renderer.render(chat('loop')))\n"
        "    await until(lambda: renderer.workers.pids and not renderer.workers._waiting, 'the worker at work')\n"
        "    print(*renderer.workers.pids, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    tests = Path(__file__).parents[2]
    path = os.pathsep.join(
        [str(Path(__file__).parent), str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    told, _ = await parent.communicate()
    assert parent.returncode == -signal.SIGKILL
    await until(lambda: not _runs(int(told)), "its end")


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def test_a_failure_reaches_the_caller_by_name(default_model_path: Path) -> None:
    from chain import text_model
    from opentelemetry.trace import NoOpTracer

    model, _ = text_model(default_model_path)
    async with rendering(LOOPS, QUICK) as renderer:
        prompts = Prompts(model, renderer, PromptLimits(1000), NoOpTracer())
        with pytest.raises(InvalidArgument) as refused:
            await prompts.encode_chat(chat("loop"))
        assert (refused.value.reason, refused.value.field) == ("TEMPLATE_FAILED", "tokenizer.chat_template")
        with pytest.raises(InvalidArgument) as refused:
            await prompts.encode_chat(chat("x" * 2000))
        assert (refused.value.field, refused.value.limit) == ("chat", "1000")
