"""Decodes on a `DeviceDecoder`, beside a runner that shares its pool: prompts go through the runner."""

from collections.abc import Sequence
from pathlib import Path

import torch
from step_driver import GREEDY

from executor.device.buckets import bucket_table, most_padding
from executor.device.decode import DeviceDecoder, GreedySampler
from executor.device.layout import DecodeRow, Scratch
from executor.loading.load import load_runner
from executor.step import NewSequence, Slice, Step
from kernels.ops import AttentionShape

BLOCK = 16
BLOCKS = 40  # of a sequence: all of the tiny model's context


class Driver:
    def __init__(self, model: Path, backend: str, sequences: int, processors: int = 132) -> None:
        self.sequences = sequences
        self.scratch = sequences * BLOCKS
        self.table = bucket_table(sequences, 600, 2, processors)
        self.runner = load_runner(
            model,
            backend=backend,
            block_size=BLOCK,
            max_batched_tokens=1024,
            max_sequences=sequences,
            total_blocks=self.scratch + 1 + most_padding(self.table) // BLOCK,
        )
        self._warm: DeviceDecoder | None = None
        self._positions: list[int] = []
        self._first: list[int] = []

    def decoder(self, *, warm: bool = True, graphs: bool = False) -> DeviceDecoder:
        shape = self.runner.model.config  # type: ignore[attr-defined]
        decoder = DeviceDecoder(
            self.runner.model,
            self.runner.ops,
            self.runner.pool,
            AttentionShape(shape.heads, shape.kv_heads, shape.head_dim, BLOCK),
            GreedySampler(),
            table=self.table,
            max_sequences=self.sequences,
            max_model_len=600,
            scratch=Scratch(self.scratch, 1 + most_padding(self.table) // BLOCK, self.sequences),
            device=torch.device("cpu"),
            graphs=graphs,
        )
        if warm:
            decoder.warm_up()
        return decoder

    def begin(self, lengths: Sequence[int]) -> list[int]:
        """Prompts, in one step of the runner; the tokens that it draws."""
        self.runner.reset()
        slices = [
            Slice(
                slot, 0, length, tuple((slot * 31 + at * 7) % 256 for at in range(length)),
                tuple(self._blocks(slot)), True, NewSequence(GREEDY, length),
            )
            for slot, length in enumerate(lengths)
        ]  # fmt: skip
        results = self.runner.run(Step(1, tuple(slices))).results
        self._positions = list(lengths)
        self._first = [result.token_ids[0] for result in results]
        return list(self._first)

    def alone(self, lengths: Sequence[int], tokens: int) -> list[list[int]]:
        """By the runner, all of it."""
        outputs = [[token] for token in self.begin(lengths)]
        for step in range(1, tokens):
            slices = [Slice(slot, length + step - 1, 1, (), (), True) for slot, length in enumerate(lengths)]
            for result in self.runner.run(Step(step + 1, tuple(slices))).results:
                outputs[result.slot] += result.token_ids
        return outputs

    def in_flight(self, tokens: int) -> list[list[int]]:
        """By the decoder, two steps at a time, after `begin`."""
        decoder, outputs = self._ready(), [[token] for token in self._first]
        for slot, token in enumerate(self._first):
            decoder.put(slot, token)
        flying = []
        for step in range(tokens - 1):
            rows = [self._row(slot, step) for slot in range(len(outputs))]
            flying.append(decoder.submit(rows))
            if len(flying) == 2:
                self._collect(decoder, flying.pop(0), outputs)
        for each in flying:
            self._collect(decoder, each, outputs)
        return outputs

    def staggered(self, tokens: int) -> list[list[int]]:
        """By the decoder: sequence i joins at step i, in changing order; each first token comes from the host."""
        decoder, outputs = self._ready(), [[token] for token in self._first]
        step = 0
        while any(len(output) < tokens for output in outputs):
            live = [slot for slot in range(len(outputs)) if slot <= step and len(outputs[slot]) < tokens]
            rows = []
            for slot in live[::-1] if step % 2 else live:
                done = len(outputs[slot]) - 1
                token = outputs[slot][0] if done == 0 else None
                rows.append(DecodeRow(slot, self._positions[slot] + done, token, self._blocks(slot)))
            self._collect(decoder, decoder.submit(rows), outputs)
            step += 1
        return outputs

    def _ready(self) -> DeviceDecoder:
        self._warm = self._warm or self.decoder()
        return self._warm

    def _row(self, slot: int, step: int) -> DecodeRow:
        return DecodeRow(slot, self._positions[slot] + step, None, self._blocks(slot))

    def _collect(self, decoder: DeviceDecoder, pending, outputs: list[list[int]]) -> None:  # type: ignore[no-untyped-def]
        for slot, token in zip(pending.slots, decoder.collect(pending), strict=True):
            outputs[slot].append(token)

    def _blocks(self, slot: int) -> range:
        return range(slot * BLOCKS, (slot + 1) * BLOCKS)


def decode_as_runner(
    model: Path, backend: str, prompts: Sequence[int], tokens: int, *, sequences: int, processors: int = 132
) -> None:
    """sequences: that there is room for; steps are filled up to so many rows."""
    driver = Driver(model, backend, sequences, processors)
    driver.table = tuple(bucket for bucket in driver.table if bucket.rows == sequences)
    expected = driver.alone(prompts, tokens)
    driver.begin(prompts)
    assert driver.in_flight(tokens) == expected
