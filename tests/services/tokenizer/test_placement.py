"""Where requests go: stable, within the bound, and by what can be shared alone."""

from collections import Counter
from math import ceil

import hypothesis.strategies as st
import pytest
from hypothesis import given

from services.tokenizer.placement import BOUND, FIRST_BLOCK, key_of, order

names = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=9, unique=True)
loads = st.dictionaries(st.text(min_size=1, max_size=8), st.integers(0, 50), min_size=1, max_size=9)
keys = st.binary(max_size=64)


@given(keys, loads)
def test_every_server_is_in_the_order_once(key: bytes, active: dict[str, int]) -> None:
    assert sorted(order(key, active)) == sorted(active)


@given(keys, names, st.randoms(use_true_random=False))
def test_all_who_know_the_same_servers_agree(key: bytes, servers: list[str], chance: object) -> None:
    shuffled = servers.copy()
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert order(key, dict.fromkeys(servers, 0)) == order(key, dict.fromkeys(shuffled, 0))


@given(keys, names, st.data())
def test_a_server_that_leaves_moves_only_its_own_keys(key: bytes, servers: list[str], data: st.DataObject) -> None:
    before = order(key, dict.fromkeys(servers, 0))
    gone = data.draw(st.sampled_from(servers))
    rest = [name for name in servers if name != gone]
    if rest:
        assert order(key, dict.fromkeys(rest, 0)) == [name for name in before if name != gone]


@given(keys, loads)
def test_the_one_taken_is_below_the_bound(key: bytes, active: dict[str, int]) -> None:
    most = ceil(BOUND * (sum(active.values()) + 1) / len(active))
    best = order(key, active)
    assert active[best[0]] < most
    full = [active[name] >= most for name in best]
    assert full == sorted(full)


@given(st.lists(keys, max_size=120), names)
def test_however_keys_come_no_server_has_more_than_its_share(arriving: list[bytes], servers: list[str]) -> None:
    active = dict.fromkeys(servers, 0)
    for count, key in enumerate(arriving, 1):
        active[order(key, active)[0]] += 1
        assert max(active.values()) <= ceil(BOUND * count / len(servers))


def test_many_keys_spread_evenly() -> None:
    servers = dict.fromkeys(["a:1", "b:1", "c:1", "unix:/d"], 0)
    taken = Counter(order(key_of("t", None, [number]), servers)[0] for number in range(4000))
    assert set(taken) == set(servers)
    assert all(850 < count < 1150 for count in taken.values())


def test_equal_first_blocks_go_to_one_server_and_salts_and_tenants_part() -> None:
    start = list(range(FIRST_BLOCK))
    assert key_of("t", None, [*start, 1]) == key_of("t", None, [*start, 2, 3])
    apart = {
        key_of("t", None, start),
        key_of("u", None, start),
        key_of("t", "", start),
        key_of("t", "s", start),
        key_of("ts", None, start),
        key_of("t", None, start[:-1]),
        key_of("t", None, [*start[1:], 0]),
    }
    assert len(apart) == 7


def test_one_key_alone_overflows_to_its_next_best() -> None:
    key = key_of("t", None, [1])
    first, second, third = order(key, dict.fromkeys("abc", 0))
    active = dict.fromkeys("abc", 0)
    for _ in range(30):
        active[order(key, active)[0]] += 1
    assert active[first] >= active[second] >= active[third] > 0


def test_there_is_no_order_of_nothing() -> None:
    with pytest.raises(ZeroDivisionError):
        order(b"", {})
