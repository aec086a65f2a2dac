"""Blocks told in tokens: in whichever order things come, what is told is held, and what is held and known is told."""

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.prefix_keys import KeyChain, NameSpace
from services.tokenizer.cached_blocks import CachedBlocks, Change, Gone, PassedBy, Told

SIZE = 4
PLACES = (("a", "1"), ("a", "2"), ("b", "1"))
# Sequences with common starts.
SEQUENCES = tuple(tuple(range(cut)) + tuple(range(50, 66 - cut)) for cut in (0, 4, 8, 16))


def keys(ids: tuple[int, ...], tenant: str = "t") -> tuple[bytes, ...]:
    return KeyChain(NameSpace("n", tenant, SIZE)).grow(ids)


def passed(ids: tuple[int, ...]) -> PassedBy:
    return PassedBy("n", "t", ids)


operation = st.one_of(
    st.tuples(st.just("learn"), st.sampled_from(SEQUENCES), st.integers(0, 16)),
    st.tuples(st.just("store"), st.sampled_from(PLACES), st.sampled_from(SEQUENCES), st.integers(0, 4)),
    st.tuples(st.just("remove"), st.sampled_from(PLACES), st.sampled_from(SEQUENCES), st.integers(0, 4)),
    st.tuples(st.just("clear"), st.sampled_from(PLACES)),
    st.tuples(st.just("lose"), st.sampled_from(("a", "b"))),
)


@given(st.lists(operation, max_size=40), st.sampled_from((3, 1000)))
def test_what_is_told_is_what_is_held(operations: list[tuple], most: int) -> None:  # type: ignore[type-arg]
    blocks = CachedBlocks(most_known=most)
    held: dict[tuple[str, str], set[bytes]] = {place: set() for place in PLACES}
    at_the_reader: dict[bytes, tuple[int, ...]] = {}

    def hear(changes: list[Change]) -> None:
        for change in changes:
            match change:
                case Told(key=key, parent=parent, token_ids=ids):
                    assert key not in at_the_reader
                    assert parent is None or parent in at_the_reader
                    at_the_reader[key] = ids
                case Gone(keys=gone):
                    for key in gone:
                        del at_the_reader[key]

    for one in operations:
        match one:
            case ("learn", ids, length):
                hear(blocks.learn(passed(ids[:length])))
            case ("store", place, ids, count):
                held[place] |= set(keys(ids)[:count])
                hear(blocks.stored(place, keys(ids)[:count], SIZE))
            case ("remove", place, ids, count):
                # The deepest first, as a cache gives blocks up.
                held[place] -= set(keys(ids)[4 - count :])
                hear(blocks.removed(place, keys(ids)[4 - count :]))
            case ("clear", place):
                held[place] = set()
                hear(blocks.cleared(place))
            case ("lose", scheduler):
                for place in PLACES:
                    if place[0] == scheduler:
                        held[place] = set()
                hear(blocks.lost(scheduler))
        assert at_the_reader == {one.key: one.token_ids for one in blocks.told}
        assert set(at_the_reader) <= set().union(*held.values())
    if most > 100:
        for ids in SEQUENCES:  # all is known now; who has the start of it has it told
            hear(blocks.learn(passed(ids)))
            for key in keys(ids):
                if not any(key in have for have in held.values()):
                    break
                assert key in at_the_reader


def test_ids_are_those_that_were_passed_and_other_tenants_stay_apart() -> None:
    blocks = CachedBlocks()
    blocks.learn(passed(SEQUENCES[3]))
    changes = blocks.stored(PLACES[0], keys(SEQUENCES[3])[:2], SIZE)
    assert [change.token_ids for change in changes if isinstance(change, Told)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert blocks.stored(PLACES[0], keys(SEQUENCES[3], "other"), SIZE) == []


def test_a_block_is_gone_when_its_last_holder_has_given_it_up() -> None:
    blocks = CachedBlocks()
    first = keys(SEQUENCES[0])[:1]
    for place in PLACES[:2]:
        blocks.stored(place, first, SIZE)
    blocks.learn(passed(SEQUENCES[0]))
    assert blocks.removed(PLACES[0], first) == []
    assert blocks.cleared(PLACES[1]) == [Gone(first)]
    assert blocks.removed(PLACES[1], first) == []  # a second time changes nothing
