"""How fast text becomes ids, and what a long text costs the others.

`python benchmarks/text_speed.py FILE`. With the default model's tokenizer and a file of a megabyte or more it prints:
ours against the `tokenizers` library's own `encode` on the same pieces of text, and how late 100 short texts, one every
5 ms, are encoded alone and while a prompt of 1 MB is. Then the same of a chat, template and encoding, alone and while a
chat of 1 MB is: how long it takes, and how late it is.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from opentelemetry.trace import NoOpTracer
from tokenizers import Tokenizer

from services.catalogue import DEFAULT_MODEL
from services.tokenizer.loading import LoadedText, load_text
from services.tokenizer.prompts import PromptLimits, Prompts
from services.tokenizer.renderer import Renderer
from tercet.v1 import tokenizer_pb2

LENGTHS = (100, 450, 4_000, 100_000)
SHORT, EVERY_S, WARM = 100, 0.005, 20
CHAT = (
    "Please tell me in a few words how a sailing ship can make way against the wind, and why it cannot sail straight "
    "into it. Then say what the keel has to do with it, and who found that out."
)

Work = Callable[[], Awaitable[object]]


def best_s(work: Callable[[], object], times: int) -> float:
    found = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(times):
            work()
        found.append((time.perf_counter() - began) / times)
    return min(found)


@dataclass(frozen=True, slots=True)
class Paced:
    """Of `SHORT` calls, in ms, sorted. took: from the call. late: from when it was due, a busy event loop included."""

    took: list[float]
    late: list[float]


async def paced(work: Work, beside: Work | None) -> Paced:
    other = None if beside is None else asyncio.ensure_future(beside())
    began = time.perf_counter() + EVERY_S
    took, late = [], []
    for number in range(SHORT):
        due = began + number * EVERY_S
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        called = time.perf_counter()
        await work()
        done = time.perf_counter()
        took.append((done - called) * 1e3)
        late.append((done - due) * 1e3)
    if other is not None:
        await other
    return Paced(sorted(took), sorted(late))


def chat_of(text: str) -> tokenizer_pb2.ChatPrompt:
    return tokenizer_pb2.ChatPrompt(messages=[tokenizer_pb2.ChatMessage(role="user", content=text)])


async def chats(loaded: LoadedText, text: str) -> None:
    if loaded.template is None:
        raise SystemExit(f"{loaded.name} has no chat template")
    renderer = Renderer(loaded.template)
    try:
        prompts = Prompts(loaded.model, renderer, PromptLimits(8 << 20), NoOpTracer())
        short, long = chat_of(CHAT), chat_of(text)
        for _ in range(WARM):  # two at a time: so both processes are there
            (_, ids), _ = await asyncio.gather(prompts.encode_chat(short), prompts.encode_chat(short))
        print(f"a chat of {len(ids)} tokens, template and encoding:")
        for name, beside in (("alone", None), ("beside a chat of 1 MB", lambda: prompts.encode_chat(long))):
            found = await paced(lambda: prompts.encode_chat(short), beside)
            print(f"{name}: {_spread(found.took)}; late {_spread(found.late)}")
    finally:
        await renderer.close()


def _spread(values: list[float]) -> str:
    return f"P50 {statistics.median(values):.2f} ms, P99 {values[98]:.2f} ms, largest {values[-1]:.2f} ms"


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
    part = text[2_000:2_450]
    for name, beside in (("alone", None), ("beside 1 MB", lambda: prompts.encode_text(text, add_special=True))):
        found = asyncio.run(paced(lambda: prompts.encode_text(part, add_special=True), beside))
        print(f"{name}: late {_spread(found.late)}")
    asyncio.run(chats(loaded, text))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
