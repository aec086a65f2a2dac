"""What a step costs the executor besides the model: Python around it, and the draws.

`python benchmarks/executor_step.py`. Two tables, medians in microseconds. `steps`: one decode step of greedy rows at 1,
8 and 32 sequences with a model that computes nothing, from the step's bytes to its result's (no sockets). `draws`: one
row of a vocabulary of 49,152, per way of sampling, of the native back end on one thread and of torch. Logits are normal
with a deviation of 2.5, which spreads like a language model's.
"""

import argparse
import json
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor

from executor.batch import Batch
from executor.cache import KvPool, MemoryPlan
from executor.runner import Runner
from executor.step import Capacity, NewSequence, SamplingParams, Slice, Step
from kernels import backends, sampling
from kernels.cpu.library import Team, load_library
from kernels.cpu.sampling import Sampler
from kernels.sampling import Greedy, SampledSequence
from services.wire import StepOrder, result_to_proto, step_from_proto, step_to_proto
from tercet.v1 import executor_pb2

VOCAB: Final = 49_152
PROMPT: Final = 8
CAPACITY: Final = Capacity(
    block_size=16, total_blocks=4096, max_batched_tokens=512, max_sequences=64, max_model_len=4096, vocab_size=VOCAB
)
WAYS: Final = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "top_k_top_p": SamplingParams(temperature=0.8, top_k=40, top_p=0.95),
    "min_p": SamplingParams(temperature=0.8, min_p=0.05),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1),
    "logprobs": SamplingParams(temperature=0.0, logprobs=5),
}


@dataclass(frozen=True)
class NoModel:
    """Satisfies `executor.models.model.Model`."""

    vocab_size: int = VOCAB
    weight_bytes: int = 0

    def forward(self, batch: Batch, pool: KvPool) -> Tensor:
        return torch.zeros(batch.token_ids.shape[0], 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape[0], VOCAB)

    def greedy(self, hidden: Tensor) -> Greedy:
        return Greedy(torch.ones(hidden.shape[0], dtype=torch.int64), torch.ones(hidden.shape[0]))


def step_us(sequences: int, count: int) -> float:
    runner = Runner(
        model=NoModel(),
        ops=backends.load("reference"),
        pool=KvPool((), ()),
        capacity=CAPACITY,
        memory=cast(MemoryPlan, None),
        model_hash="",
        numerics="",
    )
    blocks = CAPACITY.total_blocks // CAPACITY.max_sequences
    first = tuple(
        Slice(
            slot,
            0,
            PROMPT,
            (1,) * PROMPT,
            tuple(range(slot * blocks, (slot + 1) * blocks)),
            True,
            NewSequence(SamplingParams(temperature=0.0), PROMPT),
        )
        for slot in range(sequences)
    )
    runner.run(Step(1, first))
    elapsed = []
    for number in range(count):
        slices = tuple(Slice(slot, PROMPT + number, 1, (), (), True) for slot in range(sequences))
        sent = step_to_proto(StepOrder(Step(number + 2, slices), 1, predicted_ns=1)).SerializeToString()
        began = time.perf_counter_ns()
        order = step_from_proto(executor_pb2.Step.FromString(sent))
        result_to_proto(runner.run(order.step)).SerializeToString()
        elapsed.append(time.perf_counter_ns() - began)
    return round(statistics.median(elapsed) / 1e3, 1)


def draw_us(draw: Callable[[Tensor, Sequence[SampledSequence]], object], params: SamplingParams, count: int) -> float:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 2.5
    elapsed = []
    for length in range(300, 300 + count):
        row = [SampledSequence(params, array("i", range(length)), 100)]
        began = time.perf_counter_ns()
        draw(logits, row)
        elapsed.append(time.perf_counter_ns() - began)
    return round(statistics.median(elapsed) / 1e3, 1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="of steps, and of draws of each kind")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(json.dumps({"steps": {number: step_us(number, chosen.count) for number in (1, 8, 32)}}), flush=True)
    library = load_library()
    native = Sampler(library, Team(library, 1))
    draws = {
        name: {
            "native": draw_us(native.sample, params, chosen.count),
            "torch": draw_us(sampling.sample, params, max(3, chosen.count // 20)),
        }
        for name, params in WAYS.items()
    }
    print(json.dumps({"draws": draws}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
