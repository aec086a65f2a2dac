"""The runner alone, without server or text: `python benchmarks/engine_speed.py`. One JSON line a measurement.

Sequences of random ids are computed in steps of at most --step tokens, then each draws --new tokens greedily. Prefill:
prompt tokens a second until all have their first token. Decode: tokens a second of all together, from then on. Output:
new tokens a second, prefill and all. The same is done once before, shorter, so that nothing is measured that happens
only once.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from executor.loading.load import load_runner
from executor.quant.table import SCHEMES
from executor.runner import Runner
from executor.step import NewSequence, SamplingParams, Slice, Step
from services.catalogue import DEFAULT_MODEL, CatalogueError, cache_directory, resolve

FIRST_ID, LAST_ID = 100, 40_000  # ordinary ids of the default model lie between
BLOCK: Final = 16
GREEDY: Final = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second. decode: None where one token is drawn. output: new tokens, over prefill and decode together."""

    peer: str
    batch: int
    prompt: int
    new: int
    prefill: float
    decode: float | None
    output: float


class Sequences:
    """`batch` prompts in the runner's slots, each with blocks for all its tokens."""

    def __init__(self, runner: Runner, prompts: Sequence[Sequence[int]], new: int) -> None:
        self._runner = runner
        self._prompts = prompts
        self._blocks = -(-(len(prompts[0]) + new) // BLOCK)
        self._steps = 0

    def prefill(self) -> None:
        """Until each has drawn its first token."""
        for parts in self._packed(self._runner.capacity.max_batched_tokens):
            self._run(parts)

    def decode(self, tokens: int) -> None:
        length = len(self._prompts[0])
        for position in range(length, length + tokens):
            self._run([Slice(slot, position, 1, (), (), samples=True) for slot in range(len(self._prompts))])

    def _run(self, parts: Sequence[Slice]) -> None:
        self._steps += 1
        for result in self._runner.run(Step(self._steps, tuple(parts))).results:
            if result.error is not None:
                raise SystemExit(f"slot {result.slot}: {result.error.message}")

    def _packed(self, limit: int) -> Iterator[list[Slice]]:
        """The prompts in order, each step as full as it can be."""
        parts: list[Slice] = []
        room = limit
        for slot, prompt in enumerate(self._prompts):
            start = 0
            while start < len(prompt):
                count = min(room, len(prompt) - start)
                parts.append(self._chunk(slot, prompt, start, count))
                start, room = start + count, room - count
                if not room:
                    yield parts
                    parts, room = [], limit
        if parts:
            yield parts

    def _chunk(self, slot: int, prompt: Sequence[int], start: int, count: int) -> Slice:
        first = start == 0
        return Slice(
            slot,
            start,
            count,
            tuple(prompt[start : start + count]),
            tuple(range(slot * self._blocks, (slot + 1) * self._blocks)) if first else (),
            samples=start + count == len(prompt),
            new=NewSequence(GREEDY, len(prompt)) if first else None,
        )


def measure(runner: Runner, peer: str, batch: int, prompt: int, new: int, seed: int) -> Speed:
    source = random.Random(seed)
    last = min(LAST_ID, runner.capacity.vocab_size)
    prompts = [[source.randrange(FIRST_ID, last) for _ in range(prompt)] for _ in range(batch)]
    warm = Sequences(runner, prompts, new)
    warm.prefill()
    warm.decode(min(4, new - 1))
    runner.reset()
    sequences = Sequences(runner, prompts, new)
    began = time.perf_counter()
    sequences.prefill()
    prefilled = time.perf_counter()
    sequences.decode(new - 1)
    ended = time.perf_counter()
    runner.reset()
    decode = batch * (new - 1) / (ended - prefilled) if new > 1 else None
    return Speed(
        peer,
        batch,
        prompt,
        new,
        round(batch * prompt / (prefilled - began), 1),
        None if decode is None else round(decode, 1),
        round(batch * new / (ended - began), 1),
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--weights", default="native", help=f"one of {', '.join(SCHEMES)}; default native")
    parser.add_argument("--activations", default="16bit", help="16bit or 8bit; of the back end cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default all cores")
    parser.add_argument("--batch", default="1,8,32", help="sequences at once, by commas; default 1,8,32")
    parser.add_argument("--prompt", type=int, default=128, help="tokens; default 128")
    parser.add_argument("--new", type=int, default=128, help="tokens; default 128")
    parser.add_argument("--step", type=int, default=512, help="most tokens in a step; default 512")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts; default 1")
    chosen = parser.parse_args(argv)
    batches = [int(part) for part in chosen.batch.split(",")]
    if min(*batches, chosen.prompt, chosen.new, chosen.step) < 1 or max(batches) > chosen.step:
        parser.error("--batch, --prompt, --new and --step must be at least 1, and --batch at most --step")
    try:
        path = resolve(chosen.model, cache_directory(os.environ)).path
        runner = load_runner(
            path,
            backend=chosen.backend,
            scheme=chosen.weights,
            activations=chosen.activations,
            block_size=BLOCK,
            total_blocks=max(batches) * -(-(chosen.prompt + chosen.new) // BLOCK),
            max_batched_tokens=chosen.step,
            max_sequences=max(batches),
            max_model_len=chosen.prompt + chosen.new,
            threads=chosen.threads,
        )
    except (CatalogueError, ValueError, OSError) as error:
        print(f"engine_speed: {error}", file=sys.stderr)
        return 1
    runner.warm_up()
    for batch in batches:
        speed = measure(runner, f"tercet-{chosen.backend}", batch, chosen.prompt, chosen.new, chosen.seed)
        print(json.dumps(asdict(speed)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
