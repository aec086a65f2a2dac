"""Native attention alone: decode and prefill at several lengths, over the pages of many layers as a step reads them.

    python benchmarks/cpu_attention.py [--threads N] [--isa NAME] [--heads N --kv-heads N --head-dim N] [--block-size N]

Blocks of a sequence lie in random order. GB/s counts keys and values once, Gop/s a multiplication and an addition as
two, of what the rows see. Times are the best of several, for all layers.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Final

import torch

from kernels.cpu.attention import NativeAttention
from kernels.cpu.library import Team, load_library
from kernels.memory import large_pages
from kernels.ops import AttentionShape, PagedRows

LAYERS: Final = 30
ROUNDS: Final = 7
DECODES: Final = [(sequences, length) for sequences in (1, 8, 32) for length in (192, 400, 1000)] + [
    (1, 4000),
    (8, 4000),
]
PREFILLS: Final = (128, 1000, 4000)


def measure(native: NativeAttention, shape: AttentionShape, sequences: int, rows: int, length: int, layers: int) -> str:
    blocks = -(-length // shape.block_size)
    order = torch.randperm(sequences * blocks, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    paged = PagedRows(
        torch.arange(sequences + 1, dtype=torch.int32) * rows,
        torch.full((sequences,), length, dtype=torch.int32),
        order.view(sequences, blocks),
    )
    page = (sequences * blocks, shape.block_size, shape.kv_heads, shape.head_dim)
    size = 2 * sequences * blocks * shape.block_size * shape.kv_heads * shape.head_dim
    pools = large_pages(2 * layers * size).view(torch.bfloat16).view(layers, 2, *page).fill_(0.01)
    q = torch.randn(sequences * rows, shape.heads, shape.head_dim)
    plan = native.plan(paged, shape)
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for keys, values in pools:
            native.attend(q, keys, values, plan, shape, shape.head_dim**-0.5)
        best = min(best, time.perf_counter() - started)
    read = 4 * layers * sequences * length * shape.kv_heads * shape.head_dim
    seen = sequences * sum(range(length - rows + 1, length + 1))
    operations = 4 * layers * seen * shape.heads * shape.head_dim
    return f"{best / layers * LAYERS * 1e3:9.3f} ms {read / best / 1e9:8.1f} GB/s {operations / best / 1e9:8.1f} Gop/s"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="cpu_attention", description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", help="an instruction set; the default is the CPU's best")
    for name, default in (("heads", 9), ("kv-heads", 3), ("head-dim", 64), ("block-size", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    library = load_library(chosen.isa)
    team = Team(library, chosen.threads)
    native = NativeAttention(library, team)
    shape = AttentionShape(chosen.heads, chosen.kv_heads, chosen.head_dim, chosen.block_size)
    print(f"{library.isa.name}, {chosen.threads} threads, {LAYERS} layers, {shape}")
    for sequences, length in DECODES:
        figures = measure(native, shape, sequences, 1, length, LAYERS)
        print(f"decode  x{sequences:<3} context {length:5} {figures}", flush=True)
    for length in PREFILLS:
        figures = measure(native, shape, 1, length, length, LAYERS if length < 1000 else 6)
        print(f"prefill      tokens {length:5} {figures}", flush=True)
    team.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
