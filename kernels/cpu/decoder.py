"""All layers of a decoder in one native call (`native/decoder.h`).

Owns: the descriptor of the layers, made once, and the memory that a step's rows go through. Must not know: other ops.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kernels.checks import check_decoder_step
from kernels.cpu.attention import NativeAttention, NativePlan, StepStruct, shape_struct
from kernels.cpu.library import FLOAT, INT, LONG, POINTER, Library, Team, Workspace
from kernels.cpu.pack import PanelMatrix
from kernels.ops import DecoderLayer, DecoderStep


class _LayerStruct(ctypes.Structure):
    _fields_ = [
        ("attention_norm", POINTER),
        ("qkv", POINTER),
        ("qkv_bias", POINTER),
        ("output", POINTER),
        ("output_bias", POINTER),
        ("mlp_norm", POINTER),
        ("gate_up", POINTER),
        ("down", POINTER),
    ]


class _DecoderStruct(ctypes.Structure):
    _fields_ = [("layers", POINTER), ("count", LONG), ("eps", FLOAT)]


class _StepStruct(ctypes.Structure):
    _fields_ = [
        ("attention", StepStruct),
        ("items", POINTER),
        ("item_count", LONG),
        ("rows", LONG),
        ("cos", POINTER),
        ("sin", POINTER),
        ("slots", POINTER),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class PanelDecoder:
    """The structures point into the tensors of `layers`, and to each other."""

    layers: tuple[DecoderLayer, ...]
    eps: float
    table: "ctypes.Array[_LayerStruct]"
    struct: _DecoderStruct


@dataclass(slots=True, eq=False)
class _Pages:
    """Pointers to the pages of all layers, made anew when other tensors come."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    key_pointers: "ctypes.Array[ctypes.c_void_p]"
    value_pointers: "ctypes.Array[ctypes.c_void_p]"


class NativeDecoder:
    def __init__(self, library: Library, team: Team, attention: NativeAttention) -> None:
        self._team = team
        self._attention = attention
        self._workspace = Workspace()
        self._pages: _Pages | None = None
        self._bytes = library.bind("tercet_decoder_bytes", LONG, POINTER, POINTER, INT, INT)
        self._run = library.bind("tercet_decoder", None, *[POINTER] * 7)

    def pack(self, layers: Sequence[DecoderLayer], eps: float) -> PanelDecoder | None:
        """None for layers that the native code does not run as a whole: none, or a panel with gate's and up's rows."""
        kept = tuple(_contiguous(layer) for layer in layers)
        structs = [struct for layer in kept if (struct := _layer_struct(layer)) is not None]
        if not kept or len(structs) < len(kept):
            return None
        table = (_LayerStruct * len(kept))(*structs)
        return PanelDecoder(kept, eps, table, _DecoderStruct(ctypes.addressof(table), len(kept), eps))

    def run(
        self,
        x: Tensor,
        decoder: PanelDecoder,
        k_pages: Sequence[Tensor],
        v_pages: Sequence[Tensor],
        step: DecoderStep,
        plan: NativePlan,
    ) -> Tensor:
        check_decoder_step(x, decoder, k_pages, v_pages, step)
        out = x.clone()
        shape = shape_struct(step.shape)
        rows = x.shape[0]
        native = _StepStruct(
            StepStruct(
                shape,
                plan.rows_struct,
                step.scale,
                merges=plan.merges.data_ptr(),
                partials=plan.partials.data_ptr(),
            ),
            plan.items.data_ptr(),
            plan.count,
            rows,
            step.cos.data_ptr(),
            step.sin.data_ptr(),
            step.slot_mapping.data_ptr(),
        )
        struct = ctypes.byref(decoder.struct)
        room = self._workspace.room(self._bytes(struct, ctypes.byref(shape), rows, self._team.threads))
        pages = self._pointers(k_pages, v_pages)
        self._run(
            self._team.handle,
            struct,
            ctypes.byref(native),
            pages.key_pointers,
            pages.value_pointers,
            out.data_ptr(),
            room,
        )
        return out

    def _pointers(self, k_pages: Sequence[Tensor], v_pages: Sequence[Tensor]) -> _Pages:
        pages = self._pages
        if pages is None or pages.keys is not k_pages or pages.values is not v_pages:
            keys, values = (_addresses(pages) for pages in (k_pages, v_pages))
            self._pages = pages = _Pages(k_pages, v_pages, keys, values)
        return pages


def _contiguous(layer: DecoderLayer) -> DecoderLayer:
    return replace(
        layer,
        attention_norm=layer.attention_norm.contiguous(),
        qkv_bias=None if layer.qkv_bias is None else layer.qkv_bias.contiguous(),
        output_bias=None if layer.output_bias is None else layer.output_bias.contiguous(),
        mlp_norm=layer.mlp_norm.contiguous(),
    )


def _layer_struct(layer: DecoderLayer) -> _LayerStruct | None:
    qkv, output, gate_up, down = layer.qkv, layer.output, layer.gate_up, layer.down
    if not (isinstance(qkv, PanelMatrix) and isinstance(output, PanelMatrix) and isinstance(down, PanelMatrix)):
        return None
    if not (isinstance(gate_up, PanelMatrix) and gate_up.gated):
        return None
    return _LayerStruct(
        layer.attention_norm.data_ptr(),
        qkv.address,
        _pointer(layer.qkv_bias),
        output.address,
        _pointer(layer.output_bias),
        layer.mlp_norm.data_ptr(),
        gate_up.address,
        down.address,
    )


def _pointer(vector: Tensor | None) -> int | None:
    return None if vector is None else vector.data_ptr()


def _addresses(pages: Sequence[Tensor]) -> "ctypes.Array[ctypes.c_void_p]":
    return (POINTER * len(pages))(*(page.data_ptr() for page in pages))
