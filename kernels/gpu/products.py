"""Launches of products: which tiles, whether split, with what at their end.

Owns: the checks right before a launch of what `device.linear` assumes. Must not know: models, file formats.
"""

from typing import Final

import torch
from torch import Tensor

from kernels.gpu.device.linear import linear_kernel, reduce_kernel
from kernels.gpu.launch import Launch
from kernels.gpu.pack import GpuMatrix, chunk_columns
from kernels.gpu.target import PANEL, SEGMENT_COLUMNS, SMALL_ROWS, Target
from kernels.ops import require

_REDUCE_BLOCK: Final = 1024


def can_gate(matrix: object) -> bool:
    """Whether gate and up of one matrix can be multiplied and gated in one kernel: each begins a panel."""
    return isinstance(matrix, GpuMatrix) and matrix.rows % (2 * PANEL) == 0


def product(
    target: Target,
    x: Tensor,
    matrix: GpuMatrix,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out_type: torch.dtype = torch.float32,
) -> Tensor:
    """x [T, cols] -> out_type [T, rows], gated [T, rows / 2]. x is rounded to the target's operand."""
    rows, n_out = x.shape[0], matrix.rows // 2 if gated else matrix.rows
    out = torch.empty(rows, n_out, dtype=out_type, device=target.device)
    if rows == 0:
        return out
    x = x.to(target.operand)
    x = x if x.stride(1) == 1 else x.contiguous()
    require(x.shape[1] == matrix.cols, f"x must be [T, {matrix.cols}], got {list(x.shape)}")
    require(not gated or can_gate(matrix), f"{matrix.rows} rows are no gate and up of whole panels")
    for name, tensor, shape in (("bias", bias, (n_out,)), ("residual", residual, (rows, n_out))):
        require(
            tensor is None or (tensor.shape == shape and tensor.dtype == torch.float32 and tensor.is_contiguous()),
            f"{name} must be float32 {list(shape)}, contiguous",
        )
    require(not (gated and bias is not None), "a gated product has no bias")
    for tensor in (x, matrix.w, bias, residual):
        require(tensor is None or tensor.device == target.device, f"a tensor is not on {target.device} but elsewhere")
    tiles = target.linear(matrix.kind, rows, n_out, gated=gated, affine=matrix.minimum is not None)
    grid = -(-n_out // tiles.block_n) * -(-rows // tiles.block_t)
    columns = chunk_columns(matrix.kind)
    segment = SEGMENT_COLUMNS // columns
    segments = -(-matrix.chunks // segment)
    split = segments > 1 and rows <= SMALL_ROWS and grid < target.splits_below(rows)
    partial = torch.empty(segments, rows, matrix.rows, dtype=torch.float32, device=target.device) if split else out
    target.launch(
        Launch(
            linear_kernel,
            (grid, segments if split else 1),
            {
                "x": x,
                "w": matrix.w,
                "scale": matrix.scale if matrix.scale is not None else matrix.w,
                "minimum": matrix.minimum if matrix.minimum is not None else matrix.w,
                "bias": bias if bias is not None else out,
                "residual": residual if residual is not None else out,
                "out": out,
                "partial": partial,
                "rows": rows,
                "cols": matrix.cols,
                "n_out": n_out,
                "n_filled": n_out if gated else matrix.n_filled,
                "chunks": matrix.chunks,
                "groups": matrix.groups,
                "x_row": x.stride(0),
                "KIND": matrix.kind,
                "ZERO": matrix.zero,
                "AFFINE": matrix.minimum is not None,
                "GROUP": matrix.group,
                "HAS_BIAS": bias is not None,
                "HAS_RESIDUAL": residual is not None,
                "GATED": gated,
                "SPLIT": split,
                "EVEN_K": matrix.cols % columns == 0,
                "OPERAND": target.operand_type,
                "SEGMENT": segment,
                "BLOCK_N": tiles.block_n,
                "BLOCK_T": tiles.block_t,
                "GROUP_T": tiles.group_t,
                "INTERPRET": target.interpret,
            },
            warps=tiles.warps,
            stages=tiles.stages,
        )
    )
    if split:
        target.launch(
            Launch(
                reduce_kernel,
                (rows, -(-n_out // _REDUCE_BLOCK)),
                {
                    "partial": partial,
                    "bias": bias if bias is not None else out,
                    "residual": residual if residual is not None else out,
                    "out": out,
                    "rows": rows,
                    "n_out": n_out,
                    "segments": segments,
                    "HAS_BIAS": bias is not None,
                    "HAS_RESIDUAL": residual is not None,
                    "GATED": gated,
                    "BLOCK": _REDUCE_BLOCK,
                    "INTERPRET": target.interpret,
                },
                warps=4,
            )
        )
    return out
