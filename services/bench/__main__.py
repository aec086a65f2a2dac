"""`tercet bench`: tokens per second of one stream against several at once, through the whole chain.

The two are measured in turn within one run, since a machine's speed drifts; the figure to quote is the ratio of the
medians.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

import tercet
from services.catalogue import DEFAULT_MODEL, CatalogueError, cache_directory, resolve
from services.config import BACKENDS
from services.stack import NotReady, Stack, StackOptions
from services.supervisor import ChildRefused

READY_S: Final = 300.0
SUBJECTS: Final = ("tides", "bread", "bridges", "maps", "glass", "bees", "clocks", "salt", "wool", "ink", "snow")


@dataclass(frozen=True, slots=True)
class Round:
    """Of one measurement: output tokens per second of all streams together, and the median first token in seconds."""

    streams: int
    tokens_per_s: float
    first_token_s: float


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    backend: str
    cpu: str
    cores: int
    new_tokens: int
    one_tokens_per_s: float
    many_streams: int
    many_tokens_per_s: float
    ratio: float
    rounds: tuple[Round, ...]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tercet bench", allow_abbrev=False)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--backend", choices=BACKENDS, default="cpu")
    parser.add_argument("--streams", type=int, default=8, help="at once, against one; default 8")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each stream; default 128")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind, in turn; default 3")
    chosen = parser.parse_args(argv)
    for name in ("streams", "tokens", "rounds"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name} must be at least 1")
    try:
        resolve(chosen.model, cache_directory(os.environ))
        report = asyncio.run(_measure(chosen.model, chosen.backend, chosen.streams, chosen.tokens, chosen.rounds))
    except (CatalogueError, NotReady, ChildRefused, tercet.TercetError) as error:
        print(f"tercet bench: {error}", file=sys.stderr)
        return 1
    print(f"{'1 stream':<12} {report.one_tokens_per_s:8.1f} tokens/s")
    print(f"{f'{report.many_streams} streams':<12} {report.many_tokens_per_s:8.1f} tokens/s")
    print(f"{'ratio':<12} {report.ratio:8.2f}")
    print(json.dumps(asdict(report)))
    return 0


async def _measure(model: str, backend: str, streams: int, tokens: int, rounds: int) -> Report:
    options = StackOptions(model, log_level="error", executor=("--backend", backend))
    measured: list[Round] = []
    async with Stack(options, os.environ) as stack:
        await stack.ready(READY_S)
        async with tercet.AsyncClient(stack.target) as client:
            await _round(client, streams, 8)  # warm
            for _ in range(rounds):
                measured.append(await _round(client, 1, tokens))
                measured.append(await _round(client, streams, tokens))
    one = statistics.median(part.tokens_per_s for part in measured if part.streams == 1)
    many = statistics.median(part.tokens_per_s for part in measured if part.streams == streams)
    return Report(
        model=model,
        backend=backend,
        cpu=platform.processor() or platform.machine(),
        cores=os.cpu_count() or 0,
        new_tokens=tokens,
        one_tokens_per_s=round(one, 1),
        many_streams=streams,
        many_tokens_per_s=round(many, 1),
        ratio=round(many / one, 2),
        rounds=tuple(measured),
    )


async def _round(client: tercet.AsyncClient, streams: int, tokens: int) -> Round:
    began = time.monotonic()
    answers = await asyncio.gather(*(_one(client, index, tokens) for index in range(streams)))
    elapsed = time.monotonic() - began
    return Round(
        streams,
        round(sum(count for count, _ in answers) / elapsed, 1),
        round(statistics.median(first for _, first in answers), 3),
    )


async def _one(client: tercet.AsyncClient, index: int, tokens: int) -> tuple[int, float]:
    """Output tokens of one stream, and the time of its first."""
    began = time.monotonic()
    first = 0.0
    count = 0
    prompt = f"Write a long essay about the history of {SUBJECTS[index % len(SUBJECTS)]}."
    sampling = tercet.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    async with client.chat([tercet.Message("user", prompt)], sampling=sampling) as stream:
        async for delta in stream:
            if not count:
                first = time.monotonic() - began
            count += len(delta.token_ids)
    return count, first


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
