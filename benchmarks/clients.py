"""Other people's clients against the whole chain with the default model: what each of them says.

`python benchmarks/clients.py openai|smg|aiperf|guidellm|grpc`. Starts the chain as `tercet up` does, on loopback, runs
the client (`--program`: where it is, in an environment of its own), shows what it says, and ends the chain. `openai` is
a transcript of the `openai` package against our gateway, `smg` the same against the gateway `smg` in front of
VllmEngine; both fail where an answer is not what it has to be.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import openai
import pydantic

from services.catalogue import DEFAULT_MODEL
from services.stack import Stack, StackOptions
from services.tokenizer.export import tokenizer_files
from services.tokenizer.loading import load_text

READY_S: Final = 120.0
REQUESTS: Final = 32
AT_ONCE: Final = 4
PROMPT_TOKENS: Final = 64
OUTPUT_TOKENS: Final = 32
QUESTION: Final = "What is the capital of France? Answer briefly."


@dataclass(frozen=True)
class Chain:
    """Where it is reached. vllm_port: of VllmEngine. tokenizer: a directory that other tools read. scratch: a directory
    for what a client writes."""

    http: str
    grpc: str
    vllm_port: int
    tokenizer: Path
    scratch: Path


def export(directory: Path) -> Path:
    text = load_text(DEFAULT_MODEL)
    target = directory / "tokenizer"
    target.mkdir()
    for name, content in tokenizer_files(text.model, text.template, text.context_length).items():
        (target / name).write_bytes(content)
    return target


async def program(*command: str, cwd: Path) -> int:
    print("$", " ".join(command), flush=True)
    environ = {**os.environ, "NO_COLOR": "1", "COLUMNS": "120", "K6_NO_USAGE_REPORT": "true"}
    process = await asyncio.create_subprocess_exec(*command, cwd=cwd, env=environ)
    return await process.wait()


async def aiperf(chain: Chain, tool: str) -> int:
    return await program(
        *(tool, "profile", "--model", DEFAULT_MODEL, "--url", chain.http, "--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", str(chain.tokenizer), "--request-count", str(REQUESTS), "--concurrency", str(AT_ONCE)),
        *("--synthetic-input-tokens-mean", str(PROMPT_TOKENS), "--output-tokens-mean", str(OUTPUT_TOKENS)),
        *("--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", str(chain.scratch / "aiperf")),
        cwd=chain.scratch,
    )


async def guidellm(chain: Chain, tool: str) -> int:
    backend = f"kind=openai_http,target={chain.http},model={DEFAULT_MODEL}"
    data = f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    return await program(
        *(tool, "run", "--backend", backend, "--profile", f"kind=concurrent,streams={AT_ONCE}", "--data", data),
        *("--constraint", f"kind=max_requests,count={REQUESTS}", "--disable-progress"),
        *("--tokenizer", f"kind=huggingface_auto,model={chain.tokenizer}", "--output", "kind=console"),
        cwd=chain.scratch,
    )


async def grpc(chain: Chain, tool: str) -> int:
    """Load over gRPC by our own bench. tool: the interpreter."""
    return await program(
        *(tool, "-m", "services.cli", "bench", "--target", chain.grpc, "--concurrency", "1,4"),
        *("--tiers", str(PROMPT_TOKENS), "--output", str(OUTPUT_TOKENS)),
        cwd=chain.scratch,
    )


async def with_openai(chain: Chain, tool: str) -> int:
    return await transcript(f"{chain.http}/v1")


async def with_smg(chain: Chain, tool: str) -> int:
    port, metrics = 30777, 30778
    process = await asyncio.create_subprocess_exec(
        *(tool, "launch", "--worker-urls", f"grpc://127.0.0.1:{chain.vllm_port}", "--host", "127.0.0.1"),
        *("--port", str(port), "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    try:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url) as client:
            for _ in range(300):
                try:
                    if (await client.get("/v1/tokenizers")).json()["tokenizers"]:
                        break
                except (httpx.HTTPError, ValueError, KeyError):
                    pass
                await asyncio.sleep(0.1)
        return await transcript(f"{url}/v1")
    finally:
        process.kill()
        await process.wait()


async def transcript(base_url: str) -> int:
    """Says what was asked and what came; returns how many answers were not what they have to be."""
    wrong = 0

    def told(what: str, answer: Any, holds: bool) -> None:
        nonlocal wrong
        wrong += not holds
        print(f"{'' if holds else 'WRONG '}{what}\n    {answer!r}", flush=True)

    async with openai.AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0) as client:
        listed = [one.id async for one in await client.models.list()]
        told("models.list()", listed, listed == [DEFAULT_MODEL])
        asked: Any = {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        chat = await client.chat.completions.create(**asked)
        text = chat.choices[0].message.content or ""
        told(f"chat.completions.create({QUESTION!r})", (text, chat.choices[0].finish_reason), "Paris" in text)
        told("    .usage", chat.usage and (chat.usage.prompt_tokens, chat.usage.completion_tokens), bool(chat.usage))
        parts = []
        stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        async for chunk in stream:
            parts += [choice.delta.content for choice in chunk.choices if choice.delta.content]
        told("the same with stream=True", parts, "".join(parts) == text)
        stopped = await client.chat.completions.create(**asked, stop=["is Par"])
        cut = stopped.choices[0].message.content
        told("the same with stop=['is Par']", cut, cut == text.partition("is Par")[0])
        rated = await client.chat.completions.create(**asked, max_tokens=3, logprobs=True, top_logprobs=2)
        rows = (rated.choices[0].logprobs and rated.choices[0].logprobs.content) or []
        told(
            "the same with max_tokens=3, logprobs=True, top_logprobs=2",
            [(row.token, round(row.logprob, 3), [top.token for top in row.top_logprobs]) for row in rows],
            len(rows) == 3,
        )
        plain = await client.completions.create(
            model=DEFAULT_MODEL, prompt="One, two, three,", max_tokens=8, temperature=0
        )
        told("completions.create('One, two, three,', max_tokens=8)", plain.choices[0].text, bool(plain.choices[0].text))
        await forms(client, told)
        for what, more in {
            "n=2, temperature=0.8, seed=1": {"n": 2, "temperature": 0.8, "seed": 1, "max_tokens": 6},
            "temperature=-1": {"temperature": -1},
            "model='another'": {"model": "another"},
        }.items():
            try:
                many = await client.chat.completions.create(**{**asked, **more})
                told(f"the same with {what}", [one.message.content for one in many.choices], len(many.choices) == 2)
            except openai.APIStatusError as error:
                told(f"the same with {what}", (error.status_code, str(error.message)[:160]), error.status_code < 502)
    return wrong


class City(pydantic.BaseModel):
    name: Annotated[str, pydantic.StringConstraints(max_length=12)]
    large: bool


TOOL: Final[Any] = {
    "type": "function",
    "function": {
        "name": "set_light",
        "description": "Turns the light on or off",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
}


async def forms(client: openai.AsyncOpenAI, told: Callable[[str, Any, bool], None]) -> None:
    """Answers in a form. The model is too small to fill them well; that they can be read is what counts."""
    about: Any = [{"role": "user", "content": "Tell me about Paris as JSON."}]
    try:
        parsed = await client.chat.completions.parse(
            model=DEFAULT_MODEL, messages=about, response_format=City, temperature=0, max_tokens=64
        )
        told("chat.completions.parse(response_format=City)", parsed.choices[0].message.parsed, True)
    except (openai.OpenAIError, pydantic.ValidationError) as error:
        told("chat.completions.parse(response_format=City)", error, False)
    light: Any = {
        "model": DEFAULT_MODEL,
        "messages": [{"role": "user", "content": "Turn the light on."}],
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 64,
    }
    try:
        called = await client.chat.completions.create(**light)
        calls = [(one.function.name, one.function.arguments) for one in called.choices[0].message.tool_calls or ()]
        is_call = len(calls) == 1 and isinstance(json.loads(calls[0][1]).get("on"), bool)
        told("tools=[set_light], tool_choice='required'", (calls, called.choices[0].finish_reason), is_call)
        name, arguments = "", ""
        async for chunk in await client.chat.completions.create(**light, stream=True):
            for choice in chunk.choices:
                for part in choice.delta.tool_calls or ():
                    name += (part.function and part.function.name) or ""
                    arguments += (part.function and part.function.arguments) or ""
        told("the same with stream=True", (name, arguments), [(name, arguments)] == calls)
    except openai.OpenAIError as error:
        told("tools=[set_light], tool_choice='required'", error, False)


CLIENTS: Final[dict[str, Callable[[Chain, str], Awaitable[int]]]] = {
    "openai": with_openai,
    "smg": with_smg,
    "aiperf": aiperf,
    "guidellm": guidellm,
    "grpc": grpc,
}


async def run(client: str, tool: str) -> int:
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tercet-clients-")))
        http, grpc_port, vllm_port = 38000, 35051, 35071
        # The default model's template knows no tools, so the form of a call is said here.
        flags = ("--vllm-grpc-port", str(vllm_port)) if client == "smg" else ("--tool-format", "hermes")
        options = StackOptions(
            DEFAULT_MODEL,
            listen=f"127.0.0.1:{grpc_port}",
            http=f"127.0.0.1:{http}",
            log_level="error",
            tokenizer=flags,
        )
        chain = await stack.enter_async_context(Stack(options, os.environ))
        await chain.ready(READY_S)
        where = Chain(f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc_port}", vllm_port, export(scratch), scratch)
        return await CLIENTS[client](where, tool)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("--program", default=None, help="where the client's program is; default: its name, on PATH")
    chosen = parser.parse_args(argv)
    default = sys.executable if chosen.client == "grpc" else chosen.client
    return asyncio.run(run(chosen.client, chosen.program or default))


if __name__ == "__main__":
    sys.exit(main())
