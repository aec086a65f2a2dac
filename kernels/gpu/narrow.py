"""W8A8: products of 8-bit weights with 8-bit activations, in int8 or e4m3, and how rows get their 8 bits.

Owns: the packed form, the checks right before the launches of `device.narrow`, their tiles. Must not know: models, file
formats.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from kernels.gpu.by_rows import next_power
from kernels.gpu.device.narrow import narrow_linear_kernel, narrow_norm_kernel, narrow_rows_kernel
from kernels.gpu.launch import Launch
from kernels.gpu.target import Target
from kernels.ops import require

CHUNK: Final = 128  # columns that one step of a product takes
FP8_ARCH: Final = 89  # the first that multiplies e4m3
KINDS: Final[Mapping[str, torch.dtype]] = MappingProxyType({"int8": torch.int8, "fp8": torch.float8_e4m3fn})
LARGEST: Final[Mapping[str, float]] = MappingProxyType({"int8": 127.0, "fp8": 448.0})
_MOST_COLS: Final = 1 << 16  # whose int8 products surely fit an int32 sum, and whose row one program holds


@dataclass(frozen=True, slots=True)
class NarrowRows:
    """kind: int8 or fp8. codes of that dtype [rows, cols filled up to chunks], scale float32 [rows]."""

    kind: str
    cols: int
    codes: Tensor
    scale: Tensor

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


def narrow_matrix(target: Target, codes: Tensor, scale: Tensor) -> NarrowRows:
    """Weights as a file has them: codes int8 or float8_e4m3fn [rows, cols], scale float32 [rows].

    Raises ValueError for other dtypes and shapes, and for fp8 on a target without it.
    """
    kinds = [kind for kind, dtype in KINDS.items() if dtype == codes.dtype]
    require(bool(kinds), f"codes must be int8 or float8_e4m3fn, got {codes.dtype}")
    check_kind(target, kinds[0])
    rows, cols = codes.shape
    require(scale.shape == (rows,) and scale.dtype == torch.float32, f"scale must be float32 [{rows}]")
    require(0 < cols <= _MOST_COLS, f"cols must be 1 to {_MOST_COLS}, got {cols}")
    filled = torch.zeros(rows, _up(cols), dtype=torch.uint8)
    filled[:, :cols] = codes.cpu().view(torch.uint8)
    return NarrowRows(kinds[0], cols, filled.view(codes.dtype).to(target.device), scale.contiguous().to(target.device))


def quantized_matrix(target: Target, weights: Tensor, kind: str) -> NarrowRows:
    """Weights float32 [rows, cols] to the nearest code, each row by its largest."""
    check_kind(target, kind)
    require(bool(weights.isfinite().all()), "weights must be finite to be quantized")
    size = weights.abs().amax(dim=1).clamp(min=1e-30)
    near = weights * (LARGEST[kind] / size)[:, None]
    codes = (near.round() if kind == "int8" else near).to(KINDS[kind])
    return narrow_matrix(target, codes, size / LARGEST[kind])


def check_kind(target: Target, kind: str) -> None:
    """Raises ValueError where the target has no such product."""
    require(kind in KINDS, f"kind must be one of {', '.join(KINDS)}, got {kind}")
    require(
        kind != "fp8" or target.interpret or target.arch >= FP8_ARCH,
        f"fp8 products need compute capability 8.9, this device has {target.arch / 10}; int8 products run there",
    )


def narrow_rows(target: Target, x: Tensor, kind: str) -> NarrowRows:
    """x float [rows, cols] in 8 bits, each row by its largest."""
    check_kind(target, kind)
    x = x if x.stride(1) == 1 else x.contiguous()
    made, arguments = _new_rows(target, x, kind)
    if x.shape[0]:
        warps = _warps(made)
        target.launch(Launch(narrow_rows_kernel, (x.shape[0],), {**arguments, "cols": x.shape[1]}, warps=warps))
    return made


def narrow_norm(target: Target, x: Tensor, weight: Tensor, eps: float, kind: str) -> NarrowRows:
    """RMSNorm of x float32 [rows, cols] by weight float32 [cols], in 8 bits. Raises ValueError for other shapes."""
    check_kind(target, kind)
    require(x.dtype == torch.float32, f"x must be float32, got {x.dtype}")
    cols = x.shape[1]
    require(weight.shape == (cols,) and weight.dtype == torch.float32, f"weight must be float32 [{cols}]")
    x = x if x.stride(1) == 1 else x.contiguous()
    made, arguments = _new_rows(target, x, kind)
    if x.shape[0]:
        warps = _warps(made)
        own = {"weight": weight.contiguous(), "eps": eps, "COLS": cols}
        target.launch(Launch(narrow_norm_kernel, (x.shape[0],), {**arguments, **own}, warps=warps))
    return made


def narrow_product(
    target: Target,
    x: NarrowRows,
    matrix: NarrowRows,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out_type: torch.dtype = torch.float32,
) -> Tensor:
    """-> out_type [x.rows, matrix.rows], gated [x.rows, matrix.rows / 2]: as `products.product`."""
    check_kind(target, matrix.kind)
    require(x.kind == matrix.kind, f"x is {x.kind}, the weights are {matrix.kind}")
    require(x.cols == matrix.cols, f"x must have {matrix.cols} columns, got {x.cols}")
    require(not gated or matrix.rows % 2 == 0, f"{matrix.rows} rows are no gate and up")
    require(not (gated and bias is not None), "a gated product has no bias")
    rows, n_out = x.rows, matrix.rows // 2 if gated else matrix.rows
    for name, tensor, shape in (("bias", bias, (n_out,)), ("residual", residual, (rows, n_out))):
        require(
            tensor is None or (tensor.shape == shape and tensor.dtype == torch.float32 and tensor.is_contiguous()),
            f"{name} must be float32 {list(shape)}, contiguous",
        )
    for tensor in (x.codes, matrix.codes, bias, residual):
        require(tensor is None or tensor.device == target.device, f"a tensor is not on {target.device} but elsewhere")
    out = torch.empty(rows, n_out, dtype=out_type, device=target.device)
    if rows == 0:
        return out
    tiles = target.narrow(rows, n_out, gated=gated)
    target.launch(
        Launch(
            narrow_linear_kernel,
            (-(-n_out // tiles.block_n) * -(-rows // tiles.block_t),),
            {
                "x": _codes(target, x),
                "x_scale": x.scale,
                "w": _codes(target, matrix),
                "w_scale": matrix.scale,
                "bias": bias if bias is not None else out,
                "residual": residual if residual is not None else out,
                "out": out,
                "rows": rows,
                "wide": matrix.codes.shape[1],
                "n_out": n_out,
                "KIND": matrix.kind,
                "HAS_BIAS": bias is not None,
                "HAS_RESIDUAL": residual is not None,
                "GATED": gated,
                "BLOCK_N": tiles.block_n,
                "BLOCK_T": tiles.block_t,
                "BLOCK_K": CHUNK,
                "GROUP_T": tiles.group_t,
                "INTERPRET": target.interpret,
            },
            warps=tiles.warps,
            stages=tiles.stages,
        )
    )
    return out


def _new_rows(target: Target, x: Tensor, kind: str) -> tuple[NarrowRows, dict[str, object]]:
    """Room for x in 8 bits, and the arguments that both kernels take."""
    rows, cols = x.shape
    require(0 < cols <= _MOST_COLS, f"cols must be 1 to {_MOST_COLS}, got {cols}")
    wide = _up(cols)
    codes = torch.empty(rows, wide, dtype=torch.uint8 if kind == "fp8" else torch.int8, device=target.device)
    scale = torch.empty(rows, dtype=torch.float32, device=target.device)
    made = NarrowRows(kind, cols, codes.view(KINDS[kind]), scale)
    arguments = {"x": x, "out": codes, "scale": scale, "x_row": x.stride(0), "wide": wide}
    return made, arguments | {"KIND": kind, "BLOCK": next_power(wide)}


def _warps(made: NarrowRows) -> int:
    return max(1, min(8, made.codes.shape[1] // 512))


def _codes(target: Target, rows: NarrowRows) -> Tensor:
    """The interpreter reads e4m3 from its bytes."""
    return rows.codes.view(torch.uint8) if target.interpret and rows.kind == "fp8" else rows.codes


def _up(cols: int) -> int:
    return -(-cols // CHUNK) * CHUNK
