"""4-bit matrices packed by columns, made word by word, and their exact values."""

from dataclasses import dataclass

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Columns:
    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    values: Tensor  # float32 [rows, cols]


def _word(halves: list[int]) -> int:
    word = sum(half << (4 * i) for i, half in enumerate(halves))
    return word - 2**32 if word >= 2**31 else word


def _parts(rows: int, cols: int, group: int, zero: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows + cols + group)
    q = torch.randint(0, 16, (rows, cols), generator=random)
    zeros = torch.randint(0, 16, (rows, cols // group), generator=random)
    zeros = zeros if zero is None else torch.full_like(zeros, zero)
    scales = ((torch.rand(rows, cols // group, generator=random) + 0.1) * cols**-0.5).half()
    wide = scales.float().repeat_interleave(group, dim=1)
    return q, zeros, scales, wide * (q - zeros.repeat_interleave(group, dim=1)).float()


def gptq(rows: int, cols: int, group: int, zero: int | None = None) -> Columns:
    q, zeros, scales, values = _parts(rows, cols, group, zero)
    qweight = [[_word(q[n, k : k + 8].tolist()) for n in range(rows)] for k in range(0, cols, 8)]
    stored = (zeros - 1) % 16
    qzeros = [[_word(stored[n : n + 8, g].tolist()) for n in range(0, rows, 8)] for g in range(cols // group)]
    return Columns(_int32(qweight), _int32(qzeros), scales.t().contiguous(), values)


def awq(rows: int, cols: int, group: int, zero: int | None = None) -> Columns:
    q, zeros, scales, values = _parts(rows, cols, group, zero)

    def line(values_of_rows: list[int]) -> list[int]:
        return [_word([values_of_rows[n + place] for place in AWQ_ORDER]) for n in range(0, rows, 8)]

    qweight = [line(q[:, k].tolist()) for k in range(cols)]
    qzeros = [line(zeros[:, g].tolist()) for g in range(cols // group)]
    return Columns(_int32(qweight), _int32(qzeros), scales.t().contiguous(), values)


def _int32(words: list[list[int]]) -> Tensor:
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)
