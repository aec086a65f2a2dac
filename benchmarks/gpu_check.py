"""What a GPU shows of the kernels: see gpu_check.sh. One JSON and one table; exit code 1 if a check failed.

Sections come in order of worth; one that fails is told and the others go on; one that the time does not reach is told.
"""

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import triton
from paged_cases import paged_case
from stored_matrices import random_matrix
from torch import Tensor

from executor.cache import KvPool
from executor.device.buckets import SPLIT, Bucket
from executor.device.decode import DeviceDecoder, GreedySampler
from executor.device.layout import DecodeRow, Scratch
from executor.loading.ggml_types import GgmlType
from executor.models.llama import Llama, LlamaConfig
from executor.models.rope import Rope, rope_tables
from executor.quant.requantized import to_int8
from executor.roofline import Rows, fewest_bytes, step_cost
from executor.sizing.devices import DEVICES, Device
from executor.sizing.formats import find_cache, find_weights
from executor.sizing.shapes import SHAPES, Matrix, ModelShape
from kernels.gpu import attention, draws
from kernels.gpu.backend import GpuOps
from kernels.gpu.launch import Launch, run
from kernels.gpu.launches import matrix
from kernels.gpu.pack import GpuMatrix
from kernels.gpu.pages import PAGE_FORMATS
from kernels.gpu.target import Target, present_target
from kernels.gpu.traffic import count
from kernels.gpu.variants import Variants
from kernels.ops import AttentionShape, DecoderLayer, PagedRows, StoredMatrix
from kernels.reference import ReferenceOps

BLOCK = 16
COUNTS = ("compiled", "buckets")
FORMATS = ("bf16", "w8", "w4")  # of weights; no step multiplies 8-bit activations


@dataclass(frozen=True)
class Sizes:
    model: ModelShape
    rows: tuple[int, ...]  # of products
    attention: tuple[tuple[int, int], ...]  # batch, context
    decode: tuple[int, ...]  # batches
    context: int
    prefill: tuple[int, ...]
    steps: int
    repeats: int


FULL = Sizes(
    SHAPES["llama-3.1-8b"], (1, 8, 16, 64, 4096), ((1, 8192), (8, 1024), (64, 1024), (256, 1024), (8, 8192)),
    (1, 8, 64, 256), 1024, (1024, 8192), 24, 20,
)  # fmt: skip
TINY = Sizes(
    ModelShape("tiny", 1, 128, 128, 4, 2, 64, 128, 512), (1, 16), ((2, 40),), (1, 2), 40, (24,), 3, 1
)  # fmt: skip


@dataclass
class Report:
    """timed: whether seconds mean something. rows: of the table. failures: checks that did not hold, and sections that
    broke. skipped: sections that the time did not reach."""

    timed: bool
    rows: list[dict[str, object]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def add(self, section: str, name: str, **figures: float) -> None:
        told = {each: value if self.timed or each in COUNTS else None for each, value in figures.items()}
        self.rows.append({"section": section, "name": name, **told})

    def check(self, name: str, holds: bool, told: str = "") -> None:
        if not holds:
            self.failures.append(f"{name}: {told}" if told else name)


@dataclass
class Bench:
    sizes: Sizes
    target: Target
    variants: Variants
    device: Device  # the table's row, with figures that were measured now
    report: Report
    tiny: bool

    @property
    def here(self) -> torch.device:
        return self.target.device

    def seconds(self, call: Callable[[], object], repeats: int | None = None) -> float:
        """The median of several, by the device's clock; without a GPU by the host's, which says nothing.

        Before each, half a gigabyte is overwritten: so nothing that is read lies in the cache, and the host, which
        takes longer to launch a small kernel than the kernel itself, is ahead of the device.
        """
        if self.tiny:
            started = time.perf_counter()
            call()
            return time.perf_counter() - started
        for _ in range(3):
            call()
        times = []
        swept = torch.empty(1 << 29, dtype=torch.uint8, device=self.here)
        for _ in range(repeats or self.sizes.repeats):
            swept.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times)

    def recorded(self, call: Callable[[GpuOps], object], pages: str = "bf16") -> list[Launch]:
        launches: list[Launch] = []

        def keep(launch: Launch) -> None:
            launches.append(launch)
            self.variants(launch)

        call(GpuOps(replace(self.target, launch=keep), PAGE_FORMATS[pages]))
        return launches

    def kernel(self, section: str, name: str, launch: Launch, counted: Launch | None = None) -> None:
        """Time one launch against the longer of its bytes and its operations."""
        traffic = count(counted or launch, self.device.cache, self.device.processors)
        seconds = self.seconds(lambda: run(launch))
        floor = max(traffic.moved / self.device.bandwidth, traffic.operations / self.device.rate("bf16"))
        self.report.add(
            section, name, us=seconds * 1e6, gb_per_s=traffic.moved / seconds / 1e9,
            tflop_per_s=traffic.operations / seconds / 1e12, of_floor=floor / seconds,
        )  # fmt: skip


def ceilings(bench: Bench) -> None:
    """What a copy and torch's own product reach here; everything else is measured against these."""
    size = 1 << (14 if bench.tiny else 32)
    source = torch.zeros(size, dtype=torch.uint8, device=bench.here)
    target = torch.empty_like(source)
    bandwidth = 2 * size / bench.seconds(lambda: target.copy_(source))
    wide = 64 if bench.tiny else 8192
    kind = torch.float32 if bench.tiny else torch.bfloat16
    a, b = (torch.randn(wide, wide, device=bench.here).to(kind) for _ in range(2))
    rate = 2 * wide**3 / bench.seconds(lambda: a @ b)
    bench.report.add("ceiling", "copy", gb_per_s=bandwidth / 1e9)
    bench.report.add("ceiling", "torch bf16 product", tflop_per_s=rate / 1e12)
    bench.device = replace(bench.device, bandwidth=bandwidth, operations={"bf16": rate})


def correctness(bench: Bench) -> None:
    """Every kernel against `reference`; a row alone against the same row among many, bit for bit."""
    ops, reference = GpuOps(replace(bench.target, launch=bench.variants)), ReferenceOps()
    rows, cols, check = 96, 256, bench.report.check
    near = 1e-5 if ops.target.interpret else 0.01
    dense = random_matrix(GgmlType.BF16, rows, cols)
    kinds = {
        "bf16": dense, "w8 rows": to_int8(dense), "w8": random_matrix(GgmlType.Q8_0, rows, cols),
        "w4": random_matrix(GgmlType.Q4_0, rows, cols), "w4 minima": random_matrix(GgmlType.Q4_1, rows, cols),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    counts = (1, 17) if bench.tiny else (1, 15, 16, 17, 65, 300)
    x = torch.randn(max(counts), cols, generator=generator)
    for name, stored in kinds.items():
        packed = ops.pack([stored], lookup=True)
        expected = reference.linear(x, reference.pack([stored], lookup=False))
        whole = ops.linear(x, packed).cpu()
        check(f"linear {name}", error(whole, expected) < near, f"{error(whole, expected):.2e}")
        for each in counts:
            alone = ops.linear(x[:each], packed).cpu()
            check(f"linear {name}: {each} rows are those among {max(counts)}", torch.equal(alone, whole[:each]))
        ids = torch.tensor([0, 5, rows - 1])
        check(f"embedding {name}", torch.equal(ops.embedding(ids, packed).cpu(), values(stored)[ids]))
        gated = ops.gated_mlp(x, torch.ones(cols), 1e-5, ops.pack([pair(name, cols)], lookup=False), square(ops, cols))
        own = reference.gated_mlp(
            x, torch.ones(cols), 1e-5, reference.pack([pair(name, cols)], lookup=False), square(reference, cols)
        )
        check(f"gated mlp {name}", error(gated.cpu(), own) < 2 * near, f"{error(gated.cpu(), own):.2e}")
    gain = torch.rand(cols, generator=generator) + 0.5
    off = error(ops.rms_norm(x, gain, 1e-5).cpu(), reference.rms_norm(x, gain, 1e-5))
    check("rms_norm", off < 1e-5, f"{off:.2e}")
    shapes = [64] if bench.tiny else [64, 80, 96, 128, 256]
    for pages, limit in (("bf16", 0.01), ("fp16", 0.01), ("fp8", 0.05), ("int8", 0.02)):
        for head_dim in shapes if pages == "bf16" else shapes[:1]:
            attends(bench, pages, head_dim, limit)


def attends(bench: Bench, pages: str, head_dim: int, limit: float) -> None:
    shape = AttentionShape(heads=8, kv_heads=2, head_dim=head_dim, block_size=BLOCK)
    lengths = (
        [(1, 1), (17, 1), (300, 1), (40, 40)] if bench.tiny else [(1, 1), (17, 1), (300, 1), (3000, 1), (700, 500)]
    )
    case = paged_case(shape, lengths)
    found = []
    for processors in (1, 10_000):  # keys of a tile whole, and split
        ops = GpuOps(replace(bench.target, launch=bench.variants, processors=processors), PAGE_FORMATS[pages])
        size = case.blocks * ops.pages.block_bytes(BLOCK, shape.kv_heads, head_dim)
        page = (case.blocks, *ops.pages.page(BLOCK, shape.kv_heads, head_dim))
        pool = [
            torch.full((size,), 0xFF, dtype=torch.uint8, device=bench.here).view(ops.pages.dtype).view(page)
            for _ in range(2)
        ]
        for keys, held, table in zip(case.keys, case.values, case.rows.block_tables, strict=True):
            at = torch.arange(keys.shape[0])
            ops.cache_write(keys, held, *pool, table[at // BLOCK].to(torch.int64) * BLOCK + at % BLOCK)
        work = ops.plan_attention(case.rows, shape)
        found.append(ops.paged_attention(case.q.to(bench.here), *pool, work, shape, head_dim**-0.5).cpu())
    name = f"attention {pages} D={head_dim}"
    bench.report.check(f"{name}: split keys change no bit", torch.equal(*found))
    starts, rows = case.rows.query_start.tolist(), []
    for index, (keys, held) in enumerate(zip(case.keys, case.values, strict=True)):
        new = starts[index + 1] - starts[index]
        q = case.q[starts[index] : starts[index + 1]].double()
        wide, values_ = (each.double().repeat_interleave(4, dim=1) for each in (keys, held))
        scores = torch.einsum("thd,khd->htk", q, wide) * head_dim**-0.5
        hidden = torch.arange(keys.shape[0])[None, :] > (keys.shape[0] - new + torch.arange(new))[:, None]
        rows.append(torch.einsum("htk,khd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values_))
    off = error(found[0], torch.cat(rows))
    bench.report.check(name, off < limit, f"{off:.2e}")


def error(found: Tensor, expected: Tensor) -> float:
    """Root of the mean square, relative; NaN is as far away as can be."""
    off = float((found.double() - expected.double()).norm() / expected.double().norm())
    return off if off == off else float("inf")


def values(stored: StoredMatrix) -> Tensor:
    return stored.dequantize(stored.blocks)


def pair(name: str, cols: int) -> StoredMatrix:
    """Gate and up."""
    kind = {"bf16": GgmlType.BF16, "w4": GgmlType.Q4_0, "w4 minima": GgmlType.Q4_1}.get(name, GgmlType.Q8_0)
    return random_matrix(kind, 2 * cols, cols, seed=5)


def square(ops: GpuOps | ReferenceOps, cols: int) -> GpuMatrix:
    return ops.pack([random_matrix(GgmlType.BF16, cols, cols, seed=6)], lookup=False)  # type: ignore[return-value]


def kernels(bench: Bench) -> None:
    shape = bench.sizes.model
    for weights in FORMATS:
        for each in shape.matrices()[:4]:
            packed = random_packed(bench, weights, each)
            for rows in bench.sizes.rows:
                x = torch.randn(rows, each.cols, device=bench.here)
                gated = each.name == "gate and up"

                def call(ops: GpuOps, x: Tensor = x, packed: GpuMatrix = packed, gated: bool = gated) -> object:
                    return ops._gated(x, packed) if gated else ops.linear(x, packed)

                for launch in bench.recorded(call):
                    what = "sum of segments" if "segments" in launch.arguments else f"linear {weights}"
                    bench.kernel("kernel", f"{what} {each.name}, {rows} rows", launch)
            del packed
    asked = AttentionShape(shape.heads, shape.kv_heads, shape.head_dim, BLOCK)
    for pages in ("bf16", "fp8"):
        for batch, context in bench.sizes.attention:
            one_attention(bench, asked, pages, batch, context)
    x, gain = torch.randn(max(bench.sizes.rows), shape.hidden, device=bench.here), torch.ones(shape.hidden)
    for launch in bench.recorded(lambda ops: ops.rms_norm(x, gain, 1e-5)):
        bench.kernel("kernel", f"rms_norm, {x.shape[0]} rows", launch)


def one_attention(bench: Bench, shape: AttentionShape, pages: str, batch: int, context: int) -> None:
    kept, blocks = PAGE_FORMATS[pages], -(-context // BLOCK)
    pool = [
        torch.zeros(
            batch * blocks, *kept.page(BLOCK, shape.kv_heads, shape.head_dim), dtype=kept.dtype, device=bench.here
        )
        for _ in range(2)
    ]
    tables = torch.randperm(batch * blocks).to(torch.int32).view(batch, blocks)
    rows = PagedRows(
        torch.arange(batch + 1, dtype=torch.int32), torch.full((batch,), context, dtype=torch.int32), tables
    )
    work = attention.plan(bench.target, rows, shape)
    q = torch.randn(batch, shape.heads, shape.head_dim, device=bench.here)
    for launch in bench.recorded(
        lambda ops: attention.attend(ops.target, q, *pool, work, kept, shape.head_dim**-0.5), pages
    ):
        listed = {
            name: work_list.cpu()
            for name in ("items", "merges")
            if (work_list := launch.arguments.get(name)) is not None
        }
        counted = replace(launch, arguments={**launch.arguments, **listed})
        what = "attention" if "items" in launch.arguments else "merge of splits"
        bench.kernel("kernel", f"{what} {pages}, batch {batch}, context {context}", launch, counted)


def random_packed(bench: Bench, weights: str, which: Matrix) -> GpuMatrix:
    """Weights of a size that keeps activations finite."""
    storage = find_weights(weights).storage(which)
    kind = {16: "float", 8: "int8", 4: "int4"}[storage.bits]
    plain = matrix(kind, which.rows, which.cols, group=storage.group)
    if kind == "float":
        w = torch.empty(plain.w.shape, dtype=torch.bfloat16, device=bench.here).normal_(std=which.cols**-0.5)
        return replace(plain, w=w)
    assert plain.scale is not None
    w = torch.randint(-(2**31), 2**31, plain.w.shape, dtype=torch.int32, device=bench.here)
    size = which.cols**-0.5 / (4.6 if kind == "int4" else 74)  # of integers that are all as likely
    return replace(plain, w=w, scale=torch.full(plain.scale.shape, size, dtype=torch.float16, device=bench.here))


def random_model(bench: Bench, ops: GpuOps, weights: str, longest: int) -> Llama:
    shape = bench.sizes.model
    config = LlamaConfig(
        shape.layers, shape.hidden, shape.inner, shape.heads, shape.kv_heads, shape.head_dim, 1e-5, longest,
        Rope(shape.head_dim, 500000.0),
    )  # fmt: skip
    gain = torch.ones(shape.hidden, device=bench.here)
    *inside, embedding, head = shape.matrices()

    def layer() -> DecoderLayer:
        qkv, output, gate_up, down = (random_packed(bench, weights, each) for each in inside)
        return DecoderLayer(gain, qkv, None, output, None, gain, gate_up, down)

    layers = tuple(layer() for _ in range(shape.layers))
    ends = [random_packed(bench, weights, each) for each in (embedding, head)]
    return Llama(config, ops, ends[0], layers, gain, ends[1], rope_tables(config.rope, longest))


def model(bench: Bench, weights: str) -> None:
    sizes, shape = bench.sizes, bench.sizes.model
    ops = GpuOps(replace(bench.target, launch=bench.variants))
    longest = max(sizes.context + 2 * sizes.steps + 8, *sizes.prefill)
    built = random_model(bench, ops, weights, longest)
    blocks = -(-(sizes.context + 2 * sizes.steps + 8) // BLOCK)
    total = max(max(sizes.decode) * blocks, -(-max(sizes.prefill) // BLOCK)) + 2
    pages = [
        torch.zeros(
            total, *ops.pages.page(BLOCK, shape.kv_heads, shape.head_dim), dtype=ops.pages.dtype, device=bench.here
        )
        for _ in range(2 * shape.layers)
    ]
    pool = KvPool(tuple(pages[::2]), tuple(pages[1::2]))
    tokens = {}
    for graphs in (False, True) if not bench.tiny else (False,):
        decoder = make_decoder(bench, built, ops, pool, total, longest, graphs)
        before, started = bench.variants.compiled, time.perf_counter()
        decoder.warm_up()
        bench.report.add(
            "warm-up", f"{weights} {how(graphs)}", seconds=time.perf_counter() - started,
            compiled=bench.variants.compiled - before, buckets=len(decoder.recorded),
        )  # fmt: skip
        late = len(bench.variants.late)
        bench.variants.seal()
        for batch in sizes.decode:
            tokens[graphs, batch] = decode(bench, decoder, weights, batch, blocks, graphs)
        bench.variants.unseal()
        came = bench.variants.late[late:]
        bench.report.check(f"nothing compiles after warm-up, {weights} {how(graphs)}", not came, ", ".join(came))
        del decoder
    for batch in sizes.decode if not bench.tiny else ():
        same = tokens[True, batch] == tokens[False, batch]
        bench.report.check(f"{weights} batch {batch}: recorded steps give the tokens of eager ones", same)
    for length in sizes.prefill:
        prefill(bench, built, ops, pool, weights, length)


def how(graphs: bool) -> str:
    return "recorded" if graphs else "eager"


def make_decoder(
    bench: Bench, built: Llama, ops: GpuOps, pool: KvPool, total: int, longest: int, graphs: bool
) -> DeviceDecoder:
    shape, most = bench.sizes.model, max(bench.sizes.decode)
    sampler = GreedySampler(partial(draws.greedy, ops.target))
    splits = -(-longest // SPLIT)
    table = sorted(
        {
            Bucket(batch, splits if batch * shape.kv_heads < 2 * bench.target.processors else 1)
            for batch in bench.sizes.decode
        }
        | {Bucket(batch, 1) for batch in bench.sizes.decode}
    )
    return DeviceDecoder(
        built, ops, pool, AttentionShape(shape.heads, shape.kv_heads, shape.head_dim, BLOCK), sampler,
        table=table, max_sequences=most, max_model_len=longest, scratch=Scratch(total - 2, 2, most),
        device=bench.here, graphs=graphs,
    )  # fmt: skip


def decode(
    bench: Bench, decoder: DeviceDecoder, weights: str, batch: int, blocks: int, graphs: bool
) -> list[tuple[int, ...]]:
    """Steps two in flight, each token fed on the device; seconds by the host's clock, all that a step costs."""
    sizes = bench.sizes
    found, flying, times = [], [], []
    for step in range(sizes.steps):
        rows = [
            DecodeRow(
                slot,
                sizes.context - 1 + step,
                (slot + 1) % sizes.model.vocab if step == 0 else None,
                range(slot * blocks, (slot + 1) * blocks),
            )
            for slot in range(batch)
        ]
        flying.append(decoder.submit(rows))
        if len(flying) == 2:
            found.append(decoder.collect(flying.pop(0)))
            times.append(time.perf_counter())
    found.append(decoder.collect(flying.pop(0)))
    gaps = [after - before for before, after in pairwise(times[2:])] or [
        after - before for before, after in pairwise(times)
    ]
    seconds = statistics.median(gaps)
    scheme, rows_ = find_weights(weights), Rows(batch, 1, sizes.context - 1)
    cost = step_cost(bench.sizes.model, bench.device, 90, scheme, "bf16", rows_)
    fewest = fewest_bytes(bench.sizes.model, scheme, find_cache("bf16"), rows_)
    bench.report.add(
        "decode", f"{weights} batch {batch} {how(graphs)}", ms=seconds * 1e3, tokens_per_s=batch / seconds,
        gb_per_s=fewest / seconds / 1e9, of_bandwidth=fewest / bench.device.bandwidth / seconds,
        of_floor=cost.seconds(bench.device) / seconds,
    )  # fmt: skip
    return found


def prefill(bench: Bench, built: Llama, ops: GpuOps, pool: KvPool, weights: str, length: int) -> None:
    here, blocks = bench.here, -(-length // BLOCK)
    rows = PagedRows(
        torch.tensor([0, length], dtype=torch.int32), torch.tensor([length], dtype=torch.int32),
        torch.arange(blocks, dtype=torch.int32)[None, :],
    )  # fmt: skip
    shape = bench.sizes.model
    work = ops.plan_attention(rows, AttentionShape(shape.heads, shape.kv_heads, shape.head_dim, BLOCK))
    at = torch.arange(length, device=here)

    def call() -> None:
        with torch.inference_mode():
            built.logits(built.compute(at % shape.vocab, at, at, work, pool)[-1:])

    seconds = bench.seconds(call, repeats=3)
    cost = step_cost(shape, bench.device, 90, find_weights(weights), "bf16", Rows(1, length, 0))
    bench.report.add(
        "prefill", f"{weights} {length} tokens", ms=seconds * 1e3, tokens_per_s=length / seconds,
        tflop_per_s=cost.operations / seconds / 1e12, of_floor=cost.seconds(bench.device) / seconds,
    )  # fmt: skip


def sections() -> Iterator[tuple[str, Callable[[Bench], None]]]:
    yield "ceilings", ceilings
    yield "correctness", correctness
    yield "model bf16", lambda bench: model(bench, "bf16")
    yield "model w4", lambda bench: model(bench, "w4")
    yield "kernels", kernels
    yield "model w8", lambda bench: model(bench, "w8")


COLUMNS = (
    "us",
    "ms",
    "seconds",
    "tokens_per_s",
    "gb_per_s",
    "tflop_per_s",
    "of_bandwidth",
    "of_floor",
    "compiled",
    "buckets",
)


def page(report: Report, where: str) -> str:
    lines = [f"Measured by `benchmarks/gpu_check.sh` on {where}.", ""]
    lines += [f"| what | name | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for row in report.rows:
        cells = ["" if row.get(name) is None else f"{row[name]:,.4g}" for name in COLUMNS]
        lines.append(f"| {row['section']} | {row['name']} | {' | '.join(cells)} |")
    lines += [
        "",
        *(f"- FAILED {each}" for each in report.failures),
        *(f"- not reached: {each}" for each in report.skipped),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, in the interpreter: no figures")
    parser.add_argument("--device", default="h200", choices=[name for name in DEVICES if name != "cpu"])
    parser.add_argument("--seconds", type=float, default=420.0, help="after which no section is begun")
    parser.add_argument("--out", type=Path, default=Path())
    chosen = parser.parse_args()
    target = present_target()
    if chosen.tiny != target.interpret:
        parser.error("--tiny is for the interpreter (TRITON_INTERPRET=1), and nothing else is")
    started = time.monotonic()
    variants, report = Variants(run), Report(timed=not chosen.tiny)
    device = replace(
        DEVICES[chosen.device], processors=DEVICES[chosen.device].processors if chosen.tiny else target.processors
    )
    bench = Bench(TINY if chosen.tiny else FULL, target, variants, device, report, chosen.tiny)
    spent = {}
    for name, section in sections():
        begun = time.monotonic()
        if begun - started > chosen.seconds:
            report.skipped.append(name)
            continue
        try:
            section(bench)
        except Exception as error:
            traceback.print_exc()
            report.failures.append(f"{name} broke: {type(error).__name__}: {error}")
        if not chosen.tiny:
            torch.cuda.empty_cache()
        spent[name] = round(time.monotonic() - begun, 1)
        print(f"{name}: {spent[name]} s", file=sys.stderr, flush=True)
    where = "no GPU (interpreter)" if chosen.tiny else torch.cuda.get_device_name(target.device)
    document = {
        "device": where, "torch": torch.__version__, "triton": triton.__version__, "seconds": spent,
        "rows": report.rows, "failures": report.failures, "not_reached": report.skipped, "compiled": variants.compiled,
    }  # fmt: skip
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "gpu_check.json").write_text(json.dumps(document, indent=1))
    (chosen.out / "gpu_check.md").write_text(page(report, where) + "\n")
    print(page(report, where))
    return 1 if report.failures or report.skipped else 0


if __name__ == "__main__":
    sys.exit(main())
