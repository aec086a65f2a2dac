"""What the kernels run on, and the tiles that they take there.

Owns: the tables of tiles, the only place where they are chosen. Must not know: tensors' contents, models.
Invariants: a tile's size along K, the segment, the split and the chunk of keys are the same for every number of rows,
on one target; so a row's bits don't depend on the batch. The interpreter has tables of its own, since it pays for each
operation, however small: what it proves are the kernels, not these numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import Launch, run
from kernels.gpu.workspace import SPLIT as SPLIT
from kernels.ops import require

PANEL: Final = 64  # rows of weights that lie together
CHUNK: Final = 64  # columns of floats that one step of a product takes
SEGMENT_COLUMNS: Final = 1024  # summed from zero
FEW_ROWS: Final = 16  # of a tile, at least
SMALL_ROWS: Final = 64  # up to which a product may give its segments to programs of their own

_TRITON_TYPES: Final = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@dataclass(frozen=True, slots=True)
class LinearTiles:
    block_n: int
    block_t: int
    group_t: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    block_m: int
    block_kv: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Target:
    """arch: compute capability as in 90, 0 in the interpreter. processors: streaming multiprocessors. launch: what
    becomes of a launch. operand: what products take in; the interpreter computes bfloat16 wrongly and takes float32.
    """

    device: torch.device
    arch: int
    processors: int
    operand: torch.dtype
    launch: Callable[[Launch], None] = run

    @property
    def interpret(self) -> bool:
        return self.arch == 0

    @property
    def lines(self) -> int:
        """Heads of rows that a program rotates or writes to pages."""
        return 512 if self.interpret else 8

    def draw_block(self, vocab: int) -> int:
        """Logits that a program takes at a time."""
        return 1 << (vocab - 1).bit_length() if self.interpret else 2048

    @property
    def operand_type(self) -> tl.dtype:
        return _TRITON_TYPES[self.operand]

    def splits_below(self, rows: int) -> int:
        """Programs below which a product gives its segments to programs of their own. The float32 sums of more than
        16 rows cost more bytes than a second program on each processor brings."""
        return 2 * self.processors if rows <= FEW_ROWS else self.processors

    def linear(self, kind: str, rows: int, n_out: int, *, gated: bool, affine: bool) -> LinearTiles:
        if self.interpret:
            whole = 1 << (n_out - 1).bit_length()
            return LinearTiles(block_n=min(max(PANEL, whole), 2048), block_t=16, group_t=8, warps=4, stages=1)
        if rows <= FEW_ROWS:
            return LinearTiles(block_n=64, block_t=16, group_t=8, warps=4, stages=4 if kind == "float" else 6)
        if self.arch >= 100 and kind != "float":
            return _tensor_memory_tiles(kind, rows, gated=gated)
        older = self.arch < 90 and kind != "float"  # without wgmma both operands take registers
        if rows <= SMALL_ROWS:
            block_t = 32 if older and gated and kind == "int4" else 64
            return LinearTiles(block_n=64, block_t=block_t, group_t=8, warps=4, stages=3 if gated else 4)
        if gated and (affine or older):  # the minima take the registers that a wider tile would need
            return LinearTiles(block_n=64, block_t=64, group_t=16, warps=4, stages=3)
        return LinearTiles(block_n=64 if gated else 128, block_t=128, group_t=8, warps=8, stages=3)

    def narrow(self, rows: int, n_out: int, *, gated: bool) -> LinearTiles:
        """Of products whose both operands have 8 bits."""
        if self.interpret:
            whole = 1 << (n_out - 1).bit_length()
            return LinearTiles(block_n=min(max(PANEL, whole), 1024), block_t=16, group_t=8, warps=4, stages=1)
        if rows <= FEW_ROWS:
            return LinearTiles(block_n=64, block_t=16, group_t=8, warps=4, stages=4)
        if rows <= SMALL_ROWS:
            return LinearTiles(block_n=64, block_t=64, group_t=8, warps=4, stages=3)
        return LinearTiles(block_n=64 if gated else 128, block_t=128, group_t=8, warps=8, stages=3)

    def attention(self, head_dim: int, pages: str = "float") -> AttentionTiles:
        """pages: their kind. The rows of a tile, which a plan is made for, are the same for all kinds."""
        if self.interpret:
            return AttentionTiles(block_m=128, block_kv=128, warps=4, stages=1)
        if head_dim <= 64:
            return AttentionTiles(block_m=64, block_kv=64, warps=4, stages=2)
        if self.arch < 90 and head_dim <= 128:  # int8 is widened in registers: none are left for a second stage
            return AttentionTiles(block_m=64, block_kv=32, warps=8, stages=1 if pages == "int8" else 2)
        if self.arch < 90:
            return AttentionTiles(block_m=32, block_kv=16, warps=8, stages=2)
        if head_dim <= 128:
            return AttentionTiles(block_m=64, block_kv=32, warps=4, stages=3)
        return AttentionTiles(block_m=64, block_kv=16, warps=8, stages=3)


def _tensor_memory_tiles(kind: str, rows: int, *, gated: bool) -> LinearTiles:
    """Of sm_100. Triton 3.7 makes a trap of larger ones: of all that were tried, those compile whose slices (4 of
    8-bit weights, 8 of 4-bit ones, gated twice as many) times block_t are at most 512, the columns of tensor memory."""
    if gated and kind == "int4":
        return LinearTiles(block_n=64, block_t=32, group_t=16, warps=4, stages=3)
    if gated or kind == "int4" or rows <= SMALL_ROWS:
        return LinearTiles(block_n=64, block_t=64, group_t=16, warps=4, stages=3 if gated else 4)
    return LinearTiles(block_n=64, block_t=128, group_t=8, warps=8, stages=3)


def interpreting() -> bool:
    """Whether kernels are decorated for the interpreter: TRITON_INTERPRET=1 when they are imported."""
    return bool(triton.knobs.runtime.interpret)


def present_target() -> Target:
    """The first CUDA device, or the interpreter where that is asked for. Raises ValueError where there is neither."""
    if interpreting():
        return Target(torch.device("cpu"), arch=0, processors=1, operand=torch.float32)
    require(
        torch.cuda.is_available(),
        "the back end gpu needs a CUDA device and a CUDA build of torch, and there is none "
        "(TRITON_INTERPRET=1 runs its kernels in Triton's interpreter, which is for tests)",
    )
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    arch = properties.major * 10 + properties.minor
    require(arch >= 80, f"the back end gpu needs compute capability 8.0, {properties.name} has {arch / 10}")
    return Target(device, arch, properties.multi_processor_count, torch.bfloat16)
