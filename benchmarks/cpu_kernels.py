"""Where the time of a step goes on the back end `cpu`: each op of all layers, and the runner as a whole.

    python benchmarks/cpu_kernels.py [--model NAME] [--threads N] [--pin]

Ops are measured one at a time over all layers of the model, so that weights come from memory as in a step. Gop/s counts
a multiplication and an addition as two; GB/s counts weights once. Runner: tokens a second without scheduler or wire,
prompt of 128 and 128 new tokens, greedy; prefill of one prompt of 1,000.
"""

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from executor.loading.load import load_runner
from executor.runner import Runner
from executor.step import NewSequence, SamplingParams, Slice, Step
from kernels.ops import AttentionShape, DecoderLayer, DecoderStep, PagedRows
from services.catalogue import DEFAULT_MODEL, cache_directory, resolve

BLOCK: Final = 16
PROMPT: Final = 128
NEW: Final = 128
PREFILL: Final = 1000
GREEDY: Final = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Cost:
    seconds: float
    bytes: int = 0  # read from memory
    operations: int = 0

    def line(self, name: str) -> str:
        rates = f"{self.bytes / self.seconds / 1e9:8.1f} GB/s" if self.bytes else " " * 13
        rates += f"{self.operations / self.seconds / 1e9:9.1f} Gop/s" if self.operations else ""
        return f"  {name:<22}{self.seconds * 1e3:9.3f} ms {rates}"


def best(call: Callable[[], object], rounds: int = 7) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def read_peak(threads: int) -> float:
    """Bytes a second that so many threads read from memory."""
    parts = [torch.ones(1 << 24, dtype=torch.int64) for _ in range(threads)]

    def read() -> None:
        workers = [threading.Thread(target=part.sum) for part in parts]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return threads * parts[0].nbytes / best(read)


def step_of(runner: Runner, sequences: int, rows: int, length: int) -> tuple[DecoderStep, Any]:
    model: Any = runner._model
    config = model.config
    shape = AttentionShape(config.heads, config.kv_heads, config.head_dim, BLOCK)
    blocks = -(-length // BLOCK)
    tables = torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks)
    places = torch.arange(length - rows, length)
    slots = (tables.long()[:, places // BLOCK] * BLOCK + places % BLOCK).flatten()
    positions = places.repeat(sequences)
    paged = PagedRows(
        torch.arange(sequences + 1, dtype=torch.int32) * rows,
        torch.full((sequences,), length, dtype=torch.int32),
        tables,
    )
    plan = model._ops.plan_attention(paged, shape)
    cos, sin = model._tables.cos[positions], model._tables.sin[positions]
    return DecoderStep(cos, sin, slots, plan, shape, config.head_dim**-0.5), model


def ops_of_a_step(runner: Runner, sequences: int, rows: int, length: int) -> None:
    step, model = step_of(runner, sequences, rows, length)
    ops, layers, pool, shape = model._ops, model._decoder.layers, runner.pool, step.shape
    tokens = sequences * rows
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, model.config.hidden, generator=generator)
    q = torch.randn(tokens, shape.heads, shape.head_dim, generator=generator)
    gates = torch.randn(tokens, 2 * model.config.inner, generator=generator)
    qkv = torch.randn(tokens, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, generator=generator)
    inner, attended = gates[:, : model.config.inner].contiguous(), q.flatten(1)

    def product(inputs: Tensor, pick: Callable[[DecoderLayer], Any]) -> Cost:
        matrices = [pick(layer) for layer in layers]
        seconds = best(lambda: [ops.linear(inputs, matrix) for matrix in matrices])
        weights = sum(matrix.nbytes for matrix in matrices)
        return Cost(seconds, weights, 2 * tokens * sum(m.rows * m.cols for m in matrices))

    def each(call: Callable[[int], object]) -> Cost:
        return Cost(best(lambda: [call(index) for index in range(len(layers))]))

    costs = {
        "norms": each(lambda _: [ops.rms_norm(x, model._norm, 1e-5) for _ in range(2)]),
        "qkv": product(x, lambda layer: layer.qkv),
        "rope and cache": each(
            lambda i: ops.rope_and_cache(
                qkv, step.cos, step.sin, pool.keys[i], pool.values[i], step.slot_mapping, shape
            )
        ),
        "attention": each(lambda i: ops.paged_attention(q, pool.keys[i], pool.values[i], step.plan, shape, step.scale)),
        "output": product(attended, lambda layer: layer.output),
        "gate and up": product(x, lambda layer: layer.gate_up),
        "silu": each(lambda _: ops.silu_mul(gates)),
        "down": product(inner, lambda layer: layer.down),
    }
    head = model._head
    sampled = x[:sequences]
    head_seconds = best(lambda: ops.head_greedy(sampled, model._norm, 1e-5, head))
    costs["head"] = Cost(head_seconds, head.nbytes, 2 * sequences * head.rows * head.cols)
    for name, cost in costs.items():
        print(cost.line(name))
    weights = sum(cost.bytes for name, cost in costs.items() if name != "head")
    operations = sum(cost.operations for name, cost in costs.items() if name != "head")
    whole = best(lambda: ops.decoder(x, model._decoder, pool.keys, pool.values, step))
    print(Cost(whole, weights, operations).line("all layers, one call"))


def decode(runner: Runner, sequences: int) -> float:
    """Tokens a second."""
    runner.reset()
    blocks = -(-(PROMPT + NEW) // BLOCK)
    for slot in range(sequences):
        ids = tuple((7 * at + 31 * slot) % 40000 + 100 for at in range(PROMPT))
        table = tuple(range(slot * blocks, (slot + 1) * blocks))
        runner.run(Step(slot + 1, (Slice(slot, 0, PROMPT, ids, table, True, NewSequence(GREEDY, PROMPT)),)))
    started = time.perf_counter()
    for at in range(NEW):
        slices = tuple(Slice(slot, PROMPT + at, 1, (), (), True) for slot in range(sequences))
        runner.run(Step(sequences + at + 1, slices))
    return sequences * NEW / (time.perf_counter() - started)


def prefill(runner: Runner) -> float:
    ids = tuple(7 * at % 40000 + 100 for at in range(PREFILL))
    table = tuple(range(-(-PREFILL // BLOCK)))

    def whole() -> None:
        runner.reset()
        runner.run(Step(1, (Slice(0, 0, PREFILL, ids, table, True, NewSequence(GREEDY, PREFILL)),)))

    return PREFILL / best(whole, 3)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--activations", default="16bit", help="16bit or 8bit; of the back end cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("--runner-only", action="store_true")
    chosen = parser.parse_args(argv)
    runner = load_runner(
        resolve(chosen.model, cache_directory(os.environ)).path,
        backend=chosen.backend,
        activations=chosen.activations,
        block_size=BLOCK,
        total_blocks=1024,
        max_batched_tokens=1024,
        max_sequences=32,
        threads=chosen.threads,
        pin_threads=chosen.pin,
    )
    with torch.inference_mode():
        if not chosen.runner_only:
            print(f"memory reads, {chosen.threads} threads: {read_peak(chosen.threads) / 1e9:.1f} GB/s")
            for sequences, rows, length in ((1, 1, 192), (8, 1, 192), (32, 1, 192), (1, PREFILL, PREFILL)):
                print(f"{sequences} x {rows} rows at {length} tokens")
                ops_of_a_step(runner, sequences, rows, length)
        for sequences in (1, 8, 32):
            print(f"runner, decode x{sequences}: {decode(runner, sequences):.1f} tokens/s", flush=True)
        print(f"runner, prefill of {PREFILL}: {prefill(runner):.1f} tokens/s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
