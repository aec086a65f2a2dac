"""A matrix kept as its file stores it, for formats and back ends without a kernel of their own.

Owns: the pieces in which such a matrix is decoded, so that never more than CHUNK_BYTES of it are floats at once.
Invariant: resident bytes are the file's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops import StoredMatrix, require

CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class RawMatrix:
    parts: tuple[StoredMatrix, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def cols(self) -> int:
        return self.parts[0].cols

    @property
    def nbytes(self) -> int:
        return sum(part.blocks.nbytes for part in self.parts)

    def chunks(self) -> Iterator[Tensor]:
        """float32 [n, cols], all rows in order. The division depends on the matrix alone."""
        step = max(1, CHUNK_BYTES // (4 * self.cols))
        for part in self.parts:
            for start in range(0, part.rows, step):
                yield part.dequantize(part.blocks[start : start + step])

    def lookup(self, ids: Tensor) -> Tensor:
        require(len(self.parts) == 1, "rows of a fused matrix are not looked up")
        return self.parts[0].dequantize(self.parts[0].blocks.index_select(0, ids))


def pack_raw(parts: Sequence[StoredMatrix]) -> RawMatrix:
    check_parts(parts)
    return RawMatrix(tuple(parts))


def check_parts(parts: Sequence[StoredMatrix]) -> None:
    require(len(parts) > 0, "a matrix needs at least one part")
    widths = {part.cols for part in parts}
    require(len(widths) == 1, f"{', '.join(part.name for part in parts)} differ in width: {sorted(widths)}")
    for part in parts:
        require(part.rows > 0, f"{part.name} has no rows")


def in_tiles(x: Tensor, tile: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Cuts the rows of x into tiles of exactly `tile` rows, the last one filled up with zeros.

    A matrix product on such a tile has the same shape whatever the number of rows, so a row's sum is formed in the
    same order whether it comes alone or among many.
    """
    for start in range(0, x.shape[0], tile):
        piece = x[start : start + tile]
        block = torch.zeros(tile, x.shape[1], dtype=dtype)
        block[: piece.shape[0]] = piece
        yield slice(start, start + piece.shape[0]), block
