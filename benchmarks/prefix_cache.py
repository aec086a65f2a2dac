"""What the prefix cache spares: `python benchmarks/prefix_cache.py`. Prints one JSON line.

Every prompt is asked twice through the whole chain, once with the cache and once without (`cache_bypass`), in turn,
so that a machine whose speed drifts treats both alike. The prompts share their start. What is compared: the medians
of the time to the first token, as a client sees it, and every token.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

import tercet
from services.catalogue import DEFAULT_MODEL
from services.config import BACKENDS
from services.stack import Stack, StackOptions

READY_S: Final = 300.0
IDS: Final = 40_000  # ordinary ids of the default model lie below


@dataclass(frozen=True, slots=True)
class Asked:
    first_token_s: float
    cached_tokens: int
    output: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Seconds. lower: by what part the median time to the first token is lower with the cache."""

    model: str
    backend: str
    prompts: int
    prompt_tokens: int
    shared_tokens: int
    cached_tokens: int  # of each prompt, at the median
    without_p50_s: float
    with_p50_s: float
    lower: float
    tokens_identical: bool
    load_average: float  # before the measurement


def prompt(index: int, length: int, shared: int) -> list[int]:
    """`shared` ids that all have, then others."""
    common = [(7919 * at) % IDS for at in range(shared)]
    return common + [(104_729 * (index + 1) + 7907 * at) % IDS for at in range(shared, length)]


async def ask(client: tercet.AsyncClient, ids: Sequence[int], tokens: int, *, bypass: bool) -> Asked:
    sampling = tercet.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    began = time.monotonic()
    first: float | None = None
    output: list[int] = []
    async with client.generate(ids, sampling=sampling, cache_bypass=bypass) as stream:
        async for delta in stream:
            if first is None:
                first = time.monotonic() - began
            output += delta.token_ids
        usage = stream.usage
    if first is None or usage is None:
        raise SystemExit("an answer without tokens")
    return Asked(first, usage.cached_tokens, tuple(output))


async def measure(
    model: str, backend: str, threads: int, prompts: int, length: int, shared: int, tokens: int
) -> Report:
    load = os.getloadavg()[0]
    pairs: list[tuple[Asked, Asked]] = []
    flags = ("--backend", backend, "--threads", str(threads))
    async with Stack(StackOptions(model, log_level="error", executor=flags), os.environ) as stack:
        await stack.ready(READY_S)
        async with tercet.AsyncClient(stack.target) as client:
            await ask(client, prompt(prompts, length, shared), tokens, bypass=True)  # warm
            await ask(client, prompt(prompts, length, shared), tokens, bypass=False)  # leaves the shared start
            for index in range(prompts):
                ids = prompt(index, length, shared)
                answers = {
                    bypass: await ask(client, ids, tokens, bypass=bypass) for bypass in (index % 2 > 0, index % 2 < 1)
                }
                pairs.append((answers[True], answers[False]))
    without = statistics.median(one.first_token_s for one, _ in pairs)
    cached = statistics.median(other.first_token_s for _, other in pairs)
    return Report(
        model=model,
        backend=backend,
        prompts=prompts,
        prompt_tokens=length,
        shared_tokens=shared,
        cached_tokens=int(statistics.median(other.cached_tokens for _, other in pairs)),
        without_p50_s=round(without, 4),
        with_p50_s=round(cached, 4),
        lower=round(1 - cached / without, 3),
        tokens_identical=all(one.output == other.output for one, other in pairs),
        load_average=round(load, 2),
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="the prefix cache against none", allow_abbrev=False)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--backend", choices=BACKENDS, default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the executor; default all cores")
    parser.add_argument("--prompts", type=int, default=21)
    parser.add_argument("--length", type=int, default=500, help="tokens of a prompt; default 500")
    parser.add_argument("--shared", type=float, default=0.6, help="part of it that all share; default 0.6")
    parser.add_argument("--tokens", type=int, default=8, help="new tokens of each answer; default 8")
    chosen = parser.parse_args(argv)
    if not 0 <= chosen.shared < 1 or min(chosen.prompts, chosen.length, chosen.tokens) < 1:
        parser.error("--shared must be 0 to below 1, the others at least 1")
    shared = int(chosen.length * chosen.shared)
    report = asyncio.run(
        measure(chosen.model, chosen.backend, chosen.threads, chosen.prompts, chosen.length, shared, chosen.tokens)
    )
    print(json.dumps(asdict(report)))
    return 0 if report.tokens_identical else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
