"""Which blocks of which tokens are cached behind an edge: the schedulers' KV events, told in tokens.

Schedulers name blocks by keys alone. This edge saw the tokens go by, and makes the same keys of them
(`services.scheduler.prefix_keys`); where a key that a scheduler holds is one of those, it can be told. Pure. Invariant:
what is told is held by at least one executor, each block's parent was told before it, and what was told and is held by
none any more is gone in the same call.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from services.scheduler.prefix_keys import NameSpace, chained, root

MOST_KNOWN: Final = 65_536  # blocks whose tokens are kept though nobody holds them, or holds them yet
MOST_SEQUENCES: Final = 64  # kept until a block's size is known

Place = tuple[str, str]  # scheduler, executor


@dataclass(frozen=True, slots=True)
class PassedBy:
    """Tokens that went by. In whose name, and under which numerics."""

    numerics: str
    tenant: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """A block that can be hit. parent: None at the start of a sequence."""

    key: bytes
    parent: bytes | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gone:
    """Keys that can be hit nowhere any more."""

    keys: tuple[bytes, ...]


Change = Told | Gone


class CachedBlocks:
    def __init__(self, most_known: int = MOST_KNOWN) -> None:
        self._most_known = most_known
        self._known: OrderedDict[bytes, Told] = OrderedDict()  # oldest first
        self._told: dict[bytes, Told] = {}
        self._holders: dict[bytes, dict[Place, None]] = {}
        self._held: dict[Place, dict[bytes, None]] = {}
        self._sizes: dict[int, None] = {}  # of blocks, in tokens
        self._early: deque[PassedBy] = deque(maxlen=MOST_SEQUENCES)

    @property
    def told(self) -> Iterable[Told]:
        """All of them, parents first."""
        return self._told.values()

    def learn(self, sequence: PassedBy) -> list[Change]:
        """It went by; a longer one with the same start may come."""
        if not self._sizes:
            self._early.append(sequence)
            return []
        return [change for size in self._sizes for change in self._learn(sequence, size)]

    def stored(self, place: Place, keys: Sequence[bytes], block_size: int) -> list[Change]:
        """In chain order."""
        changes: list[Change] = []
        for key in keys:
            self._holders.setdefault(key, {})[place] = None
            self._held.setdefault(place, {})[key] = None
        if block_size not in self._sizes:
            self._sizes[block_size] = None
            for sequence in self._early:
                changes += self._learn(sequence, block_size)
            self._early.clear()
        for key in keys:
            changes += self._tell(key)
        return changes

    def removed(self, place: Place, keys: Sequence[bytes]) -> list[Change]:
        return self._without(place, keys)

    def cleared(self, place: Place) -> list[Change]:
        """Its executor's pool is empty."""
        return self._without(place, tuple(self._held.get(place, ())))

    def lost(self, scheduler: str) -> list[Change]:
        """What it holds is not known any more."""
        places = [place for place in self._held if place[0] == scheduler]
        return [change for place in places for change in self.cleared(place)]

    def _learn(self, sequence: PassedBy, size: int) -> list[Change]:
        changes: list[Change] = []
        parent, key = None, root(NameSpace(sequence.numerics, sequence.tenant, size))
        for start in range(0, len(sequence.token_ids) - size + 1, size):
            ids = sequence.token_ids[start : start + size]
            key = chained(key, ids)
            if key not in self._told:
                self._known[key] = Told(key, parent, ids)
                self._known.move_to_end(key)
                changes += self._tell(key)
            parent = key
        while len(self._known) > self._most_known:
            self._known.popitem(last=False)
        return changes

    def _tell(self, key: bytes) -> list[Change]:
        block = self._known.get(key)
        if block is None or key not in self._holders or not (block.parent is None or block.parent in self._told):
            return []
        self._told[key] = self._known.pop(key)
        return [block]

    def _without(self, place: Place, keys: Iterable[bytes]) -> list[Change]:
        gone = []
        held = self._held.get(place, {})
        for key in keys:
            if held.pop(key, self) is self:
                continue
            holders = self._holders[key]
            del holders[place]
            if holders:
                continue
            del self._holders[key]
            if key in self._told:
                self._known[key] = self._told.pop(key)
                gone.append(key)
        if not held:
            self._held.pop(place, None)
        while len(self._known) > self._most_known:
            self._known.popitem(last=False)
        return [Gone(tuple(gone))] if gone else []
