"""The block pool: states, the fence, and what it refuses."""

import pytest

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.calls import InvariantError


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.live, pool.fenced, pool.free


def test_blocks_go_from_free_to_live_and_back() -> None:
    pool = BlockPool(4)
    first = pool.allocate(3)
    assert first == (0, 1, 2)
    assert counts(pool) == (3, 0, 1)
    pool.release(first, last_step=0)
    assert counts(pool) == (0, 0, 4)
    assert pool.allocate(4) == (3, 0, 1, 2)  # longest free first


def test_a_released_block_stays_fenced_until_its_last_step_is_applied() -> None:
    pool = BlockPool(3)
    one, two = pool.allocate(1), pool.allocate(2)
    pool.release(two, last_step=2)
    pool.release(one, last_step=1)
    assert counts(pool) == (0, 3, 0)
    pool.applied(1)
    assert counts(pool) == (0, 2, 1)
    assert pool.allocate(1) == one
    pool.applied(2)
    assert counts(pool) == (1, 0, 2)


def test_a_step_already_applied_fences_nothing() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.applied(1)
    pool.release(blocks, last_step=1)
    assert counts(pool) == (0, 0, 2)


def test_asking_for_more_than_is_free_is_an_error_and_takes_nothing() -> None:
    pool = BlockPool(2)
    with pytest.raises(InvariantError, match="3 blocks asked for, 2 are free"):
        pool.allocate(3)
    assert counts(pool) == (0, 0, 2)


@pytest.mark.parametrize(("last_step", "state"), [(0, "FREE"), (1, "FENCED")])
def test_releasing_twice_is_an_error(last_step: int, state: str) -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks, last_step)
    with pytest.raises(InvariantError, match=f"block 0 is released while {state}"):
        pool.release(blocks, last_step)


def test_steps_are_applied_in_order() -> None:
    pool = BlockPool(1)
    with pytest.raises(InvariantError, match="step 2 applied after step 0"):
        pool.applied(2)


@pytest.mark.parametrize(
    ("tables", "story"),
    [
        ([[0, 1], [1]], "block 1 has 2 holders and counts 1"),
        ([[0]], "block 1 is live, and nobody holds it"),
        ([[0, 1, 0]], "a block comes twice"),
        ([[0, 1, 2]], "block 2 is owned and FREE"),
    ],
)
def test_check_compares_the_pool_with_the_block_tables(tables: list[list[int]], story: str) -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    pool.check([[0], [1]])
    with pytest.raises(InvariantError, match=story):
        pool.check(tables)


def test_a_kept_block_is_cached_when_the_last_holder_gives_it_back() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.keep(0)
    pool.hold(0)
    assert (pool.shared, pool.holders(0)) == (1, 2)
    assert pool.release(blocks, last_step=0) == []
    assert (counts(pool), pool.shared, pool.cached) == ((1, 0, 1), 0, 0)
    assert pool.release([0], last_step=0) == [0]
    assert (counts(pool), pool.cached) == ((0, 0, 1), 1)
    pool.drop(0)
    assert (counts(pool), pool.cached) == ((0, 0, 2), 0)


def test_the_fence_of_a_shared_block_is_the_latest_of_its_holders() -> None:
    pool = BlockPool(1)
    pool.allocate(1)
    pool.keep(0)
    pool.hold(0)
    pool.release([0], last_step=2)
    pool.release([0], last_step=1)
    assert pool.applied(1) == []
    assert (counts(pool), pool.cached) == ((0, 1, 0), 0)
    pool.hold(0)  # who finds it only reads it, so the fence is no matter
    assert counts(pool) == (1, 0, 0)
    assert pool.applied(2) == []
    assert pool.release([0], last_step=0) == [0]
    pool.check([])


def test_only_what_can_be_found_is_held_again() -> None:
    pool = BlockPool(1)
    with pytest.raises(InvariantError, match="block 0 is held again"):
        pool.hold(0)
    with pytest.raises(InvariantError, match="published while FREE"):
        pool.keep(0)
    with pytest.raises(InvariantError, match="was not kept"):
        pool.drop(0)
