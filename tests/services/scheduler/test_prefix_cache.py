"""The cache of one lane by itself: what is found, what is given away first, what a lease and a quota do."""

import pytest

from services.scheduler.core.calls import InvariantError, KvEvent, KvRemoved, KvStored, LaneSpec
from services.scheduler.core.prefix import PrefixCache

A, B, C, D = b"a", b"ab", b"abc", b"abcd"


def made(total: int = 4, quota: int | None = None) -> tuple[PrefixCache, list[KvEvent]]:
    events: list[KvEvent] = []
    spec = LaneSpec(2, total, 16, 4, 32)
    return PrefixCache("lane", spec, total if quota is None else quota, events.append), events


def store(cache: PrefixCache, *keys: bytes, tenant: str = "t") -> tuple[int, ...]:
    """A sequence computes these blocks and ends."""
    blocks = cache.allocate(len(keys))
    cache.publish(b"", keys, blocks, tenant)
    cache.release(blocks, 0)
    cache.check([])
    return blocks


def test_what_was_published_is_found_and_held() -> None:
    cache, events = made()
    blocks = store(cache, A, B)
    assert events == [KvStored("lane", (A, B), b"", 2)]
    assert cache.find([A, B, C], 9) == list(blocks)
    assert cache.find([A, B, C], 1) == [blocks[0]]
    assert cache.find([C], 9) == []
    assert (cache.pool.cached, cache.available) == (2, 4)
    cache.hold(blocks)
    assert (cache.pool.cached, cache.pool.live, cache.available) == (0, 2, 2)
    cache.check([blocks])


def test_the_tail_goes_before_the_head_and_what_was_used_longest_ago_first() -> None:
    cache, events = made()
    store(cache, A, B)
    store(cache, b"x", b"xy")
    cache.hold(found := cache.find([A], 9))
    cache.release(found, 0)
    cache.release(cache.allocate(3), 0)
    assert events[2:] == [KvRemoved("lane", (B, b"xy", b"x"))]
    cache.check([])


@pytest.mark.parametrize(("gone", "hit"), [(0, 0), (1, 1), (2, 2)])
def test_p07_no_hit_is_counted_past_an_evicted_block(gone: int, hit: int) -> None:
    cache, _ = made()
    blocks = store(cache, A, B, C)
    kept = [block for block in blocks if block != blocks[gone]]
    cache.hold(kept)
    taken = cache.allocate(2)  # the free one, and the evicted one
    assert blocks[gone] in taken
    assert cache.find([A, B, C], 9) == list(blocks[:hit])


def test_a_key_that_is_known_stays_with_its_block() -> None:
    cache, events = made(8)
    first = store(cache, A, B)
    second = cache.allocate(3)
    cache.publish(b"", [A, B, C], second, "t")
    assert events[1:] == [KvStored("lane", (C,), B, 2)]
    assert cache.find([A, B, C], 9) == [*first, second[2]]
    cache.release(second, 0)
    assert (cache.pool.cached, cache.pool.free) == (3, 5)
    cache.check([])


def test_more_than_there_is_can_not_be_allocated() -> None:
    cache, _ = made()
    store(cache, A)
    with pytest.raises(InvariantError, match="5 blocks asked for, 4 are available"):
        cache.allocate(5)


def test_a_withdrawn_block_is_not_found_and_becomes_free() -> None:
    cache, events = made()
    blocks = store(cache, A, B)
    cache.hold(blocks)
    cache.withdraw(blocks)
    assert cache.find([A], 1) == []
    assert events[1:] == [KvRemoved("lane", (A, B))]
    cache.check([blocks])
    cache.release(blocks, 0)
    assert cache.pool.free == 4


def test_a_flush_takes_what_nobody_holds_and_leaves_the_rest() -> None:
    cache, events = made(8, quota=8)
    store(cache, A, B)
    assert cache.pin([A], 10, "t") == 1
    held = cache.allocate(2)
    cache.publish(b"", [C, D], held, "t")
    in_flight = cache.allocate(1)
    cache.publish(b"", [b"e"], in_flight, "t")
    cache.release(in_flight, last_step=1)
    assert cache.flush() == (3, 2)
    assert [event.keys for event in events if isinstance(event, KvRemoved)] == [(A, B, b"e")]
    assert [cache.find([key], 1) for key in (A, B, b"e")] == [[], [], []]
    assert cache.find([C, D], 2) == list(held)
    cache.check([held])
    assert (cache.pool.free, cache.pool.cached, cache.pool.fenced) == (5, 0, 1)
    cache.applied(1)  # the fence outlives the flush: a step in flight may still write there
    assert (cache.pool.free, cache.pool.cached, cache.pool.fenced) == (6, 0, 0)
    cache.release(held, 0)
    assert cache.flush() == (2, 0)
    assert cache.flush() == (0, 0)
    cache.check([])


def test_pinned_blocks_go_last_and_a_lease_ends_at_its_time() -> None:
    cache, events = made()
    store(cache, A, B)
    store(cache, C, D)
    assert cache.pin([A, B], 10, "t") == 2
    cache.release(cache.allocate(2), 0)
    assert events[2:] == [KvRemoved("lane", (D, C))]
    cache.expire_pins(9)
    assert cache.find([A, B], 9)
    store(cache, C, D)
    cache.expire_pins(10)  # from now on they are what was used last
    cache.release(cache.allocate(2), 0)
    assert events[4:] == [KvRemoved("lane", (D, C))]
    cache.check([])


def test_a_lease_is_broken_when_nothing_else_is_left() -> None:
    cache, events = made()
    store(cache, A, B)
    store(cache, C, D)
    cache.pin([A, B], 10, "t")
    assert cache.available == 4
    cache.allocate(3)
    assert events[2:] == [KvRemoved("lane", (D, C, B))]
    assert cache.pin([A, B], 10, "t") == 1
    cache.check([(*[block for block in range(4) if block not in cache.find([A], 1)],)])


def test_a_renewed_lease_holds_until_its_new_end_and_can_be_ended() -> None:
    cache, _ = made()
    store(cache, A)
    cache.pin([A], 5, "t")
    cache.pin([A], 50, "t")
    cache.expire_pins(5)
    cache.check([])
    cache.unpin([A])
    cache.check([])
    store(cache, C)
    cache.release(cache.allocate(3), 0)
    assert cache.find([C], 1)
    assert cache.find([A], 1) == []


def test_a_tenant_keeps_no_more_than_its_quota_of_what_nobody_holds() -> None:
    cache, events = made(8, quota=2)
    store(cache, A, B, tenant="one")
    store(cache, b"x", tenant="two")
    store(cache, C, D, tenant="one")
    assert sorted(key for event in events if isinstance(event, KvRemoved) for key in event.keys) == [A, B]
    assert cache.find([b"x"], 1)
    assert cache.pin([C, D], 10, "one") == 2
    cache.check([])


def test_pins_count_against_the_quota() -> None:
    cache, _ = made(8, quota=1)
    blocks = cache.allocate(3)
    cache.publish(b"", [A, B, C], blocks, "t")
    assert cache.pin([A, B, C], 10, "t") == 1
    cache.release(blocks, 0)
    assert cache.find([A, B, C], 9) == [blocks[0]]
    cache.check([])


def test_a_block_in_flight_can_be_found_but_not_given_away() -> None:
    cache, _ = made()
    blocks = cache.allocate(2)
    cache.publish(b"", [A, B], blocks, "t")
    cache.release(blocks, last_step=1)
    assert (cache.pool.fenced, cache.available) == (2, 2)
    assert cache.find([A, B], 9) == list(blocks)
    cache.hold([blocks[0]])
    cache.applied(1)
    assert (cache.pool.fenced, cache.pool.live, cache.available) == (0, 1, 3)
    cache.check([[blocks[0]]])
