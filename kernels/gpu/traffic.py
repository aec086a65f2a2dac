"""What a launch moves and computes, counted from the launch itself: its grid, its tiles, its scratch.

Owns: one counter for each kernel. Must not know: models, devices beyond the size of their last cache.
The count is of memory: what programs that run together read of the same addresses comes once; a result that the next
kernel reads comes from the cache if it is at most a quarter of it; all that is written goes to memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from torch import Tensor

from kernels.gpu.launch import Launch
from kernels.ops import require


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes. weights and cache are read; written: results, keys and values; again: results of earlier kernels that are
    read and do not lie in the device's cache any more; scratch: written for the kernel that follows, and not a result.

    fewest: of the op, were each input read once and each result written once, with no scratch and no filling up.
    operations: that the op needs, a multiplication and an addition being two. executed: those of whole tiles.
    """

    kernel: str
    weights: int = 0
    cache: int = 0
    written: int = 0
    again: int = 0
    scratch: int = 0
    fewest: int = 0
    operations: int = 0
    executed: int = 0

    @property
    def moved(self) -> int:
        return self.weights + self.cache + self.written + self.again + self.scratch


@dataclass(frozen=True, slots=True)
class _Counted:
    launch: Launch
    device_cache: int
    processors: int

    def __getitem__(self, name: str) -> Any:
        return self.launch.arguments[name]

    def size(self, name: str) -> int:
        tensor: Tensor = self[name]
        return tensor.nbytes

    def again(self, size: int) -> int:
        return 0 if size <= self.device_cache // 4 else size


def count(launch: Launch, device_cache: int, processors: int) -> Traffic:
    """device_cache: bytes of the device's last cache. processors: programs that run at once, at least.

    Raises ValueError for a kernel without a counter.
    """
    name = launch.kernel.__name__
    require(name in COUNTERS, f"no counter for the kernel {name}; there are {', '.join(COUNTERS)}")
    return COUNTERS[name](_Counted(launch, device_cache, processors))


def _linear(one: _Counted) -> Traffic:
    rows, n_out, cols = one["rows"], one["n_out"], one["cols"]
    width = 2 * n_out if one["GATED"] else n_out
    tiles_n, tiles_t = -(-n_out // one["BLOCK_N"]), -(-rows // one["BLOCK_T"])
    segments = one.launch.grid[1]
    require(one.launch.grid[0] == tiles_n * tiles_t, f"a grid of {one.launch.grid} is not of {tiles_n} x {tiles_t}")
    # Weights pass once for each group of tiles of rows whose programs run together, unless all of them stay.
    named = ["w"] + ["scale"] * (one["KIND"] != "float") + ["minimum"] * one["AFFINE"]
    packed = sum(one.size(name) for name in named)
    passes = 1 if packed <= one.device_cache // 4 else -(-tiles_t // one["GROUP_T"])
    x = rows * cols * one["x"].element_size()
    together = min(rows, one["GROUP_T"] * one["BLOCK_T"]) * cols * one["x"].element_size()
    # Programs that run together go along K together, so what they share of x comes once for all of them.
    waves = -(-tiles_n * min(tiles_t, one["GROUP_T"]) // one.processors)
    x_read = one.again(x) if together <= one.device_cache // 4 else x * waves
    split = one["SPLIT"]
    result = rows * n_out * one["out"].element_size()
    residual = 4 * rows * n_out if one["HAS_RESIDUAL"] and not split else 0
    partial = 4 * segments * rows * width if split else 0
    bits = {"float": 8 * one["w"].element_size(), "int8": 8, "int4": 4}[one["KIND"]]
    groups = 0 if one["KIND"] == "float" else -(-cols // one["GROUP"]) if one["GROUP"] else 1
    least = width * (cols * bits // 8 + groups * sum(one[name].element_size() for name in named[1:]))
    return Traffic(
        kernel="linear",
        weights=packed * passes + (4 * n_out if one["HAS_BIAS"] else 0),
        written=0 if split else result,
        again=x_read + one.again(residual),
        scratch=partial,
        fewest=least + x + residual + (0 if split else result),
        operations=2 * rows * width * cols,
        executed=2 * tiles_t * one["BLOCK_T"] * (width // n_out) * tiles_n * one["BLOCK_N"] * cols,
    )


def _reduce(one: _Counted) -> Traffic:
    rows, n_out = one["rows"], one["n_out"]
    result = rows * n_out * one["out"].element_size()
    residual = 4 * rows * n_out if one["HAS_RESIDUAL"] else 0
    partial = one.size("partial")
    return Traffic(
        kernel="sum of segments",
        written=result,
        again=one.again(residual),
        scratch=one.again(partial),
        fewest=result + residual,
    )


def _attention(one: _Counted) -> Traffic:
    """Items must lie on the CPU, with contents."""
    heads, groups, dim = one["HEADS"], one["KV_HEADS"], one["HEAD_DIM"]
    ratio, split_size, block_kv, window = heads // groups, one["SPLIT"], one["BLOCK_KV"], one["WINDOW"]
    token = 2 * (dim * one["k_pages"].element_size() + (4 if one["KV_KIND"] != "float" else 0))  # of one head
    distinct: dict[int, set[tuple[int, int]]] = {}  # by sequence: pieces of keys that its items read
    queries = rows = visible = executed = state_rows = reads = 0
    for sequence, _, tokens, position, split, _, _, _ in one["items"].tolist():
        if sequence < 0:
            continue
        end, begin = position + tokens, max(position - window + 1, 0) if window else 0
        low, high = (max(begin, split * split_size), min(end, (split + 1) * split_size)) if split >= 0 else (begin, end)
        keys = high - low // block_kv * block_kv
        reads += keys
        distinct.setdefault(sequence, set()).add((low, high))
        executed += 4 * one["BLOCK_M"] * -(-keys // block_kv) * block_kv * one["PAD_D"] * groups
        if split >= 0:
            state_rows += tokens * ratio * groups
        queries += tokens if low == begin else 0  # the splits of a tile run together
        rows += tokens if split < 0 else 0
        for at in range(position, end):
            first = max(at - window + 1, 0) if window else 0
            visible += max(0, min(at + 1, high) - max(first, low))
    once = sum(_covered(pieces) for pieces in distinct.values())
    stays = all(_covered(pieces) * token <= one.device_cache // 4 for pieces in distinct.values())
    q, out = 4 * queries * heads * dim, rows * heads * dim * one["out"].element_size()
    parts = state_rows * 4 * (one["PAD_D"] + 2)
    return Traffic(
        kernel="attention",
        cache=(once if stays else reads) * token * groups,
        written=out,
        again=one.again(q),
        scratch=parts,
        fewest=once * token * groups + q + out,
        operations=4 * visible * heads * dim,
        executed=executed,
    )


def _covered(pieces: set[tuple[int, int]]) -> int:
    total = reached = 0
    for low, high in sorted(pieces):
        total += max(0, high - max(low, reached))
        reached = max(reached, high)
    return total


def _merge(one: _Counted) -> Traffic:
    heads, ratio = one["HEADS"], one["HEADS"] // one["KV_HEADS"]
    rows = states = 0
    for _, tokens, _, parts in one["merges"].tolist():
        rows += tokens
        states += tokens * ratio * one["KV_HEADS"] * parts
    out = rows * heads * one["HEAD_DIM"] * one["out"].element_size()
    read = states * 4 * (one["PAD_D"] + 2)
    return Traffic(kernel="merge of splits", written=out, scratch=one.again(read), fewest=out)


def _rope(one: _Counted) -> Traffic:
    rows, heads, groups, dim = one["rows"], one["HEADS"], one["KV_HEADS"], one["HEAD_DIM"]
    x, q = 4 * rows * (heads + 2 * groups) * dim, rows * heads * dim * one["q_out"].element_size()
    scale = 4 if one["KV_KIND"] != "float" else 0
    pages = 2 * rows * groups * (dim * one["k_pages"].element_size() + scale)
    angles = 4 * rows * dim + 8 * rows
    return Traffic(
        kernel="rope and cache write",
        written=q + pages,
        again=one.again(x) + angles,
        fewest=x + q + pages + angles,
        operations=3 * rows * (heads + groups) * dim,
    )


def _norm(one: _Counted) -> Traffic:
    x, out = 4 * one["out"].numel(), one.size("out")
    gain = one.size("weight")
    return Traffic(
        kernel="norm",
        weights=gain,
        written=out,
        again=one.again(x),
        fewest=x + out + gain,
        operations=4 * one["out"].numel(),
    )


def _silu_mul(one: _Counted) -> Traffic:
    x, out = 8 * one["out"].numel(), one.size("out")
    return Traffic(
        kernel="gated activation", written=out, again=one.again(x), fewest=x + out, operations=5 * one["out"].numel()
    )


def _embedding(one: _Counted) -> Traffic:
    out, rows = one.size("out"), one["ids"].shape[0]
    table = one["w"].nbytes + (0 if one["KIND"] == "float" else one["scale"].nbytes)
    stored = one["w"].shape[0] * (1 if one["KIND"] == "float" else 64)  # rows, or panels of them
    looked_up = rows * table // stored
    return Traffic(kernel="embedding", weights=looked_up, written=out, fewest=looked_up + out)


COUNTERS: Final[Mapping[str, Callable[[_Counted], Traffic]]] = MappingProxyType(
    {
        "linear_kernel": _linear,
        "reduce_kernel": _reduce,
        "attention_kernel": _attention,
        "merge_kernel": _merge,
        "rope_cache_kernel": _rope,
        "rms_norm_kernel": _norm,
        "silu_mul_kernel": _silu_mul,
        "embedding_kernel": _embedding,
    }
)
