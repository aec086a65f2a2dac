"""The GPU back end: Triton kernels.

Owns: which kernel computes an op, and what lies between kernels inside a composite. Must not know: models, requests,
file formats.
Results are float32, as the contract says. Where a result of one kernel only feeds a product, it is rounded to the
product's operand (bfloat16) when it is written, which is the rounding the product would do: the bits are the same.
Tensors may come from the CPU; they go to the device first.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from kernels.checks import check_linear, check_paged_rows
from kernels.gpu import attention, by_rows, draws
from kernels.gpu.device.rope import cache_write_kernel, rope_cache_kernel
from kernels.gpu.device.rows import embedding_kernel
from kernels.gpu.free import free_bytes
from kernels.gpu.launch import Launch
from kernels.gpu.pack import GpuMatrix, StackedMatrix, pack
from kernels.gpu.pages import PAGE_FORMATS, PageFormat
from kernels.gpu.products import can_gate, product
from kernels.gpu.target import Target
from kernels.gpu.variants import SIZE_CLASSES, Variants
from kernels.ops import (
    AttentionPlan,
    AttentionShape,
    DecoderLayer,
    DecoderStep,
    DecodeWork,
    Ops,
    PackedDecoder,
    PackedMatrix,
    PagedRows,
    PlainDecoder,
    StoredMatrix,
    require,
)
from kernels.sampling import Drawn, Greedy, SampledSequence


class GpuOps(Ops):
    name = "gpu"
    deterministic = True

    def __init__(self, target: Target, pages: PageFormat = PAGE_FORMATS["bf16"]) -> None:
        self.target = target
        self.pages = pages
        self.kv_dtype = pages.dtype
        self.kv_format = pages.name
        self._variants = target.launch if isinstance(target.launch, Variants) else None

    def instruction_set(self) -> str:
        where = "interpreter" if self.target.interpret else f"sm_{self.target.arch}"
        return f"{where} triton={triton.__version__} operand={self.target.operand} pages={self.pages.name}"

    def pack(self, parts: Sequence[StoredMatrix], *, lookup: bool) -> PackedMatrix:
        return pack(parts, self.target.device)

    def pack_decoder(self, layers: Sequence[DecoderLayer], eps: float) -> PackedDecoder:
        def here(vector: Tensor | None) -> Tensor | None:
            return None if vector is None else self._here(vector)

        moved = [
            DecoderLayer(
                attention_norm=self._here(layer.attention_norm),
                qkv=layer.qkv,
                qkv_bias=here(layer.qkv_bias),
                output=layer.output,
                output_bias=here(layer.output_bias),
                mlp_norm=self._here(layer.mlp_norm),
                gate_up=layer.gate_up,
                down=layer.down,
            )
            for layer in layers
        ]
        return PlainDecoder(tuple(moved), eps)

    def resident(self, tensor: Tensor) -> Tensor:
        return self._here(tensor)

    def page(self, shape: AttentionShape) -> tuple[int, int, int]:
        return self.pages.page(shape.block_size, shape.kv_heads, shape.head_dim)

    def page_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.target.device)

    def size_classes(self) -> tuple[int, ...]:
        return SIZE_CLASSES

    def prepared(self) -> None:
        if self._variants is not None:
            self._variants.seal()

    def late(self) -> int:
        return 0 if self._variants is None else len(self._variants.late)

    def free_memory(self) -> int | None:
        return free_bytes(self.target.device)

    def workspace_bytes(self, shape: AttentionShape, max_rows: int, max_sequences: int, max_model_len: int) -> int:
        return attention.workspace_bytes(self.target, shape, max_rows, max_sequences, max_model_len)

    # -- primitives ---------------------------------------------------------------------------------------------------

    def linear(self, x: Tensor, weight: PackedMatrix, bias: Tensor | None = None) -> Tensor:
        check_linear(x, weight, bias)
        return self._linear(self._here(x), weight, bias)

    def embedding(self, token_ids: Tensor, weight: PackedMatrix) -> Tensor:
        require(isinstance(weight, GpuMatrix), "rows of a fused matrix of several formats are not looked up")
        assert isinstance(weight, GpuMatrix)
        ids = self._here(token_ids)
        require(ids.dtype == torch.int64, f"token_ids must be int64, got {ids.dtype}")
        out = self._new(ids.shape[0], weight.cols)
        self.target.launch(
            Launch(
                embedding_kernel,
                (ids.shape[0], -(-weight.cols // by_rows.BLOCK_COLS)),
                {
                    "ids": ids.contiguous(),
                    "w": weight.w,
                    "scale": weight.scale if weight.scale is not None else weight.w,
                    "minimum": weight.minimum if weight.minimum is not None else weight.w,
                    "out": out,
                    "cols": weight.cols,
                    "chunks": weight.chunks,
                    "groups": weight.groups,
                    "KIND": weight.kind,
                    "ZERO": weight.zero,
                    "AFFINE": weight.minimum is not None,
                    "GROUP": weight.group,
                    "BLOCK": by_rows.BLOCK_COLS,
                },
                warps=4,
                fused=False,
            )
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, weight, eps, torch.float32)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return by_rows.silu_mul(self.target, self._here(gate_up), torch.float32)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self._here(x)
        shape = AttentionShape(heads=x.shape[1], kv_heads=1, head_dim=x.shape[2], block_size=1)
        return self._rope(x, cos, sin, None, shape, kv_heads=0)

    def cache_write(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor) -> None:
        k, v, slots = self._here(k), self._here(v), self._here(slot_mapping)
        rows, heads, head_dim = k.shape
        require(k.shape == v.shape, f"k is {list(k.shape)}, v is {list(v.shape)}")
        require(k.stride(2) == 1 and v.stride(2) == 1, "k and v must be contiguous in their last axis")
        block_size = k_pages.shape[1]
        self._check_pages(k_pages, v_pages, slots, rows, block_size, heads, head_dim)
        if rows == 0:
            return
        self.target.launch(
            Launch(
                cache_write_kernel,
                (-(-rows * heads // self.target.lines),),
                {
                    "k": k,
                    "v": v,
                    "k_pages": k_pages,
                    "v_pages": v_pages,
                    "slots": slots,
                    "rows": rows,
                    "k_row": k.stride(0),
                    "k_head": k.stride(1),
                    "v_row": v.stride(0),
                    "v_head": v.stride(1),
                    "KV_HEADS": heads,
                    "HEAD_DIM": head_dim,
                    "BLOCK_SIZE": block_size,
                    "BLOCK_BYTES": self.pages.block_bytes(block_size, heads, head_dim),
                    "KV_KIND": self.pages.kind,
                    "HALF": by_rows.next_power(head_dim // 2),
                    "BLOCK": self.target.lines,
                    "INTERPRET": self.target.interpret,
                },
                warps=4,
            )
        )

    def plan_attention(self, rows: PagedRows, shape: AttentionShape) -> AttentionPlan:
        check_paged_rows(rows, shape)
        return attention.plan(self.target, rows, shape)

    def plan_decode(self, work: DecodeWork, shape: AttentionShape) -> AttentionPlan:
        return attention.GpuPlan(
            rows=work.rows,
            shape=shape,
            window=0,
            items=work.items,
            merges=work.merges,
            tables=work.rows.block_tables,
            parts=work.parts,
        )

    def paged_attention(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: AttentionPlan, shape: AttentionShape, scale: float
    ) -> Tensor:
        return self._attend(q, k_pages, v_pages, plan, shape, scale, torch.float32)

    # -- composites ---------------------------------------------------------------------------------------------------

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: PackedMatrix, bias: Tensor | None = None
    ) -> Tensor:
        check_linear(x, weight, bias)
        return self._linear(self._norm(x, norm, eps, self.target.operand), weight, bias)

    def rope_and_cache(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        slot_mapping: Tensor,
        shape: AttentionShape,
    ) -> Tensor:
        x = self._here(qkv).view(qkv.shape[0], shape.heads + 2 * shape.kv_heads, shape.head_dim)
        slots = self._here(slot_mapping)
        self._check_pages(k_pages, v_pages, slots, qkv.shape[0], shape.block_size, shape.kv_heads, shape.head_dim)
        return self._rope(x, cos, sin, (k_pages, v_pages, slots), shape, kv_heads=shape.kv_heads)

    def linear_residual(self, x: Tensor, weight: PackedMatrix, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        check_linear(x, weight, bias)
        return self._linear(self._here(x), weight, bias, self._here(residual))

    def gated_mlp(self, x: Tensor, norm: Tensor, eps: float, gate_up: PackedMatrix, down: PackedMatrix) -> Tensor:
        x = self._here(x)
        normed = self._norm(x, norm, eps, self.target.operand)
        return self._linear(self._gated(normed, gate_up), down, None, x)

    def decoder_layer(
        self, x: Tensor, layer: DecoderLayer, eps: float, k_pages: Tensor, v_pages: Tensor, step: DecoderStep
    ) -> Tensor:
        shape = step.shape
        qkv = self.norm_linear(x, layer.attention_norm, eps, layer.qkv, layer.qkv_bias)
        q = self.rope_and_cache(qkv, step.cos, step.sin, k_pages, v_pages, step.slot_mapping, shape)
        attended = self._attend(q, k_pages, v_pages, step.plan, shape, step.scale, self.target.operand)
        x = self._linear(attended.flatten(1), layer.output, layer.output_bias, self._here(x))
        return self.gated_mlp(x, layer.mlp_norm, eps, layer.gate_up, layer.down)

    def decoder(
        self,
        x: Tensor,
        decoder: PackedDecoder,
        k_pages: Sequence[Tensor],
        v_pages: Sequence[Tensor],
        step: DecoderStep,
    ) -> Tensor:
        here = DecoderStep(
            cos=self._here(step.cos).contiguous(),
            sin=self._here(step.sin).contiguous(),
            slot_mapping=self._here(step.slot_mapping),
            plan=step.plan,
            shape=step.shape,
            scale=step.scale,
        )
        return super().decoder(self._here(x), decoder, k_pages, v_pages, here)

    def head_greedy(self, x: Tensor, norm: Tensor, eps: float, head: PackedMatrix) -> Greedy:
        return draws.greedy(self.target, self.head_logits(x, norm, eps, head))

    def sample(self, logits: Tensor, sequences: Sequence[SampledSequence]) -> list[Drawn]:
        logits = self._here(logits)
        orders = draws.orders_of(sequences, logits.shape[1]).to(self.target.device)
        return draws.draw(self.target, logits, orders).read(sequences)

    # -- kernels ------------------------------------------------------------------------------------------------------

    def _norm(self, x: Tensor, weight: Tensor, eps: float, out_type: torch.dtype) -> Tensor:
        return by_rows.rms_norm(self.target, self._here(x), self._here(weight).contiguous(), eps, out_type)

    def _linear(
        self, x: Tensor, weight: PackedMatrix, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x float32 or the operand's type."""
        bias = None if bias is None else self._here(bias).contiguous()
        residual = None if residual is None else residual.contiguous()
        if isinstance(weight, GpuMatrix):
            return product(self.target, x, weight, bias=bias, residual=residual)
        if not isinstance(weight, StackedMatrix):
            raise ValueError(f"a {type(weight).__name__} was packed for another back end")
        pieces, at = [], 0
        for part in weight.parts:
            columns = slice(at, at + part.rows)
            own = None if bias is None else bias[columns]
            kept = None if residual is None else residual[:, columns].contiguous()
            pieces.append(product(self.target, x, part, bias=own, residual=kept))
            at = columns.stop
        return torch.cat(pieces, dim=1)

    def _gated(self, normed: Tensor, gate_up: PackedMatrix) -> Tensor:
        """silu(gate) * up, in the operand's type."""
        if isinstance(gate_up, GpuMatrix) and can_gate(gate_up):
            return product(self.target, normed, gate_up, gated=True, out_type=self.target.operand)
        return by_rows.silu_mul(self.target, self._linear(normed, gate_up), self.target.operand)

    def _rope(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: tuple[Tensor, Tensor, Tensor] | None,
        shape: AttentionShape,
        *,
        kv_heads: int,
    ) -> Tensor:
        rows = x.shape[0]
        cos, sin = self._here(cos).contiguous(), self._here(sin).contiguous()
        require(x.dtype == torch.float32 and x.stride(2) == 1, "x must be float32, contiguous in its last axis")
        for name, tensor in (("cos", cos), ("sin", sin)):
            require(
                tensor.shape == (rows, shape.head_dim // 2) and tensor.dtype == torch.float32,
                f"{name} must be float32 [{rows}, {shape.head_dim // 2}]",
            )
        out = self._new(rows, shape.heads, shape.head_dim)
        if rows == 0:
            return out
        k_pages, v_pages, slots = cache if cache is not None else (out, out, out)
        self.target.launch(
            Launch(
                rope_cache_kernel,
                (-(-rows * (shape.heads + 2 * kv_heads) // self.target.lines),),
                {
                    "x": x,
                    "cos": cos,
                    "sin": sin,
                    "q_out": out,
                    "k_pages": k_pages,
                    "v_pages": v_pages,
                    "slots": slots,
                    "rows": rows,
                    "x_row": x.stride(0),
                    "x_head": x.stride(1),
                    "HEADS": shape.heads,
                    "KV_HEADS": kv_heads,
                    "HEAD_DIM": shape.head_dim,
                    "BLOCK_SIZE": shape.block_size,
                    "BLOCK_BYTES": self.pages.block_bytes(shape.block_size, kv_heads, shape.head_dim),
                    "KV_KIND": self.pages.kind,
                    "HALF": by_rows.next_power(shape.head_dim // 2),
                    "BLOCK": self.target.lines,
                    "INTERPRET": self.target.interpret,
                },
                warps=4,
            )
        )
        return out

    def _attend(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        plan: AttentionPlan,
        shape: AttentionShape,
        scale: float,
        out_type: torch.dtype,
    ) -> Tensor:
        if not isinstance(plan, attention.GpuPlan):
            raise ValueError(f"a {type(plan).__name__} was made by another back end")
        require(plan.shape == shape, f"the plan is for {plan.shape}, not {shape}")
        expected = (int(plan.rows.query_start[-1]), shape.heads, shape.head_dim)
        require(
            q.shape == expected and q.dtype == torch.float32,
            f"q must be float32 {list(expected)}, got {q.dtype} {list(q.shape)}",
        )
        q = self._here(q).contiguous()
        return attention.attend(
            self.target, q, k_pages, v_pages, plan, self.pages, scale, attention.NO_EXTRAS, out_type
        )

    def _check_pages(
        self, k_pages: Tensor, v_pages: Tensor, slots: Tensor, rows: int, block_size: int, heads: int, head_dim: int
    ) -> None:
        require(k_pages.shape == v_pages.shape, "k_pages and v_pages must have one shape")
        for name, tensor in (("k_pages", k_pages), ("v_pages", v_pages)):
            self.pages.check(tensor, block_size, heads, head_dim, name)
        require(
            slots.shape == (rows,) and slots.dtype == torch.int64 and slots.is_contiguous(),
            f"slot_mapping must be int64 [{rows}]",
        )

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.target.device)

    def _new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.target.device)
