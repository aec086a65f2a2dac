"""The formats of pages: what a token's keys and values are in memory.

Owns: the table of formats, sizes, and the check of a tensor of pages. Must not know: who reads and writes them.
Float pages are [B, P, G, D]. Narrow ones are uint8 [B, P, G, D + 4]: a block's bytes, then a float32 scale for each
token and head, largest / 448 (fp8) or largest / 127 (int8). In memory a block is [G, P, D].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from kernels.ops import require

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class PageFormat:
    name: str
    kind: str  # float, fp8 or int8, as the kernels call it
    dtype: torch.dtype

    @property
    def scale_bytes(self) -> int:
        """Of a token's keys or values of one head, behind the numbers."""
        return 0 if self.kind == "float" else _SCALE_BYTES

    def page(self, block_size: int, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
        """Raises ValueError for a page behind whose numbers scales could not be read."""
        require(
            not self.scale_bytes or block_size * kv_heads * head_dim % _SCALE_BYTES == 0,
            f"{self.name} pages of {block_size} tokens x {kv_heads} heads x {head_dim} bytes leave scales unaligned: "
            "block_size must be a multiple of 4",
        )
        return block_size, kv_heads, head_dim + self.scale_bytes

    def block_bytes(self, block_size: int, kv_heads: int, head_dim: int) -> int:
        size, heads, width = self.page(block_size, kv_heads, head_dim)
        return size * heads * width * self.dtype.itemsize

    def check(self, pages: Tensor, block_size: int, kv_heads: int, head_dim: int, name: str) -> None:
        expected = self.page(block_size, kv_heads, head_dim)
        require(
            pages.dim() == 4 and tuple(pages.shape[1:]) == expected,
            f"{name} must be [B, {expected[0]}, {expected[1]}, {expected[2]}], got {list(pages.shape)}",
        )
        require(pages.dtype == self.dtype, f"{name} must be {self.dtype}, got {pages.dtype}")
        require(pages.is_contiguous(), f"{name} must be contiguous")
        if self.kind != "float":
            require(pages.storage_offset() % _SCALE_BYTES == 0, f"{name}: scales of blocks are not aligned")


PAGE_FORMATS: Mapping[str, PageFormat] = MappingProxyType(
    {
        "bf16": PageFormat("bf16", "float", torch.bfloat16),
        "fp16": PageFormat("fp16", "float", torch.float16),
        "fp32": PageFormat("fp32", "float", torch.float32),
        "fp8": PageFormat("fp8", "fp8", torch.uint8),
        "int8": PageFormat("int8", "int8", torch.uint8),
    }
)
