"""Seeded draws inside a decode step: what a slot's sequence asks for lies on the device, its position comes with
the step.

Owns: the table of what slots ask for. Must not know: how a token is drawn (`kernels.gpu.draws`).
"""

import torch
from torch import Tensor

from executor.device.decode import FAULT
from kernels.gpu.draws import Orders, draw, orders_of
from kernels.gpu.target import Target
from kernels.sampling import SampledSequence, may_adjust

_POSITION = 11  # of the fields of an order


class SlotSampler:
    """A `DeviceSampler` for temperature, top-k, top-p, min-p and seed. What changes logits or asks for logprobs is
    refused: it needs the sequence's history, which the host has."""

    def __init__(self, target: Target, max_sequences: int, vocab: int) -> None:
        self._target = target
        self._vocab = vocab
        one = orders_of([], vocab)
        self._orders = torch.zeros(max_sequences + 1, one.orders.shape[1], dtype=one.orders.dtype, device=target.device)
        self._numbers = torch.zeros(
            max_sequences + 1, one.numbers.shape[1], dtype=one.numbers.dtype, device=target.device
        )
        self._nothing = one.to(target.device)

    def enter(self, slot: int, sequence: SampledSequence) -> None:
        """From the next step on the slot draws as the sequence asks. Raises ValueError for what is not served here."""
        if sequence.mask is not None or may_adjust(sequence.sampling) or sequence.sampling.logprobs is not None:
            raise ValueError(f"slot {slot}: penalties, biases, bans, grammars and logprobs are not drawn inside a step")
        orders = orders_of([sequence], self._vocab)
        self._orders[slot] = orders.orders[0].to(self._target.device)
        self._numbers[slot] = orders.numbers[0].to(self._target.device)

    def draw(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        orders = self._orders[slots]
        orders[:, _POSITION] = positions + 1  # of the token that is drawn
        none = self._nothing
        asked = Orders(
            orders, self._numbers[slots], none.tokens, none.bias_ids, none.biases, none.bans, none.mask_words,
            longest=0, top_width=0, adjusts=False,
        )  # fmt: skip
        found = draw(self._target, logits, asked)
        return torch.where(found.results[:, 0] == 0, found.token_ids, FAULT)
