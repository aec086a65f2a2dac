"""The plan of an executor: what its memory holds, how many sequences that is, and how fast it could be at best.

Owns: the table of lines, and the ceilings. Must not know: files, devices that are here, how kernels work.
A ceiling is of a device that does nothing but read what it must, once, or multiply what it must, whichever takes
longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from executor.device.buckets import bucket_table
from executor.sizing.devices import GIB, Device, PlanError
from executor.sizing.formats import CacheFormat, Weights
from executor.sizing.shapes import ModelShape
from kernels.gpu.workspace import attention_workspace_bytes

RESERVE_FRACTION: Final = 0.04  # of a device's memory: its context, code, allocator; an allowance, not a measurement
_GRAPH_BYTES: Final = 16 << 10  # of one recorded launch; likewise
_LAUNCHES: Final = 10  # of a layer
_TILE: Final = 64  # rows of a tile of attention there
DECODE_BATCHES: Final = (1, 8, 64, 256)
PREFILL_TOKENS: Final = (1024, 8192)


@dataclass(frozen=True, slots=True)
class Line:
    """change: what makes it smaller."""

    name: str
    bytes: int
    change: str


@dataclass(frozen=True, slots=True)
class MemoryTable:
    lines: tuple[Line, ...]

    @property
    def total(self) -> int:
        return sum(line.bytes for line in self.lines)

    def find(self, name: str) -> Line:
        return next(line for line in self.lines if line.name == name)

    def largest(self) -> Line:
        return max(self.lines, key=lambda line: line.bytes)

    def shortage(self, limit: int | None = None, at: str | None = None) -> str:
        """For people: that it does not fit into `limit` bytes, and which line to change. at: the line that memory ran
        out at; None: the largest."""
        line = self.largest() if at is None else self.find(at)
        rest = ", ".join(f"{each.name} {_gib(each.bytes)}" for each in self.lines)
        return (
            f"out of memory: {f'{_gib(limit)} are there, ' if limit is not None else ''}"
            f"the plan takes {_gib(self.total)} ({rest}); "
            f"the line to change is {line.name!r}: {line.change}"
        )


@dataclass(frozen=True, slots=True)
class Ask:
    """What a plan is for. reserve: bytes; None: a share of the device's memory."""

    shape: ModelShape
    device: Device
    weights: Weights
    cache: CacheFormat
    context: int
    block_size: int = 16
    max_sequences: int = 256
    max_batched_tokens: int = 8192
    reserve: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.context <= self.shape.context:
            raise PlanError(f"context must be from 1 to the model's {self.shape.context}, got {self.context}")
        for name, limit in (("block_size", 256), ("max_sequences", 65536), ("max_batched_tokens", 1 << 20)):
            if not 1 <= getattr(self, name) <= limit:
                raise PlanError(f"{name} must be from 1 to {limit}, got {getattr(self, name)}")
        if self.reserve is not None and self.reserve < 0:
            raise PlanError(f"reserve must be at least 0, got {self.reserve}")


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Sequences of `tokens` each, prompt and answer together, that the pool holds whole."""

    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A step's fewest bytes and operations, seconds at least, tokens a second at most. bound: bandwidth or operations.
    fits: the pool holds it."""

    sequences: int
    tokens: int
    bytes: int
    operations: int
    seconds: float
    tokens_per_second: float
    bound: str
    fits: bool


@dataclass(frozen=True, slots=True)
class Plan:
    table: MemoryTable
    token_bytes: int
    blocks: int
    pool_tokens: int
    concurrency: tuple[Concurrency, ...]
    decode: tuple[Ceiling, ...]
    prefill: tuple[Ceiling, ...]


def make_plan(ask: Ask) -> Plan:
    """The pool gets what the other lines leave. Raises PlanError naming the line where not one sequence fits."""
    token_bytes = ask.cache.token_bytes(ask.shape)
    fixed = fixed_lines(ask)
    limit = ask.device.memory
    block_bytes = token_bytes * ask.block_size
    needed = -(-ask.context // ask.block_size)
    blocks = (limit - MemoryTable(fixed).total) // block_bytes
    if blocks < needed:
        least = Line("KV pool", needed * block_bytes, "a shorter --context, --kv fp8, or a larger device")
        raise PlanError(MemoryTable((*fixed, least)).shortage(limit))
    table = MemoryTable((*fixed, Line("KV pool", blocks * block_bytes, "kv-memory-mib or total-blocks")))
    lengths = sorted({length for length in (1024, 2048, 4096, 8192, 32768) if length < ask.context} | {ask.context})
    pool = blocks * ask.block_size
    return Plan(
        table=table,
        token_bytes=token_bytes,
        blocks=blocks,
        pool_tokens=pool,
        concurrency=tuple(Concurrency(each, blocks // -(-each // ask.block_size)) for each in lengths),
        decode=tuple(decode_ceiling(ask, batch, ask.context, pool) for batch in DECODE_BATCHES),
        prefill=tuple(prefill_ceiling(ask, each, pool) for each in PREFILL_TOKENS if each <= ask.context),
    )


def fixed_lines(ask: Ask) -> tuple[Line, ...]:
    """All but the pool."""
    on_gpu = ask.device.processors > 0
    reserve = ask.reserve if ask.reserve is not None else round(RESERVE_FRACTION * ask.device.memory)
    lines = [
        Line("reserve", reserve, "--reserve-gib"),
        Line("weights", ask.weights.weight_bytes(ask.shape), "--weights with fewer bits, or a smaller model"),
        Line("temporaries", temporary_bytes(ask), "max-batched-tokens or max-sequences, or a shorter context"),
    ]
    if on_gpu:
        lines.append(Line("graphs", graph_bytes(ask), "max-sequences, which bounds how many are recorded"))
    return tuple(lines)


def temporary_bytes(ask: Ask) -> int:
    """Of the largest step: activations, logits, the states of split keys."""
    total = activation_bytes(ask.shape, ask.max_batched_tokens, ask.max_sequences)
    if ask.device.processors:
        total += attention_workspace_bytes(
            processors=ask.device.processors,
            kv_heads=ask.shape.kv_heads,
            head_dim=ask.shape.head_dim,
            block_size=ask.block_size,
            tile=_TILE,
            max_rows=ask.max_batched_tokens,
            max_sequences=ask.max_sequences,
            max_model_len=ask.context,
        )
    return total


def activation_bytes(shape: ModelShape, max_batched_tokens: int, max_sequences: int) -> int:
    """Rows of floats, and logits. A product exists twice for a moment where a back end computes it in a narrower type;
    sampling works on one row of logits at a time, in float64 with its keys and masks."""
    row = 5 * shape.hidden + 2 * shape.qkv + 3 * shape.heads * shape.head_dim + 6 * shape.inner
    return 4 * max_batched_tokens * row + 8 * max_sequences * shape.vocab + 128 * shape.vocab


def graph_bytes(ask: Ask) -> int:
    """Of every step that is recorded."""
    table = bucket_table(ask.max_sequences, ask.context, ask.shape.kv_heads, ask.device.processors)
    return len(table) * (ask.shape.layers * _LAUNCHES + 8) * _GRAPH_BYTES


def decode_ceiling(ask: Ask, batch: int, context: int, pool_tokens: int) -> Ceiling:
    """One token for each of `batch` sequences of `context` tokens."""
    token = ask.cache.token_bytes(ask.shape)
    read = ask.weights.read_bytes(ask.shape, batch) + batch * context * token
    operations = [(ask.weights.operand, batch * _layer_operations(ask.shape))]
    operations.append(("bf16", batch * (_head_operations(ask.shape) + _attention_operations(ask.shape, context))))
    return _ceiling(ask.device, batch, batch, read + batch * token, operations, batch * context <= pool_tokens)


def prefill_ceiling(ask: Ask, tokens: int, pool_tokens: int) -> Ceiling:
    """A prompt of `tokens`, and its first answer's token."""
    written = tokens * ask.cache.token_bytes(ask.shape)
    seen = _attention_operations(ask.shape, 1) * tokens * (tokens + 1) // 2
    operations = [(ask.weights.operand, tokens * _layer_operations(ask.shape))]
    operations.append(("bf16", _head_operations(ask.shape) + seen))
    read = ask.weights.read_bytes(ask.shape, tokens)
    return _ceiling(ask.device, 1, tokens, read + 2 * written, operations, tokens <= pool_tokens)


def _ceiling(
    device: Device, sequences: int, tokens: int, moved: int, operations: Sequence[tuple[str, int]], fits: bool
) -> Ceiling:
    by_bandwidth = moved / device.bandwidth
    by_operations = sum(count / device.rate(operand) for operand, count in operations)
    seconds = max(by_bandwidth, by_operations)
    return Ceiling(
        sequences=sequences,
        tokens=tokens,
        bytes=moved,
        operations=sum(count for _, count in operations),
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        bound="bandwidth" if by_bandwidth >= by_operations else "operations",
        fits=fits,
    )


def _layer_operations(shape: ModelShape) -> int:
    """Of one row, in the products of all layers."""
    return sum(2 * each.rows * each.cols * each.times for each in shape.matrices() if not (each.embedding or each.head))


def _head_operations(shape: ModelShape) -> int:
    return 2 * shape.vocab * shape.hidden


def _attention_operations(shape: ModelShape, keys: int) -> int:
    return 4 * shape.layers * shape.heads * shape.head_dim * keys


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
