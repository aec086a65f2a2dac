"""How a memory budget becomes blocks, and which settings are refused by name."""

import math

import pytest
import torch

from executor.cache import KvShape, MemoryPlanError, allocate_pool, plan_memory

SHAPE = KvShape(layers=2, kv_heads=3, head_dim=8, dtype=torch.bfloat16)
BLOCK = 2 * 2 * 16 * 3 * 8 * 2  # bytes: keys and values, layers, tokens, heads, head size, item


def test_a_budget_holds_temporaries_and_whole_blocks() -> None:
    plan = plan_memory(
        SHAPE,
        block_size=16,
        temporary_bytes=1000,
        context_length=4096,
        max_model_len=None,
        kv_memory_bytes=1000 + 5 * BLOCK + BLOCK - 1,
    )
    assert (plan.total_blocks, plan.pool_bytes, plan.max_model_len) == (5, 5 * BLOCK, 80)


def test_a_pool_is_what_was_planned() -> None:
    plan = plan_memory(SHAPE, block_size=16, temporary_bytes=0, context_length=40, max_model_len=None, total_blocks=9)
    pool = allocate_pool(SHAPE, plan)
    assert plan.max_model_len == 40
    assert sum(page.nbytes for page in pool.keys + pool.values) == plan.pool_bytes
    assert all(page.shape == (9, 16, 3, 8) for page in pool.keys + pool.values)
    pool.fill(math.nan)
    assert all(page.isnan().all() for page in pool.keys + pool.values)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_memory_bytes": 1000 + BLOCK - 1}, f"give at least {1000 + BLOCK}, or lower max_batched_tokens"),
        ({"kv_memory_bytes": -5}, "kv_memory_bytes is -5"),
        ({"total_blocks": 0}, "total_blocks must be at least 1, got 0"),
        ({"total_blocks": 1, "kv_memory_bytes": 1 << 30}, "exactly one of kv_memory_bytes and total_blocks"),
        ({}, "exactly one of kv_memory_bytes and total_blocks"),
        ({"total_blocks": 2, "max_model_len": 33}, "max_model_len is 33, but 2 blocks of 16 hold 32 tokens"),
        ({"total_blocks": 9999, "max_model_len": 4097}, "max_model_len must be from 1 to the model's 4096, got 4097"),
        ({"total_blocks": 2, "max_model_len": 0}, "max_model_len must be from 1"),
        ({"total_blocks": 2, "block_size": 0}, "block_size must be at least 1, got 0"),
    ],
)
def test_settings_without_room_are_named(settings: dict[str, int], message: str) -> None:
    rest: dict[str, int | None] = {"block_size": 16, "max_model_len": None} | settings
    with pytest.raises(MemoryPlanError, match=message):
        plan_memory(SHAPE, temporary_bytes=1000, context_length=4096, **rest)  # type: ignore[arg-type]
