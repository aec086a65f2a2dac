"""Keys of blocks: equal for equal prefixes in one name space, and for nothing else."""

from dataclasses import replace
from itertools import combinations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from services.scheduler.prefix_keys import KeyChain, NameSpace, chained, root

SPACE = NameSpace("numerics", "tenant", 4)
text = st.text(max_size=4)
spaces = st.builds(
    NameSpace,
    numerics=text,
    tenant=text,
    block_size=st.integers(1, 512),
    salt=st.one_of(st.none(), text),
    adapter=text,
)


def test_a_key_stands_for_the_whole_prefix() -> None:
    one = KeyChain(SPACE).grow([1, 2, 3, 4, 5, 6, 7, 8, 9])
    other = KeyChain(SPACE).grow([0, 2, 3, 4, 5, 6, 7, 8])
    assert len(one) == len(other) == 2
    assert set(one).isdisjoint(other)
    assert KeyChain(SPACE).grow([1, 2, 3, 4, 5, 6, 7, 8]) == one


def test_growing_by_pieces_gives_the_same_keys() -> None:
    ids = list(range(23))
    chain = KeyChain(SPACE)
    pieces = [key for end in range(len(ids) + 1) for key in chain.grow(ids[:end])]
    assert tuple(pieces) == KeyChain(SPACE).grow(ids)
    assert len(pieces) == 5
    assert chain.grow(ids) == ()


@pytest.mark.parametrize(
    "pair",
    [
        (replace(SPACE, tenant="org_1", salt="2345"), replace(SPACE, tenant="org_12345", salt="")),
        (replace(SPACE, tenant="a", salt=None), replace(SPACE, tenant="a", salt="")),
        (replace(SPACE, tenant="a", salt=None), replace(SPACE, tenant="b", salt="a")),
        (replace(SPACE, tenant="a", adapter="x"), replace(SPACE, tenant="ax", adapter="")),
        (replace(SPACE, tenant="a", adapter="lora"), replace(SPACE, tenant="a", salt="lora")),
        (replace(SPACE, numerics="m1", adapter="2"), replace(SPACE, numerics="m", adapter="12")),
        (replace(SPACE, numerics="fp8"), replace(SPACE, numerics="bf16")),
        (replace(SPACE, block_size=4), replace(SPACE, block_size=8)),
    ],
)
def test_p11_no_two_name_spaces_share_a_key(pair: tuple[NameSpace, NameSpace]) -> None:
    first, second = pair
    assert root(first) != root(second)
    assert set(KeyChain(replace(first, block_size=2)).grow(range(8))).isdisjoint(
        KeyChain(replace(second, block_size=2)).grow(range(8)) if first.block_size == second.block_size else ()
    )


@given(st.lists(spaces, min_size=2, max_size=6, unique=True))
def test_p11_roots_differ_wherever_anything_differs(several: list[NameSpace]) -> None:
    assert all(root(one) != root(other) for one, other in combinations(several, 2))


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple), min_size=2, max_size=5, unique=True))
def test_p11_blocks_with_other_ids_have_other_keys(blocks: list[tuple[int, ...]]) -> None:
    keys = [chained(b"parent", block) for block in blocks]
    assert len(set(keys)) == len(keys)


def test_a_block_key_is_no_root() -> None:
    assert chained(root(SPACE), ()) != root(SPACE)
    assert len(root(SPACE)) == len(chained(b"", (1,))) == 32
