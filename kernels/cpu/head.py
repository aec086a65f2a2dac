"""The likeliest tokens of a few rows, without their logits (`native/head.h`).

Owns: the call and its memory. Must not know: other ops.
"""

import torch
from torch import Tensor

from kernels.checks import check_linear
from kernels.cpu.library import FLOAT, INT, LONG, POINTER, Library, Team, Workspace
from kernels.cpu.pack import PanelMatrix
from kernels.ops import require
from kernels.sampling import Greedy


class NativeHead:
    """Not for two threads at a time."""

    def __init__(self, library: Library, team: Team) -> None:
        self._team = team
        self._workspace = Workspace()
        self._bytes = library.bind("tercet_head_bytes", LONG, POINTER, INT, INT)
        self._greedy = library.bind(
            "tercet_head_greedy", None, *[POINTER] * 3, LONG, INT, POINTER, FLOAT, *[POINTER] * 3
        )

    def greedy(self, x: Tensor, norm: Tensor, eps: float, head: PanelMatrix) -> Greedy:
        check_linear(x, head, None)
        rows, cols = x.shape
        require(rows >= 1, "there are no rows")
        require(norm.shape == (cols,) and norm.dtype == torch.float32, f"norm must be float32 [{cols}]")
        x, norm = x if x.stride(1) == 1 else x.contiguous(), norm.contiguous()
        found = Greedy(torch.empty(rows, dtype=torch.int64), torch.empty(rows))
        self._greedy(
            self._team.handle,
            head.address,
            x.data_ptr(),
            x.stride(0),
            rows,
            norm.data_ptr(),
            eps,
            found.token_ids.data_ptr(),
            found.highest.data_ptr(),
            self._workspace.room(self._bytes(head.address, rows, self._team.threads)),
        )
        return found
