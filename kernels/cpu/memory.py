"""Memory for what a step reads from end to end: weights, which are cut from large mappings."""

from typing import Final

import torch
from torch import Tensor

from kernels.memory import large_pages

_MAPPING_BYTES: Final = 32 << 20
_LINE: Final = 64


class WeightMemory:
    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """uint8 [size], zeros, aligned to a cache line. It lives as long as the tensor."""
        filled = -(-size // _LINE) * _LINE
        if filled > self._free.shape[0]:
            self._free = large_pages(max(filled, _MAPPING_BYTES))
        taken, self._free = self._free[:size], self._free[filled:]
        return taken
