"""Draws on the device: what the kernels are told about each row, the launches, and what their results mean.

Owns: the layout of a row's order (`device.draw` has the same). Must not know: models, slots.
Invariant: the results of `kernels.sampling.sample`, bit for bit. The token ids lie on the device as soon as they are
drawn, for whoever feeds them to the next step; logprobs become numbers on the host, when `DeviceDraws.read` is called.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.gpu.device.draw import NUMBERS, ORDER, RESULT, adjust_kernel, count_kernel, draw_kernel, greedy_kernel
from kernels.gpu.launch import Launch
from kernels.gpu.target import Target
from kernels.ops import require
from kernels.sampling import Drawn, Fault, Greedy, Logprobs, SampledSequence, may_adjust, total_logit

_FAULTS: Final = {1: Fault.NOT_FINITE, 2: Fault.NOTHING_ALLOWED}
_COUNT_BLOCK: Final = 1024
_NO_TOKENS: Final[Sequence[int]] = ()


@dataclass(frozen=True, slots=True)
class Orders:
    """orders int64 [rows, 16], numbers float64 [rows, 8]; flat lists that they point into: tokens, bias_ids, bans and
    mask_words int32, biases float32. longest: history that is counted, tokens. top_width: most top tokens of a row.
    adjusts: whether some row's logits are changed. All on one device."""

    orders: Tensor
    numbers: Tensor
    tokens: Tensor
    bias_ids: Tensor
    biases: Tensor
    bans: Tensor
    mask_words: Tensor
    longest: int
    top_width: int
    adjusts: bool

    def to(self, device: torch.device) -> "Orders":
        lists = (self.orders, self.numbers, self.tokens, self.bias_ids, self.biases, self.bans, self.mask_words)
        orders, numbers, tokens, bias_ids, biases, bans, mask_words = (each.to(device) for each in lists)
        return Orders(
            orders, numbers, tokens, bias_ids, biases, bans, mask_words, self.longest, self.top_width, self.adjusts
        )


@dataclass(frozen=True, slots=True)
class DeviceDraws:
    """token_ids int64 [rows]; the rest is what `read` makes of them."""

    token_ids: Tensor
    results: Tensor  # int64 [rows, 4]
    raw: Tensor  # float32 [rows, 2]
    top_ids: Tensor  # int32 [rows, width]
    top_logits: Tensor  # float32 [rows, width]

    def read(self, sequences: Sequence[SampledSequence]) -> list[Drawn]:
        """Copies to the host, and so waits for the device."""
        vocab_top = self.top_ids.shape[1]
        ids, results, raw = self.token_ids.tolist(), self.results.tolist(), self.raw.tolist()
        top_ids, top_logits = self.top_ids.tolist(), self.top_logits.tolist()
        drawn = []
        for row, sequence in enumerate(sequences):
            fault, mass, *_ = results[row]
            wanted = sequence.sampling.logprobs
            if fault:
                drawn.append(Drawn(fault=_FAULTS[fault]))
            elif wanted is None:
                drawn.append(Drawn(ids[row]))
            else:
                total = total_logit(raw[row][1], mass)
                count = min(wanted, vocab_top)
                top = zip(top_ids[row][:count], top_logits[row][:count], strict=True)
                likeliest = tuple((one, value - total) for one, value in top)
                drawn.append(Drawn(ids[row], Logprobs(raw[row][0] - total, likeliest)))
        return drawn


def orders_of(sequences: Sequence[SampledSequence], vocab: int) -> Orders:
    """On the CPU."""
    rows = len(sequences)
    orders = np.zeros((rows, ORDER.value), dtype=np.int64)
    numbers = np.zeros((rows, NUMBERS.value), dtype=np.float64)
    tokens, bias_ids, bans = (array("i") for _ in range(3))
    mask_words, biases = array("I"), array("f")
    longest = top_width = 0
    for row, sequence in enumerate(sequences):
        sampling = sequence.sampling
        counted = sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        history = sequence.tokens if counted else _NO_TOKENS
        banned = sampling.stop_token_ids if sequence.bans_stops else ()
        mask = sequence.mask
        orders[row, :14] = (
            len(tokens),
            len(history),
            sequence.prompt_len,
            len(bias_ids),
            len(sampling.logit_bias),
            len(bans),
            len(banned),
            len(mask_words),
            -1 if mask is None else len(mask),
            sampling.top_k,
            np.uint64(sampling.seed).astype(np.int64),
            sequence.position,
            sampling.choice,
            -1 if sampling.logprobs is None else min(sampling.logprobs, vocab),
        )
        numbers[row, :6] = (
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.temperature,
            sampling.top_p,
            math.log(sampling.min_p) if sampling.min_p else -math.inf,
        )
        tokens.extend(history)
        bias_ids.extend(token_id for token_id, _ in sampling.logit_bias)
        biases.extend(bias for _, bias in sampling.logit_bias)
        bans.extend(banned)
        mask_words.extend(mask if mask is not None else ())
        longest = max(longest, len(history))
        top_width = max(top_width, min(sampling.logprobs or 0, vocab))
    return Orders(
        orders=torch.from_numpy(orders),
        numbers=torch.from_numpy(numbers),
        tokens=_flat(tokens, np.int32),
        bias_ids=_flat(bias_ids, np.int32),
        biases=_flat(biases, np.float32),
        bans=_flat(bans, np.int32),
        mask_words=_flat(mask_words, np.uint32),
        longest=longest,
        top_width=top_width,
        adjusts=any(sequence.mask is not None or may_adjust(sequence.sampling) for sequence in sequences),
    )


def draw(target: Target, logits: Tensor, orders: Orders) -> DeviceDraws:
    """logits float32 [rows, V] and orders on the target's device. Nothing waits for the host."""
    rows, vocab = logits.shape
    require(logits.dtype == torch.float32 and logits.stride(1) == 1, "logits must be float32, contiguous in a row")
    require(orders.orders.shape[0] == rows, f"{orders.orders.shape[0]} orders are not of {rows} rows")
    require(vocab <= 1 << 18, f"{vocab} tokens are more than masses can be added of")
    device, block = target.device, target.draw_block(vocab)
    adjusted = logits.contiguous()
    if orders.adjusts:
        adjusted = _adjust(target, logits, orders, block)
    found = DeviceDraws(
        token_ids=torch.empty(rows, dtype=torch.int64, device=device),
        results=torch.zeros(rows, RESULT.value, dtype=torch.int64, device=device),
        raw=torch.zeros(rows, 2, dtype=torch.float32, device=device),
        top_ids=torch.zeros(rows, orders.top_width, dtype=torch.int32, device=device),
        top_logits=torch.zeros(rows, orders.top_width, dtype=torch.float32, device=device),
    )
    if rows == 0:
        return found
    target.launch(
        Launch(
            draw_kernel,
            (rows,),
            {
                "logits": logits,
                "adjusted": adjusted,
                "orders": orders.orders,
                "numbers": orders.numbers,
                "masses": torch.empty(rows, vocab, dtype=torch.int64, device=device),
                "token_ids": found.token_ids,
                "results": found.results,
                "raw": found.raw,
                "top_ids": found.top_ids,
                "top_logits": found.top_logits,
                "logits_row": logits.stride(0),
                "vocab": vocab,
                "top_width": orders.top_width,
                "BLOCK": block,
            },
            warps=8,
            fused=False,
        )
    )
    return found


def greedy(target: Target, logits: Tensor) -> Greedy:
    """logits float32 [rows, V] on the target's device."""
    rows, vocab = logits.shape
    require(logits.dtype == torch.float32 and logits.stride(1) == 1, "logits must be float32, contiguous in a row")
    token_ids = torch.empty(rows, dtype=torch.int64, device=target.device)
    highest = torch.empty(rows, dtype=torch.float32, device=target.device)
    if rows:
        target.launch(
            Launch(
                greedy_kernel,
                (rows,),
                {
                    "logits": logits,
                    "token_ids": token_ids,
                    "highest": highest,
                    "logits_row": logits.stride(0),
                    "vocab": vocab,
                    "BLOCK": target.draw_block(vocab),
                },
                warps=8,
            )
        )
    return Greedy(token_ids, highest)


def _adjust(target: Target, logits: Tensor, orders: Orders, block: int) -> Tensor:
    rows, vocab = logits.shape
    adjusted = torch.empty(rows, vocab, dtype=torch.float32, device=target.device)
    counts = adjusted.view(torch.int32)
    if orders.longest:
        counts = torch.zeros(rows, vocab, dtype=torch.int32, device=target.device)
        counting = {"tokens": orders.tokens, "orders": orders.orders, "counts": counts, "vocab": vocab}
        grid = (rows, -(-orders.longest // _COUNT_BLOCK))
        target.launch(Launch(count_kernel, grid, {**counting, "BLOCK": _COUNT_BLOCK}, warps=4))
    target.launch(
        Launch(
            adjust_kernel,
            (rows, -(-vocab // block)),
            {
                "logits": logits,
                "counts": counts,
                "orders": orders.orders,
                "numbers": orders.numbers,
                "bias_ids": orders.bias_ids,
                "biases": orders.biases,
                "bans": orders.bans,
                "mask_words": orders.mask_words,
                "adjusted": adjusted,
                "logits_row": logits.stride(0),
                "vocab": vocab,
                "BLOCK": block,
            },
            warps=8,
            fused=False,
        )
    )
    return adjusted


def _flat(values: "array[int] | array[float]", dtype: type[np.generic]) -> Tensor:
    """One element at least: a kernel is given its address even where nothing is read."""
    found = np.array(values, dtype=dtype) if len(values) else np.zeros(1, dtype=dtype)
    return torch.from_numpy(found.view(np.int32) if dtype is np.uint32 else found)
