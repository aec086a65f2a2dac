"""How fast text becomes ids, and what a long text costs the others.

`python benchmarks/text_speed.py FILE`. With the default model's tokenizer and a file of a megabyte or more it prints:
ours against the `tokenizers` library's own `encode` on the same pieces of text, and how late 100 short texts, one every
5 ms, are encoded alone and while a prompt of 1 MB is.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from opentelemetry.trace import NoOpTracer
from tokenizers import Tokenizer

from services.catalogue import DEFAULT_MODEL
from services.tokenizer.loading import load_text
from services.tokenizer.prompts import PromptLimits, Prompts

LENGTHS = (100, 450, 4_000, 100_000)
SHORT, EVERY_S = 100, 0.005


def best_s(work: Callable[[], object], times: int) -> float:
    found = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(times):
            work()
        found.append((time.perf_counter() - began) / times)
    return min(found)


async def lateness_ms(prompts: Prompts, short: str, beside: Callable[[], Awaitable[object]] | None) -> list[float]:
    """Of each short text: from when it was due until its ids are there."""
    other = None if beside is None else asyncio.ensure_future(beside())
    began = time.perf_counter() + EVERY_S
    late = []
    for number in range(SHORT):
        due = began + number * EVERY_S
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        await prompts.encode_text(short, add_special=True)
        late.append((time.perf_counter() - due) * 1e3)
    if other is not None:
        await other
    return sorted(late)


def main(file: Path) -> None:
    loaded = load_text(DEFAULT_MODEL)
    text = file.read_text(encoding="utf-8")[:1_000_000]
    theirs = Tokenizer.from_str(loaded.model.to_json())
    for length in LENGTHS:
        part = text[1_000 : 1_000 + length]
        times = max(1, 20_000 // length)
        own = best_s(lambda part=part: loaded.model.encode(part, add_special=True), times)  # type: ignore[misc]
        library = best_s(lambda part=part: theirs.encode(part).ids, times)  # type: ignore[misc]
        print(f"{length} characters: {own * 1e6:.0f} us, the library {library * 1e6:.0f} us, {library / own:.0%}")
    prompts = Prompts(loaded.model, None, PromptLimits(8 << 20), NoOpTracer())
    for name, beside in (("alone", None), ("beside 1 MB", lambda: prompts.encode_text(text, add_special=True))):
        late = asyncio.run(lateness_ms(prompts, text[2_000:2_450], beside))
        print(f"{name}: P50 {statistics.median(late):.1f} ms, P99 {late[98]:.1f} ms, largest {late[-1]:.1f} ms")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
