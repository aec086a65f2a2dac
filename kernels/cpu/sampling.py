"""Draws by the native library: one call for all rows of a step.

Owns: what the library is told about each row (`native/draw.h: DrawOrder, DrawResult`). Must not know: models, slots.
Invariant: the same results as `kernels.sampling.sample`, bit for bit.
"""

import ctypes
import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels.cpu.library import LONG, POINTER, Library, Team
from kernels.ops import require
from kernels.sampling import Drawn, Fault, Logprobs, SampledSequence, total_logit

_ORDER: Final = struct.Struct("=Qqq QQq Qq Qq ddd ddd q Qqq qQQ")
_RESULT: Final = struct.Struct("=qq dd qq")
_FAULTS: Final = {1: Fault.NOT_FINITE, 2: Fault.NOTHING_ALLOWED}


class Sampler:
    """Not for two threads at a time."""

    def __init__(self, library: Library, team: Team) -> None:
        self._team = team
        self._draw = library.bind("tercet_draw", None, POINTER, POINTER, LONG, LONG, POINTER, POINTER, POINTER)
        self._space_bytes = library.bind("tercet_draw_space_bytes", LONG, LONG)
        self._space = torch.empty(0, dtype=torch.uint8)
        self._vocab = 0  # that the space was made for

    def workspace_bytes(self, vocab: int) -> int:
        return self._team.threads * int(self._space_bytes(vocab))

    def sample(self, logits: Tensor, sequences: Sequence[SampledSequence]) -> list[Drawn]:
        """logits float32 [rows, V], contiguous, row i of sequence i."""
        rows, vocab = logits.shape
        require(logits.dtype == torch.float32 and logits.is_contiguous(), "logits must be float32 and contiguous")
        require(rows == len(sequences), f"{rows} rows of logits are not of {len(sequences)} sequences")
        if vocab != self._vocab:
            self._space, self._vocab = torch.zeros(self.workspace_bytes(vocab), dtype=torch.uint8), vocab
        orders = ctypes.create_string_buffer(_ORDER.size * rows)
        results = ctypes.create_string_buffer(_RESULT.size * rows)
        lists = [_lists(sequence, vocab) for sequence in sequences]
        for row, (sequence, arrays) in enumerate(zip(sequences, lists, strict=True)):
            _write(orders, row * _ORDER.size, sequence, arrays)
        self._draw(self._team.handle, logits.data_ptr(), vocab, rows, orders, results, self._space.data_ptr())
        fields = _RESULT.iter_unpack(results)
        return [_read(each, sequence, arrays) for each, sequence, arrays in zip(fields, sequences, lists, strict=True)]


@dataclass(frozen=True, slots=True)
class _Lists:
    """What an order points at, of those that are mostly empty."""

    bias_ids: "array[int]"  # "i"
    biases: "array[float]"  # "f"
    banned_ids: "array[int]"
    top_ids: "array[int]"  # written by the library
    top_logits: "array[float]"


_NO_INTS: Final = array("i")
_NO_FLOATS: Final = array("f")
_NO_LISTS: Final = _Lists(_NO_INTS, _NO_FLOATS, _NO_INTS, _NO_INTS, _NO_FLOATS)


def _lists(sequence: SampledSequence, vocab: int) -> _Lists:
    sampling = sequence.sampling
    bans = sequence.bans_stops
    if not sampling.logit_bias and not bans and not sampling.logprobs:
        return _NO_LISTS
    top = bytes(4 * min(sampling.logprobs or 0, vocab))
    return _Lists(
        array("i", [token_id for token_id, _ in sampling.logit_bias]),
        array("f", [bias for _, bias in sampling.logit_bias]),
        array("i", sampling.stop_token_ids if bans else ()),
        array("i", top),
        array("f", top),
    )


def _write(orders: "ctypes.Array[ctypes.c_char]", offset: int, sequence: SampledSequence, arrays: _Lists) -> None:
    sampling = sequence.sampling
    tokens, token_count = sequence.tokens.buffer_info()
    mask, mask_words = (0, -1) if sequence.mask is None else sequence.mask.buffer_info()
    _ORDER.pack_into(
        orders,
        offset,
        tokens,
        token_count,
        sequence.prompt_len,
        arrays.bias_ids.buffer_info()[0],
        arrays.biases.buffer_info()[0],
        len(arrays.biases),
        arrays.banned_ids.buffer_info()[0],
        len(arrays.banned_ids),
        mask,
        mask_words,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.temperature,
        sampling.top_p,
        math.log(sampling.min_p) if sampling.min_p else -math.inf,
        sampling.top_k,
        sampling.seed,
        sequence.position,
        sampling.choice,
        -1 if sampling.logprobs is None else len(arrays.top_ids),
        arrays.top_ids.buffer_info()[0],
        arrays.top_logits.buffer_info()[0],
    )


def _read(fields: tuple[int, int, float, float, int, int], sequence: SampledSequence, arrays: _Lists) -> Drawn:
    token_id, fault, logit, highest, mass, top_count = fields
    if fault:
        return Drawn(fault=_FAULTS[fault])
    if sequence.sampling.logprobs is None:
        return Drawn(token_id)
    total = total_logit(highest, mass)
    top = zip(arrays.top_ids[:top_count], arrays.top_logits[:top_count], strict=True)
    return Drawn(token_id, Logprobs(logit - total, tuple((one, value - total) for one, value in top)))
