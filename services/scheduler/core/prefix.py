"""The prefix cache of one lane: which blocks hold which keys, which are given away first, who computes what now.

Sits on the lane's `BlockPool` and takes every block in or out of it. Must not know ids, sequences or the queue; a key
stands for a block's tokens and all before them. Time is an argument.

Invariants: a key names at most one block, a block has at most one key; a block with a key is never written; what can
be reclaimed is exactly what the pool counts as cached. Lookups walk a chain from its start and end at the first miss,
so a block whose predecessor was evicted is never found.

Reclaimed first is what nobody held for longest, and of one sequence the tail before the head; what is leased comes
after that, what is pinned after all others (`reclaim.py`). A *lease* is what blocks of a session get by themselves when
one of its turns ends; its time to live shrinks as the pool fills. A *pin* is asked for, and holds until its time. Both
end where nothing else is left to take: neither ever stops a running sequence.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.calls import BlockKey, InvariantError, KvEvent, KvRemoved, KvStored, LaneId, LaneSpec
from services.scheduler.core.limits import SessionLease
from services.scheduler.core.reclaim import IdleBlocks, Line


@dataclass(frozen=True, slots=True)
class _Pin:
    until: int
    tenant: str


class PrefixCache:
    """quota: most blocks that one tenant may keep while nobody holds them, and most that it may pin."""

    def __init__(
        self,
        lane: LaneId,
        spec: LaneSpec,
        quota: int,
        tell: Callable[[KvEvent], None] | None = None,
        session: SessionLease = SessionLease(),
    ) -> None:
        self.pool = BlockPool(spec.total_blocks)
        self._lane = lane
        self._block_size = spec.block_size
        self._quota = quota
        self._tell = tell
        self._session = session
        self._now = 0  # as of the last `expire`
        self._block_of: dict[BlockKey, int] = {}
        self._key_of: dict[int, BlockKey] = {}
        self._tenant_of: dict[int, str] = {}  # who published it
        self._idle = IdleBlocks()  # exactly the cached ones
        self._idle_of: dict[str, IdleBlocks] = {}  # the same by tenant; none is empty
        self._of_session: dict[int, None] = {}  # blocks that are leased while they are idle
        self._pins: dict[BlockKey, _Pin] = {}
        self._pinned_of: dict[str, int] = {}
        self._pin_ends: list[tuple[int, int, BlockKey]] = []  # a heap; entries of renewed or broken pins are stale
        self._pins_made = 0  # orders those that end together
        self._promised: dict[BlockKey, object] = {}  # keys of blocks being computed -> by whom

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give."""
        return self.pool.free + self.pool.cached

    @property
    def leased(self) -> int:
        return self._idle.count(Line.LEASED)

    # Blocks in and out.

    def allocate(self, count: int) -> tuple[int, ...]:
        """`count` blocks to be written, now live; cached ones are reclaimed where free ones are short."""
        short = count - self.pool.free
        if short > self.pool.cached:
            raise InvariantError(f"{count} blocks asked for, {self.available} are available")
        if short > 0:
            self._remove(self._idle.first(short))
        return self.pool.allocate(count)

    def hold(self, blocks: Iterable[int]) -> None:
        """Found blocks, now live, to be read."""
        for block in blocks:
            self._not_idle(block)
            self.pool.hold(block)

    def release(self, blocks: Sequence[int], last_step: int, *, session: bool = False) -> None:
        """A block table, from its head on. session: of a turn that others will follow."""
        if session and self._session.ns:
            self._of_session.update((block, None) for block in blocks if block in self._key_of)
        self._rest(self.pool.release(blocks, last_step))

    def applied(self, step_id: int) -> None:
        self._rest(self.pool.applied(step_id))

    # Content.

    def find(self, keys: Sequence[BlockKey], most: int) -> list[int]:
        """The blocks of the longest known start of the chain, `most` at most."""
        found: list[int] = []
        for key in keys[: max(0, most)]:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def knows(self, block: int) -> bool:
        """Whether its content can be found."""
        return block in self._key_of

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of them `available` counts."""
        return sum(block in self._idle for block in blocks)

    def shared_head(self, table: Sequence[int]) -> int:
        """Blocks at the table's head that others hold too."""
        if not self.pool.shared:
            return 0
        return next((at for at, block in enumerate(table) if self.pool.holders(block) < 2), len(table))

    def publish(self, parent: BlockKey, keys: Sequence[BlockKey], blocks: Sequence[int], tenant: str) -> None:
        """Live blocks are computed for good, in chain order after `parent` (empty: the start). A key that another
        block has already stays with that one."""
        stored: list[BlockKey] = []
        for key, block in zip(keys, blocks, strict=True):
            self._promised.pop(key, None)
            if key in self._block_of:
                self._tell_stored(parent, stored)
                stored, parent = [], key
                continue
            self.pool.keep(block)
            self._block_of[key], self._key_of[block], self._tenant_of[block] = block, key, tenant
            stored.append(key)
        self._tell_stored(parent, stored)

    def withdraw(self, blocks: Iterable[int]) -> None:
        """What these blocks hold is not to be found any more: a step failed that read them."""
        self._remove([block for block in blocks if block in self._key_of])

    def flush(self) -> tuple[int, int]:
        """Nothing that nobody holds is to be found any more, leased, pinned or not. Returns how many blocks those were,
        and how many are left, which somebody holds."""
        unheld = [block for block in self._key_of if not self.pool.holders(block)]
        self._remove(unheld)
        return len(unheld), len(self._key_of)

    # Blocks being computed.

    def promise(self, keys: Iterable[BlockKey], holder: object) -> None:
        """`holder` will publish these, unless it ends before."""
        for key in keys:
            if key not in self._block_of:
                self._promised.setdefault(key, holder)

    def promised(self, key: BlockKey) -> object | None:
        return self._promised.get(key)

    def break_promises(self, keys: Iterable[BlockKey], holder: object) -> None:
        for key in keys:
            if self._promised.get(key) is holder:
                del self._promised[key]

    # Pins and leases.

    def expire(self, now: int) -> None:
        """What ends at `now` or before is over. Called before anything is decided on the state of the cache."""
        self._now = now
        self.expire_pins(now)
        leased = self._idle.leased()
        while leased:
            block, since = next(iter(leased.items()))
            if now - since < self._session.ttl_ns(1 - (self.pool.free + self._loose) / self.pool.total):
                break
            self._idle.expire(block)
            self._idle_of[self._tenant_of[block]].expire(block)
            del self._of_session[block]

    @property
    def _loose(self) -> int:
        """Idle blocks that no lease or pin is on."""
        return self._idle.count(Line.LOOSE) + self._idle.count(Line.EXPIRED)

    def lease(self, keys: Sequence[BlockKey], tenant: str, ttl_ns: int, now: int) -> int:
        """Pins the known start of the chain for so long, or ends its pin for 0; returns the blocks pinned."""
        self.expire(now)
        if ttl_ns > 0:
            return self.pin(keys, now + ttl_ns, tenant)
        self.unpin(keys)
        return 0

    def pin(self, keys: Sequence[BlockKey], until: int, tenant: str) -> int:
        """Pins the known start of the chain until then; returns the blocks pinned, as many as the quota allows."""
        pinned: list[int] = []
        for block in self.find(keys, len(keys)):
            if self._key_of[block] not in self._pins:
                if self._pinned_of.get(tenant, 0) >= self._quota:
                    break
                self._pinned_of[tenant] = self._pinned_of.get(tenant, 0) + 1
            pinned.append(block)
        for block in reversed(pinned):  # the tail is to go first
            key = self._key_of[block]
            self._pins[key] = _Pin(until, tenant)
            self._pins_made += 1
            heappush(self._pin_ends, (until, self._pins_made, key))
            if block in self._idle:
                self._not_idle(block)
                self._add_idle(block)
        return len(pinned)

    def unpin(self, keys: Sequence[BlockKey]) -> None:
        for key in reversed(keys):
            self._unpin(key)

    def expire_pins(self, now: int) -> None:
        """Leases that end at `now` or before are over."""
        while self._pin_ends and self._pin_ends[0][0] <= now:
            until, _, key = heappop(self._pin_ends)
            pin = self._pins.get(key)
            if pin is not None and pin.until == until:
                self._unpin(key)

    # How it is done.

    def _rest(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._add_idle(block)
            own = self._idle_of[self._tenant_of[block]]
            if len(own) > self._quota:
                first = own.first(1)[0]
                self._remove([block if own.line(first) is Line.PINNED else first])

    def _add_idle(self, block: int) -> None:
        if self._key_of[block] in self._pins:
            line = Line.PINNED
        else:
            line = Line.LEASED if block in self._of_session else Line.LOOSE
        self._idle.add(block, line, self._now)
        self._idle_of.setdefault(self._tenant_of[block], IdleBlocks()).add(block, line, self._now)

    def _not_idle(self, block: int) -> None:
        if self._idle.discard(block):
            tenant = self._tenant_of[block]
            own = self._idle_of[tenant]
            own.discard(block)
            if not own:
                del self._idle_of[tenant]

    def _remove(self, blocks: Sequence[int]) -> None:
        keys = []
        for block in blocks:
            self._not_idle(block)
            key = self._key_of.pop(block)
            self._unpin(key)
            self._of_session.pop(block, None)
            del self._block_of[key], self._tenant_of[block]
            self.pool.drop(block)
            keys.append(key)
        if keys and self._tell is not None:
            self._tell(KvRemoved(self._lane, tuple(keys)))

    def _unpin(self, key: BlockKey) -> None:
        pin = self._pins.pop(key, None)
        if pin is None:
            return
        self._pinned_of[pin.tenant] -= 1
        if not self._pinned_of[pin.tenant]:
            del self._pinned_of[pin.tenant]
        block = self._block_of[key]
        if block in self._idle:  # it rests from now on
            self._not_idle(block)
            self._add_idle(block)

    def _tell_stored(self, parent: BlockKey, keys: list[BlockKey]) -> None:
        if keys and self._tell is not None:
            self._tell(KvStored(self._lane, tuple(keys), parent, self._block_size))

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """`tables` are the block tables of all holders. Raises InvariantError."""
        self.pool.check(tables)
        if {block: key for key, block in self._block_of.items()} != self._key_of:
            raise InvariantError(f"lane {self._lane}: keys and blocks disagree")
        if self._tenant_of.keys() != self._key_of.keys():
            raise InvariantError(f"lane {self._lane}: a published block has no tenant")
        idle = list(self._idle)
        if len(idle) != self.pool.cached or any(
            self.pool.holders(block) or block not in self._key_of for block in idle
        ):
            raise InvariantError(f"lane {self._lane}: {idle} are to be reclaimed, {self.pool.cached} blocks are cached")
        if sorted(block for own in self._idle_of.values() for block in own) != sorted(idle) or any(
            own.line(block) != self._idle.line(block) for own in self._idle_of.values() for block in own
        ):
            raise InvariantError(f"lane {self._lane}: the tenants' idle blocks are not the idle blocks")
        if any(len(own) > self._quota for own in self._idle_of.values()):
            raise InvariantError(f"lane {self._lane}: a tenant keeps more than {self._quota} blocks")
        for block in idle:
            line = self._idle.line(block)
            if (self._key_of[block] in self._pins) != (line is Line.PINNED):
                raise InvariantError(f"lane {self._lane}: block {block} is {line.name}, and its pin says otherwise")
            if line is not Line.PINNED and (block in self._of_session) != (line is Line.LEASED):
                raise InvariantError(f"lane {self._lane}: block {block} is {line.name}, and its lease says otherwise")
        rests = list(self._idle.leased().values())
        if rests != sorted(rests):
            raise InvariantError(f"lane {self._lane}: leases are out of order: {rests}")
        if any(block not in self._key_of for block in self._of_session):
            raise InvariantError(f"lane {self._lane}: a leased block can't be found")
        if any(key not in self._block_of for key in self._pins):
            raise InvariantError(f"lane {self._lane}: a lease outlives its block")
        counted: dict[str, int] = {}
        for pin in self._pins.values():
            counted[pin.tenant] = counted.get(pin.tenant, 0) + 1
        if counted != self._pinned_of:
            raise InvariantError(f"lane {self._lane}: {counted} are pinned, {self._pinned_of} are counted")

    def check_promises(self, holders: Iterable[object]) -> None:
        alive = {id(holder) for holder in holders}
        if any(id(holder) not in alive for holder in self._promised.values()):
            raise InvariantError(f"lane {self._lane}: somebody who left has promised blocks")
        if any(key in self._block_of for key in self._promised):
            raise InvariantError(f"lane {self._lane}: a published block is promised")
