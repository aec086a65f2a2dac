"""`tercet run PROMPT`: one answer, from a chain of its own or from `--target`."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

import tercet
from services.catalogue import DEFAULT_MODEL, CatalogueError, cache_directory, resolve
from services.commands import calling
from services.commands.ask import Question, ask
from services.config import BACKENDS
from services.rpc import PLAIN, Outgoing
from services.settings import ConfigError
from services.stack import NotReady, Stack, StackOptions
from services.supervisor import ChildRefused

READY_S = 300.0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tercet run", allow_abbrev=False)
    parser.add_argument("prompt", help="what the user says")
    parser.add_argument("--system", help="what the system says; absent: the model's own default")
    parser.add_argument("--target", help="a running chain, as host:port or unix:/path; absent: one is started")
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"of the chain that is started; default {DEFAULT_MODEL}")
    parser.add_argument("--backend", choices=BACKENDS, default="cpu", help="of the chain that is started")
    parser.add_argument("--temperature", type=float, help="0: greedy")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--max-tokens", type=int, default=512, help="default 512")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds; default 300")
    calling.add_flags(parser)
    chosen = parser.parse_args(argv)
    question = Question(
        chosen.prompt,
        tercet.SamplingParams(
            temperature=chosen.temperature,
            top_p=chosen.top_p,
            top_k=chosen.top_k,
            seed=chosen.seed,
            max_tokens=chosen.max_tokens,
        ),
        chosen.system,
        chosen.timeout,
    )
    try:
        if chosen.target is not None:
            asyncio.run(_ask(chosen.target, question, calling.outgoing(chosen, os.environ)))
        else:
            resolve(chosen.model, cache_directory(os.environ))
            asyncio.run(_with_own_chain(chosen.model, chosen.backend, question))
    except (ConfigError, tercet.TercetError, CatalogueError, NotReady, ChildRefused) as error:
        print(f"tercet run: {error}", file=sys.stderr)
        return 1
    return 0


async def _ask(target: str, question: Question, outgoing: Outgoing = PLAIN) -> None:
    told = await ask(target, question, sys.stdout, outgoing=outgoing)
    if told.usage is not None and told.timings is not None and told.finish is not None:
        print(
            f"[{told.usage.prompt_tokens} tokens in, {told.usage.delivered_tokens} out, {told.finish.name.lower()}; "
            f"first token {told.timings.first_token:.2f} s, all {told.timings.total:.2f} s; id {told.request_id}]",
            file=sys.stderr,
        )


async def _with_own_chain(model: str, backend: str, question: Question) -> None:
    options = StackOptions(model, log_level="error", executor=("--backend", backend))
    async with Stack(options, os.environ) as stack:
        await stack.ready(READY_S)
        await _ask(stack.target, question)
