"""The paged pool of keys and values, and how large it may be.

Owns: the pages, and the division of a memory budget. Must not know: which sequence holds which block (the scheduler).
Invariant: the pool is allocated whole, once; a page's content means nothing until a step writes it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.memory import large_pages


class MemoryPlanError(ValueError):
    """The settings leave no room: the message names the setting, what it is and what it would have to be."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """width: numbers of dtype that a head of a token takes, with what lies behind its own."""

    layers: int
    kv_heads: int
    width: int
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        """Keys and values of all layers."""
        return 2 * self.layers * block_size * self.kv_heads * self.width * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes, and what they hold."""

    block_size: int
    total_blocks: int
    pool_bytes: int
    temporary_bytes: int  # activations, logits and workspace of the largest step
    max_model_len: int


@dataclass(frozen=True, slots=True)
class KvPool:
    """keys[l], values[l]: [total_blocks, block_size, kv_heads, width]."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def fill(self, value: float) -> None:
        """For tests: a pool full of NaN shows every read of a page that no step wrote."""
        for page in self.keys + self.values:
            page.fill_(value)


def plan_memory(
    shape: KvShape,
    *,
    block_size: int,
    temporary_bytes: Callable[[int], int],
    context_length: int,
    max_model_len: int | None,
    kv_memory_bytes: int | None = None,
    total_blocks: int | None = None,
) -> MemoryPlan:
    """Exactly one of `kv_memory_bytes` (for the pool and the temporaries together) and `total_blocks` is given.

    temporary_bytes: of the largest step where sequences have at most so many tokens; it must not fall with them.
    max_model_len: None takes the model's context, or what the pool holds if that is less. A value that the context or
    the pool cannot hold raises MemoryPlanError, as does a budget without room for one block.
    """
    if block_size < 1:
        raise MemoryPlanError(f"block_size must be at least 1, got {block_size}")
    if max_model_len is not None and not 1 <= max_model_len <= context_length:
        raise MemoryPlanError(f"max_model_len must be from 1 to the model's {context_length}, got {max_model_len}")
    block_bytes = shape.block_bytes(block_size)

    def longest(blocks: int) -> int:
        return max_model_len or min(context_length, blocks * block_size)

    if kv_memory_bytes is not None and total_blocks is None:
        total_blocks = _blocks_within(kv_memory_bytes, block_bytes, lambda blocks: temporary_bytes(longest(blocks)))
        if total_blocks < 1:
            least = temporary_bytes(longest(1))
            lower = "max_batched_tokens or max_sequences" + (" or max_model_len" if max_model_len else "")
            raise MemoryPlanError(
                f"kv_memory_bytes is {kv_memory_bytes}; one block takes {block_bytes} and the temporaries of the "
                f"largest step {least}: give at least {block_bytes + least}, or lower {lower}"
            )
    elif kv_memory_bytes is not None or total_blocks is None:
        raise MemoryPlanError("exactly one of kv_memory_bytes and total_blocks must be given")
    elif total_blocks < 1:
        raise MemoryPlanError(f"total_blocks must be at least 1, got {total_blocks}")
    held = total_blocks * block_size
    if max_model_len is not None and max_model_len > held:
        raise MemoryPlanError(
            f"max_model_len is {max_model_len}, but {total_blocks} blocks of {block_size} hold {held} tokens"
        )
    return MemoryPlan(
        block_size=block_size,
        total_blocks=total_blocks,
        pool_bytes=total_blocks * block_bytes,
        temporary_bytes=temporary_bytes(longest(total_blocks)),
        max_model_len=longest(total_blocks),
    )


def _blocks_within(budget: int, block_bytes: int, temporary_bytes: Callable[[int], int]) -> int:
    """The most blocks that leave room for the temporaries that so many blocks allow; 0: not one does."""
    fewest, most = 0, max(0, budget // block_bytes)
    while fewest < most:
        blocks = (fewest + most + 1) // 2
        if blocks * block_bytes + temporary_bytes(blocks) <= budget:
            fewest = blocks
        else:
            most = blocks - 1
    return fewest


def allocate_pool(shape: KvShape, plan: MemoryPlan, allocate: Callable[[int], Tensor] = large_pages) -> KvPool:
    """Zeroed, so that the memory is there now, not when the pool first fills up. allocate: uint8 of so many bytes,
    where the back end reads pages."""
    page = (plan.total_blocks, plan.block_size, shape.kv_heads, shape.width)
    pages = allocate(plan.pool_bytes).zero_().view(shape.dtype).view(shape.layers, 2, *page)
    return KvPool(keys=tuple(pages[:, 0]), values=tuple(pages[:, 1]))
