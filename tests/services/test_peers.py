"""The way of one request over several servers."""

from dataclasses import dataclass, field

import pytest

from services.errors import ServiceError, Unavailable
from services.peers import Peers


@dataclass
class Seen:
    problem: ServiceError | None = None
    takes: bool = True
    numerics: str = "n1"


@dataclass
class Server:
    target: str
    state: Seen = field(default_factory=Seen)


GONE = Seen(Unavailable("gone"), takes=False, numerics="")
WAITS = Seen(Unavailable("waits"), takes=True)
OTHER = Seen(numerics="n2")


def make(**states: Seen) -> Peers[Server]:
    return Peers([Server(name, state) for name, state in states.items()])


def counts(peers: Peers[Server]) -> dict[str, int]:
    return dict(peers.active)


def test_a_request_counts_where_it_is_and_nowhere_once_it_is_left() -> None:
    changes: list[tuple[str, int]] = []
    peers = Peers([Server("a"), Server("b")], lambda target, active: changes.append((target, active)))
    route = peers.route(b"k")
    first = route.take()
    assert counts(peers)[first.target] == 1
    assert route.lost()
    second = route.take()
    assert second.target != first.target
    assert counts(peers) == {first.target: 0, second.target: 1}
    route.leave()
    route.leave()
    assert set(counts(peers).values()) == {0}
    assert changes == [(first.target, 1), (first.target, 0), (second.target, 1), (second.target, 0)]


def test_what_failed_is_not_taken_again_before_the_others_or_progress() -> None:
    route = make(a=Seen(), b=Seen(), c=Seen()).route(b"k")
    taken = []
    for able in (True, True, False):
        taken.append(route.take().target)
        assert route.lost() is able
    assert sorted(taken) == ["a", "b", "c"]
    again = route.take().target
    assert again == taken[0]
    assert route.lost()
    route.progress()
    assert route.take().target == again


@pytest.mark.parametrize(
    ("a", "b", "able"),
    [
        (Seen(), Seen(), ["a", "b"]),
        (Seen(), GONE, ["a"]),
        (WAITS, Seen(), ["b"]),  # one that serves is better than one that waits
        (WAITS, GONE, ["a"]),
        (GONE, GONE, []),
    ],
)
def test_who_is_able(a: Seen, b: Seen, able: list[str]) -> None:
    assert [one.target for one in make(a=a, b=b).able()] == able


def test_an_answer_that_has_begun_goes_on_at_equal_numerics_alone() -> None:
    peers = make(a=GONE, b=OTHER)
    route = peers.route(b"k", "n1")
    assert not peers.able("n1")
    for _ in range(3):
        assert route.take().target == "a"  # it may come back as it was
        assert not route.lost()
    (a, b) = peers
    a.state = OTHER
    assert route.take().target in "ab"  # nobody is left: whoever is asked refuses by name
    b.state = Seen()
    assert route.take().target == "b"


def test_a_route_remembers_the_state_it_was_taken_with() -> None:
    peers = make(a=Seen())
    route = peers.route(b"k")
    before = route.take().state
    next(iter(peers)).state = OTHER
    assert route.seen is before
