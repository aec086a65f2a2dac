"""Several equal servers behind a caller, and the way of one request over them.

Owns how many requests each has from here, and where a request goes that has lost its server. Must not know what the
servers do, nor calls. Invariant: a request counts at one server at most, and at none once its route is left.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from services.errors import ServiceError
from services.tokenizer import placement


class State(Protocol):
    """What was seen last of a server. problem: None while it serves. takes: requests are worth a try, also where there
    is a problem. numerics: under which its tokens are drawn; "" is unknown."""

    @property
    def problem(self) -> ServiceError | None: ...

    @property
    def takes(self) -> bool: ...

    @property
    def numerics(self) -> str: ...


class Peer(Protocol):
    """target: its address, as all who place requests spell it."""

    @property
    def target(self) -> str: ...

    @property
    def state(self) -> State: ...


P = TypeVar("P", bound=Peer)


class Peers(Generic[P]):
    """At least one. changed: told a target and how many requests it has from here."""

    def __init__(self, peers: Sequence[P], changed: Callable[[str, int], None] = lambda target, active: None) -> None:
        self._peers = {peer.target: peer for peer in peers}
        self._active = dict.fromkeys(self._peers, 0)
        self._changed = changed

    def __iter__(self) -> Iterator[P]:
        return iter(self._peers.values())

    @property
    def active(self) -> Mapping[str, int]:
        return self._active

    def able(self, numerics: str | None = None) -> list[P]:
        """Those that serve, else those that take requests all the same. numerics: no others."""
        fit = [peer for peer in self if numerics is None or peer.state.numerics == numerics]
        return [peer for peer in fit if peer.state.problem is None] or [peer for peer in fit if peer.state.takes]

    def hopeful(self, numerics: str | None) -> list[P]:
        """Where nobody is able: those of which it is not known that their tokens would be others."""
        return [peer for peer in self if numerics is None or peer.state.numerics in ("", numerics)] or list(self)

    def route(self, key: bytes, numerics: str | None = None) -> "Route[P]":
        """To be left when the request has ended."""
        return Route(self, key, numerics)

    def count(self, target: str, change: int) -> None:
        self._active[target] += change
        self._changed(target, self._active[target])


class Route(Generic[P]):
    """One request's way. numerics: once an answer has begun, those that it needs. seen: the state of the server that
    was taken last, as it was then."""

    seen: State

    def __init__(self, peers: Peers[P], key: bytes, numerics: str | None) -> None:
        self._peers = peers
        self._key = key
        self._failed: set[str] = set()  # since the last progress
        self.numerics = numerics
        self.current: P | None = None

    def take(self) -> P:
        """The server of the next try."""
        self.leave()
        chosen = self._peers.able(self.numerics) or self._peers.hopeful(self.numerics)
        fresh = [peer for peer in chosen if peer.target not in self._failed]
        if not fresh:
            self._failed.clear()
        by_target = {peer.target: peer for peer in fresh or chosen}
        active = {target: self._peers.active[target] for target in by_target}
        self.current = by_target[placement.order(self._key, active)[0]]
        self.seen = self.current.state
        self._peers.count(self.current.target, 1)
        return self.current

    def lost(self) -> bool:
        """The server of this try has failed. Whether one is able that has not, since the last progress."""
        if self.current is not None:
            self._failed.add(self.current.target)
        self.leave()
        return any(peer.target not in self._failed for peer in self._peers.able(self.numerics))

    def progress(self) -> None:
        self._failed.clear()

    def leave(self) -> None:
        """It counts nowhere."""
        if self.current is not None:
            self._peers.count(self.current.target, -1)
            self.current = None
