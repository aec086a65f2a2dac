"""Random weight matrices in every stored format, and their exact values."""

import numpy as np
import torch
from torch import Tensor

from executor.loading.ggml_types import BLOCKS, GgmlType
from executor.quant.ggml import dequantize
from executor.quant.native import stored_matrix
from kernels.ops import StoredMatrix

# Where in its block each quantized format keeps its float16 scales and minimums.
_HALVES = {
    GgmlType.Q4_0: (0,),
    GgmlType.Q4_1: (0, 2),
    GgmlType.Q5_0: (0,),
    GgmlType.Q5_1: (0, 2),
    GgmlType.Q8_0: (0,),
    GgmlType.Q4_K: (0, 2),
    GgmlType.Q5_K: (0, 2),
    GgmlType.Q6_K: (208,),
}
_SPREAD = {GgmlType.Q8_0: 1 / 16, GgmlType.Q4_K: 1 / 32, GgmlType.Q5_K: 1 / 64, GgmlType.Q6_K: 1 / 1024}


def random_blocks(kind: GgmlType, rows: int, cols: int, seed: int) -> Tensor:
    """uint8 [rows, row_bytes] whose weights are of a size that a network could have."""
    rng = np.random.default_rng(seed)
    if kind not in _HALVES:
        values = torch.from_numpy(rng.normal(0, cols**-0.5, (rows, cols)).astype(np.float32))
        dtype = {GgmlType.F32: torch.float32, GgmlType.F16: torch.float16, GgmlType.BF16: torch.bfloat16}[kind]
        return values.to(dtype).view(torch.uint8).view(rows, -1)
    block = BLOCKS[kind]
    raw = rng.integers(0, 256, (rows, cols // block.elements, block.bytes), dtype=np.uint8)
    for at in _HALVES[kind]:
        halves = (rng.uniform(-0.2, 0.2, raw.shape[:2]) * cols**-0.5 * _SPREAD.get(kind, 1)).astype("<f2")
        raw[..., at : at + 2] = halves[..., None].view(np.uint8)
    return torch.from_numpy(raw.reshape(rows, -1))


def random_matrix(kind: GgmlType, rows: int, cols: int, seed: int = 0) -> StoredMatrix:
    return stored_matrix(f"{kind.name}-{rows}x{cols}", random_blocks(kind, rows, cols, seed), kind, cols)


def values_of(*parts: StoredMatrix) -> Tensor:
    """float32 [rows, cols]."""
    return torch.cat([part.dequantize(part.blocks) for part in parts])


def f32_matrix(values: Tensor) -> StoredMatrix:
    blocks = values.contiguous().view(torch.uint8).view(values.shape[0], -1)
    assert torch.equal(dequantize(blocks, GgmlType.F32), values)
    return stored_matrix("dense", blocks, GgmlType.F32, values.shape[1])
