"""How a memory budget becomes blocks, and which settings are refused by name."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.cache import KvShape, MemoryPlanError, allocate_pool, plan_memory

SHAPE = KvShape(layers=2, kv_heads=3, width=8, dtype=torch.bfloat16)
BLOCK = 2 * 2 * 16 * 3 * 8 * 2  # bytes: keys and values, layers, tokens, heads, head size, item


def test_a_budget_holds_temporaries_and_whole_blocks() -> None:
    plan = plan_memory(
        SHAPE,
        block_size=16,
        temporary_bytes=lambda _: 1000,
        context_length=4096,
        max_model_len=None,
        kv_memory_bytes=1000 + 5 * BLOCK + BLOCK - 1,
    )
    assert (plan.total_blocks, plan.pool_bytes, plan.max_model_len) == (5, 5 * BLOCK, 80)


def test_a_pool_is_what_was_planned() -> None:
    plan = plan_memory(
        SHAPE, block_size=16, temporary_bytes=lambda _: 0, context_length=40, max_model_len=None, total_blocks=9
    )
    pool = allocate_pool(SHAPE, plan)
    assert plan.max_model_len == 40
    assert sum(page.nbytes for page in pool.keys + pool.values) == plan.pool_bytes
    assert all(page.shape == (9, 16, 3, 8) for page in pool.keys + pool.values)
    pool.fill(math.nan)
    assert all(page.isnan().all() for page in pool.keys + pool.values)


@given(
    budget=st.integers(1, 400 * BLOCK),
    per_token=st.integers(0, 2 * BLOCK),
    context=st.integers(1, 500),
    given_length=st.booleans(),
)
def test_the_pool_takes_what_the_temporaries_of_its_own_length_leave(
    budget: int, per_token: int, context: int, given_length: bool
) -> None:
    """A longer pool allows longer sequences, whose temporaries take from it: the most blocks for which both fit."""

    def temporaries(longest: int) -> int:
        return 100 + per_token * longest

    def needed(blocks: int) -> int:
        return blocks * BLOCK + temporaries(1 if given_length else min(context, 16 * blocks))

    length = 1 if given_length else None
    arguments = {"block_size": 16, "temporary_bytes": temporaries, "context_length": context, "max_model_len": length}
    if needed(1) > budget:
        with pytest.raises(MemoryPlanError, match=f"give at least {needed(1)}, "):
            plan_memory(SHAPE, kv_memory_bytes=budget, **arguments)  # type: ignore[arg-type]
        return
    plan = plan_memory(SHAPE, kv_memory_bytes=budget, **arguments)  # type: ignore[arg-type]
    assert plan.pool_bytes + plan.temporary_bytes == needed(plan.total_blocks) <= budget < needed(plan.total_blocks + 1)
    assert plan.temporary_bytes == temporaries(plan.max_model_len)


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
        plan_memory(SHAPE, temporary_bytes=lambda _: 1000, context_length=4096, **rest)  # type: ignore[arg-type]
