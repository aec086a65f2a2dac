"""The CPU back end: native kernels and a team of threads.

Owns: which native function computes an op, and the memory they work in. Must not know: models, requests, file formats.
Activations of integer matrices are rounded to 8 or 16 bits with a scale for each span of columns
(`native/activations.h`); all sums are float32. Pages are bfloat16, laid out for attention (`native/pages.h`). A row's
bits depend on that row alone, whatever the number of rows or threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.checks import check_linear, check_paged_rows, check_pages, check_queries
from kernels.cpu.attention import NativeAttention, NativePlan
from kernels.cpu.decoder import NativeDecoder, PanelDecoder
from kernels.cpu.head import NativeHead
from kernels.cpu.library import FLOAT, INT, LONG, POINTER, Library, Native, Team, Workspace
from kernels.cpu.pack import ACTIVATIONS, Packer, PanelMatrix
from kernels.cpu.sampling import Sampler
from kernels.ops import (
    AttentionPlan,
    AttentionShape,
    DecoderLayer,
    DecoderStep,
    Ops,
    PackedDecoder,
    PackedMatrix,
    PagedRows,
    PlainDecoder,
    StoredMatrix,
    require,
)
from kernels.sampling import Drawn, Greedy, SampledSequence


class CpuOps(Ops):
    """One call at a time: they share the team and its memory. activations: a name of `pack.ACTIVATIONS`."""

    name = "cpu"
    deterministic = True
    kv_dtype = torch.bfloat16
    kv_format = "bf16"

    def __init__(self, library: Library, team: Team, activations: str) -> None:
        self._isa = f"{library.isa.name} {library.digest} {activations}"
        self._team = team
        self._workspace = Workspace()
        self._packer = Packer(library, ACTIVATIONS[activations])
        self._attention = NativeAttention(library, team)
        self._decoder = NativeDecoder(library, team, self._attention)
        self._head = NativeHead(library, team)
        self._sampler = Sampler(library, team)
        self._functions = _Functions.of(library)

    def instruction_set(self) -> str:
        return self._isa

    def pack(self, parts: Sequence[StoredMatrix], *, lookup: bool) -> PanelMatrix:
        return self._packer.pack(parts)

    def pack_decoder(self, layers: Sequence[DecoderLayer], eps: float) -> PackedDecoder:
        packed = self._decoder.pack(layers, eps)
        return PlainDecoder(tuple(layers), eps) if packed is None else packed

    def workspace_bytes(self, shape: AttentionShape, max_rows: int, max_sequences: int, max_model_len: int) -> int:
        # The rows themselves go through memory that the model counts as activations. What long contexts add, states of
        # pieces of keys, is less than half of what one layer's pages hold of them.
        return self._attention.scratch_bytes(shape) + 64 * shape.kv_heads * (max_rows + max_sequences)

    def linear(self, x: Tensor, weight: PackedMatrix, bias: Tensor | None = None) -> Tensor:
        return self._linear(x, weight, bias, None)

    def embedding(self, token_ids: Tensor, weight: PackedMatrix) -> Tensor:
        matrix, ids = _panels(weight), token_ids.contiguous()
        out = torch.empty(ids.shape[0], matrix.cols)
        self._functions.decode_rows(self._team.handle, matrix.address, ids.data_ptr(), ids.shape[0], out.data_ptr())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight, out = x.contiguous(), weight.contiguous(), torch.empty(x.shape)
        self._functions.rms_norm(self._team.handle, x.data_ptr(), weight.data_ptr(), eps, *x.shape, out.data_ptr())
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, both = gate_up.shape
        gate_up, out = gate_up.contiguous(), torch.empty(rows, both // 2)
        self._functions.silu_mul(self._team.handle, gate_up.data_ptr(), rows, both // 2, out.data_ptr())
        return out

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x, cos, sin, out = x.contiguous(), cos.contiguous(), sin.contiguous(), torch.empty(x.shape)
        pointers = (x.data_ptr(), cos.data_ptr(), sin.data_ptr())
        self._functions.rope(self._team.handle, *pointers, *x.shape, out.data_ptr())
        return out

    def cache_write(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor) -> None:
        check_pages(k, v, k_pages, v_pages, slot_mapping)
        self._attention.cache_write(k, v, k_pages, v_pages, slot_mapping)

    def plan_attention(self, rows: PagedRows, shape: AttentionShape) -> AttentionPlan:
        check_paged_rows(rows, shape)
        return self._attention.plan(rows, shape)

    def paged_attention(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: AttentionPlan, shape: AttentionShape, scale: float
    ) -> Tensor:
        native = _plan(plan)
        check_queries(q, k_pages, v_pages, native.rows, shape)
        return self._attention.attend(q.contiguous(), k_pages, v_pages, native, shape, scale)

    def linear_residual(self, x: Tensor, weight: PackedMatrix, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._linear(x, weight, bias, residual)

    def decoder(
        self,
        x: Tensor,
        decoder: PackedDecoder,
        k_pages: Sequence[Tensor],
        v_pages: Sequence[Tensor],
        step: DecoderStep,
    ) -> Tensor:
        if not isinstance(decoder, PanelDecoder):
            return super().decoder(x, decoder, k_pages, v_pages, step)
        return self._decoder.run(x, decoder, k_pages, v_pages, step, _plan(step.plan))

    def head_greedy(self, x: Tensor, norm: Tensor, eps: float, head: PackedMatrix) -> Greedy:
        return self._head.greedy(x, norm, eps, _panels(head))

    def sample(self, logits: Tensor, sequences: Sequence[SampledSequence]) -> list[Drawn]:
        return self._sampler.sample(logits, sequences)

    def _linear(self, x: Tensor, weight: PackedMatrix, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        matrix = _panels(weight)
        check_linear(x, matrix, bias)
        shape = (x.shape[0], matrix.rows)
        require(residual is None or residual.shape == shape, f"residual must be {list(shape)}")
        x = x if x.stride(1) == 1 else x.contiguous()
        others = [None if one is None else one.contiguous() for one in (bias, residual)]
        scratch = self._workspace.room(self._functions.quantized_bytes(*x.shape, matrix.planes))
        out = torch.empty(shape)
        self._functions.linear(
            self._team.handle,
            matrix.address,
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            *(None if one is None else one.data_ptr() for one in others),
            out.data_ptr(),
            scratch,
        )
        return out


@dataclass(frozen=True, slots=True)
class _Functions:
    rms_norm: Native
    silu_mul: Native
    rope: Native
    decode_rows: Native
    quantized_bytes: Native
    linear: Native

    @staticmethod
    def of(library: Library) -> "_Functions":
        return _Functions(
            rms_norm=library.bind("tercet_rms_norm", None, *[POINTER] * 3, FLOAT, INT, INT, POINTER),
            silu_mul=library.bind("tercet_silu_mul", None, POINTER, POINTER, INT, INT, POINTER),
            rope=library.bind("tercet_rope", None, *[POINTER] * 4, INT, INT, INT, POINTER),
            decode_rows=library.bind("tercet_decode_rows", None, *[POINTER] * 3, INT, POINTER),
            quantized_bytes=library.bind("tercet_quantized_bytes", LONG, INT, INT, INT),
            linear=library.bind("tercet_linear", None, *[POINTER] * 3, LONG, INT, *[POINTER] * 4),
        )


def _panels(weight: PackedMatrix) -> PanelMatrix:
    if not isinstance(weight, PanelMatrix):
        raise ValueError(f"a {type(weight).__name__} was packed for another back end")
    return weight


def _plan(plan: AttentionPlan) -> NativePlan:
    if not isinstance(plan, NativePlan):
        raise ValueError(f"a {type(plan).__name__} was made by another back end")
    return plan
