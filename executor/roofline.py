"""A whole step of a model of any shape, as the launches that the GPU's back end would make, and its floor.

Owns: the recording of a step without memory. Must not know: how a launch is counted (`kernels.gpu.traffic`).
Weights lie on torch's device meta; what work there is (items of attention) is real, since the count depends on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from executor.sizing.devices import Device
from executor.sizing.formats import CacheFormat, WeightFormat
from executor.sizing.shapes import Matrix, ModelShape
from kernels.gpu import attention
from kernels.gpu.backend import GpuOps
from kernels.gpu.launch import Launch
from kernels.gpu.launches import META, matrix
from kernels.gpu.pack import GpuMatrix
from kernels.gpu.pages import PAGE_FORMATS
from kernels.gpu.target import Target
from kernels.gpu.traffic import Traffic, count
from kernels.ops import AttentionShape, DecoderLayer, DecoderStep, PagedRows, PlainDecoder

_KINDS: Final = {16: "float", 8: "int8", 4: "int4"}


@dataclass(frozen=True, slots=True)
class Rows:
    """A step: `sequences` of them, each with `tokens` new ones behind `before` that are in the cache."""

    sequences: int
    tokens: int
    before: int


@dataclass(frozen=True, slots=True)
class Part:
    """One launch, that many times in a step."""

    times: int
    traffic: Traffic

    def seconds(self, device: Device) -> float:
        """The floor by its own design: each part waits for memory or for products."""
        return max(self.traffic.moved / device.bandwidth, self.traffic.operations / device.rate("bf16"))


@dataclass(frozen=True, slots=True)
class StepCost:
    parts: tuple[Part, ...]

    @property
    def moved(self) -> int:
        return sum(part.times * part.traffic.moved for part in self.parts)

    @property
    def operations(self) -> int:
        return sum(part.times * part.traffic.operations for part in self.parts)

    @property
    def launches(self) -> int:
        return sum(part.times for part in self.parts)

    def seconds(self, device: Device) -> float:
        return sum(part.times * part.seconds(device) for part in self.parts)


def step_cost(
    shape: ModelShape, device: Device, arch: int, weights: WeightFormat, pages: str, rows: Rows, block_size: int = 16
) -> StepCost:
    """Raises ValueError for a kernel that nobody counts, KeyError for a format of weights without kernels."""
    launches: list[Launch] = []
    target = Target(META, arch, device.processors, torch.bfloat16, launches.append)
    ops = GpuOps(target, PAGE_FORMATS[pages])
    total = rows.sequences * rows.tokens
    parts: list[Part] = []

    def taken(times: int) -> None:
        parts.extend(Part(times, count(each, device.cache, device.processors)) for each in launches)
        launches.clear()

    matrices = {each.name: _packed(weights, each) for each in shape.matrices()}
    ids = torch.empty(total, dtype=torch.int64, device=META)
    x = ops.embedding(ids, matrices["embedding"])
    taken(1)
    step = _decoder_step(ops, shape, rows, block_size)
    page = torch.empty(
        64, *ops.pages.page(block_size, shape.kv_heads, shape.head_dim), dtype=ops.pages.dtype, device=META
    )
    gain = torch.empty(shape.hidden, device=META)
    layer = DecoderLayer(
        attention_norm=gain,
        qkv=matrices["qkv"],
        qkv_bias=torch.empty(shape.qkv, device=META) if shape.qkv_bias else None,
        output=matrices["attention output"],
        output_bias=None,
        mlp_norm=gain,
        gate_up=matrices["gate and up"],
        down=matrices["down"],
    )
    ops.decoder(x, PlainDecoder((layer,), 1e-5), (page,), (page,), step)
    taken(shape.layers)
    ops.head_logits(x[: rows.sequences], gain, 1e-5, matrices["embedding" if shape.tied else "head"])
    taken(1)
    return StepCost(tuple(parts))


def fewest_bytes(shape: ModelShape, weights: WeightFormat, cache: CacheFormat, rows: Rows) -> int:
    """Of a step: the weights, the keys and values of all that it sees, those that it writes, each once."""
    new = rows.sequences * rows.tokens
    return weights.read_bytes(shape, new) + (rows.sequences * rows.before + 2 * new) * cache.token_bytes(shape)


def products(shape: ModelShape, weights: WeightFormat, device: Device, arch: int, rows: int) -> Sequence[Part]:
    """Each product of a layer by itself: its kernel, and the sum of its segments where it has any."""
    found = []
    for each in shape.matrices()[:4]:
        launches: list[Launch] = []
        ops = GpuOps(Target(META, arch, device.processors, torch.bfloat16, launches.append))
        call = partial(ops.linear, torch.empty(rows, each.cols, device=META), _packed(weights, each))
        call()
        counted = [count(launch, device.cache, device.processors) for launch in launches]
        total = counted[0]
        for other in counted[1:]:
            total = replace(
                total,
                written=total.written + other.written,
                again=total.again + other.again,
                scratch=total.scratch + other.scratch,
                fewest=total.fewest + other.fewest,
            )
        found.append(Part(shape.layers, replace(total, kernel=each.name)))
    return found


def _packed(weights: WeightFormat, which: Matrix) -> GpuMatrix:
    storage = weights.storage(which)
    return matrix(
        _KINDS[storage.bits], which.rows, which.cols, affine=storage.group_bytes == 4 and storage.group > 0,
        group=storage.group,
    )  # fmt: skip


def _decoder_step(ops: GpuOps, shape: ModelShape, rows: Rows, block_size: int) -> DecoderStep:
    asked = AttentionShape(shape.heads, shape.kv_heads, shape.head_dim, block_size)
    length = rows.before + rows.tokens
    paged = PagedRows(
        query_start=torch.arange(rows.sequences + 1, dtype=torch.int32) * rows.tokens,
        seq_lens=torch.full((rows.sequences,), length, dtype=torch.int32),
        block_tables=torch.zeros(rows.sequences, -(-length // block_size), dtype=torch.int32),
    )
    total = rows.sequences * rows.tokens
    return DecoderStep(
        cos=torch.empty(total, shape.head_dim // 2, device=META),
        sin=torch.empty(total, shape.head_dim // 2, device=META),
        slot_mapping=torch.empty(total, dtype=torch.int64, device=META),
        plan=attention.plan(replace(ops.target, device=torch.device("cpu")), paged, asked),
        shape=asked,
        scale=shape.head_dim**-0.5,
    )
