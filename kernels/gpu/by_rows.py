"""Launches of the kernels that work on each row by itself: the norm, the gated activation.

Owns: what these kernels assume, checked right before the launch. Tensors lie on the target's device.
"""

from typing import Final

import torch
from torch import Tensor

from kernels.gpu.device.rows import rms_norm_kernel, silu_mul_kernel
from kernels.gpu.launch import Launch
from kernels.gpu.target import Target
from kernels.ops import require

BLOCK_COLS: Final = 1024


def rms_norm(target: Target, x: Tensor, weight: Tensor, eps: float, out_type: torch.dtype) -> Tensor:
    """x float32 [rows, cols], weight float32 [cols] -> out_type [rows, cols]. Raises ValueError for other shapes."""
    rows, cols = x.shape
    require(x.dtype == torch.float32, f"x must be float32, got {x.dtype}")
    require(weight.shape == (cols,) and weight.dtype == torch.float32, f"weight must be float32 [{cols}]")
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(rows, cols, dtype=out_type, device=target.device)
    if rows:
        block = next_power(cols)
        target.launch(
            Launch(
                rms_norm_kernel,
                (rows,),
                {
                    "x": x,
                    "weight": weight,
                    "out": out,
                    "x_stride": x.stride(0),
                    "eps": eps,
                    "COLS": cols,
                    "BLOCK": block,
                    "INTERPRET": target.interpret,
                },
                warps=max(1, min(8, block // 512)),
            )
        )
    return out


def silu_mul(target: Target, gate_up: Tensor, out_type: torch.dtype) -> Tensor:
    """gate_up float32 [rows, 2 * inner] -> out_type [rows, inner]. Raises ValueError for another dtype."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    require(gate_up.dtype == torch.float32, f"gate_up must be float32, got {gate_up.dtype}")
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    out = torch.empty(rows, inner, dtype=out_type, device=target.device)
    if rows:
        target.launch(
            Launch(
                silu_mul_kernel,
                (rows, -(-inner // BLOCK_COLS)),
                {
                    "gate_up": gate_up,
                    "out": out,
                    "stride": gate_up.stride(0),
                    "inner": inner,
                    "BLOCK": BLOCK_COLS,
                    "INTERPRET": target.interpret,
                },
                warps=4,
            )
        )
    return out


def next_power(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
