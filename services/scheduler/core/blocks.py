"""The block pool of one lane: which KV blocks are free, live, fenced or cached, and how many hold each.

Knows steps only as numbers, owners and keys not at all. The fence: a block is reassigned only in a step planned after
the results of every step that references it were applied; until then a block that nobody holds is *fenced*. A block
that is *kept*, because its content can be found again, becomes *cached* instead of free; it may be held again at any
time, also while fenced, since whoever finds it only reads it.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from enum import IntEnum

from services.scheduler.core.calls import InvariantError


class _State(IntEnum):
    FREE = 0
    LIVE = 1
    FENCED = 2
    CACHED = 3


class BlockPool:
    def __init__(self, total: int) -> None:
        self.total = total
        self.fenced = 0
        self.cached = 0
        self.shared = 0  # blocks with more than one holder
        self._state = bytearray(total)  # a _State a block
        self._holders = [0] * total
        self._kept = bytearray(total)  # 1: its content can be found
        self._last_use = [0] * total  # the last step that references it, of holders that gave it back
        self._free = deque(range(total))  # longest free first
        self._fences: dict[int, dict[int, None]] = {}  # fenced blocks by their last use; every such step is in flight
        self._applied = 0  # steps up to here have results

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def live(self) -> int:
        return self.total - self.free - self.fenced - self.cached

    def holders(self, block: int) -> int:
        return self._holders[block]

    def allocate(self, count: int) -> tuple[int, ...]:
        """`count` free blocks, now live. The caller looked at `free` first: asking for more is an InvariantError."""
        if not 0 <= count <= len(self._free):
            raise InvariantError(f"{count} blocks asked for, {len(self._free)} are free")
        take, state, holders, live = self._free.popleft, self._state, self._holders, _State.LIVE.value
        blocks = tuple([take() for _ in range(count)])
        for block in blocks:
            state[block] = live
            holders[block] = 1
        return blocks

    def hold(self, block: int) -> None:
        """One more holder of a kept block, to read it."""
        if not self._kept[block]:
            raise InvariantError(f"block {block} is held again, and its content is not known")
        match self._state[block]:
            case _State.CACHED:
                self.cached -= 1
            case _State.FENCED:
                self._lift(block)
        self._state[block] = _State.LIVE
        self._holders[block] += 1
        self.shared += self._holders[block] == 2

    def keep(self, block: int) -> None:
        """The content of a live block can be found from now on."""
        if self._state[block] != _State.LIVE:
            raise InvariantError(f"block {block} is published while {_State(self._state[block]).name}")
        self._kept[block] = 1

    def drop(self, block: int) -> None:
        """The content of a kept block can't be found any more; a cached one becomes free."""
        if not self._kept[block]:
            raise InvariantError(f"block {block} is dropped, and was not kept")
        self._kept[block] = 0
        if self._state[block] == _State.CACHED:
            self.cached -= 1
            self._state[block] = _State.FREE
            self._free.append(block)

    def release(self, blocks: Sequence[int], last_step: int) -> list[int]:
        """A holder gives live blocks back. `last_step` is the last planned step in which it references them; 0: none
        did. Returns those that became cached."""
        cached: list[int] = []
        state, holders, last_use, live = self._state, self._holders, self._last_use, _State.LIVE.value
        for block in blocks:
            if state[block] != live:
                raise InvariantError(f"block {block} is released while {_State(state[block]).name}")
            if last_use[block] < last_step:
                last_use[block] = last_step
            holders[block] -= 1
            if holders[block] == 1:
                self.shared -= 1
            elif holders[block] == 0:
                if self._last_use[block] <= self._applied:
                    self._settle(block, cached)
                else:
                    self._state[block] = _State.FENCED
                    self.fenced += 1
                    self._fences.setdefault(self._last_use[block], {})[block] = None
        return cached

    def applied(self, step_id: int) -> list[int]:
        """The results of `step_id` are in: what only it fenced is free, or cached. Returns the cached ones."""
        if step_id != self._applied + 1:
            raise InvariantError(f"step {step_id} applied after step {self._applied}")
        self._applied = step_id
        cached: list[int] = []
        for block in self._fences.pop(step_id, ()):
            self.fenced -= 1
            self._settle(block, cached)
        return cached

    def _settle(self, block: int, cached: list[int]) -> None:
        if self._kept[block]:
            self._state[block] = _State.CACHED
            self.cached += 1
            cached.append(block)
        else:
            self._state[block] = _State.FREE
            self._free.append(block)

    def _lift(self, block: int) -> None:
        fence = self._fences[self._last_use[block]]
        del fence[block]
        if not fence:
            del self._fences[self._last_use[block]]
        self.fenced -= 1

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """`tables` are the block tables of all holders. Raises InvariantError."""
        held = [0] * self.total
        for table in tables:
            if len(set(table)) != len(table):
                raise InvariantError(f"a block comes twice in the table {table}")
            for block in table:
                held[block] += 1
        for block, holders in enumerate(held):
            state = _State(self._state[block])
            if holders and state is not _State.LIVE:
                raise InvariantError(f"block {block} is owned and {state.name}")
            if not holders and state is _State.LIVE:
                raise InvariantError(f"block {block} is live, and nobody holds it")
            if holders != self._holders[block]:
                raise InvariantError(f"block {block} has {holders} holders and counts {self._holders[block]}")
            if self._kept[block] and state is _State.FREE:
                raise InvariantError(f"block {block} is free, and its content can be found")
            if not self._kept[block] and state is _State.CACHED:
                raise InvariantError(f"block {block} is cached, and its content can't be found")
        fenced = [block for fence in self._fences.values() for block in fence]
        for name, state, blocks in (("free", _State.FREE, list(self._free)), ("fenced", _State.FENCED, fenced)):
            if sorted(blocks) != [block for block in range(self.total) if self._state[block] == state]:
                raise InvariantError(f"the blocks listed as {name} are {blocks}; others are in that state")
        counted = (self._state.count(_State.FENCED), self._state.count(_State.CACHED), sum(one > 1 for one in held))
        if counted != (self.fenced, self.cached, self.shared):
            raise InvariantError(f"fenced, cached and shared are {counted}; counted {self.fenced, self.cached}")
        if any(step <= self._applied for step in self._fences):
            raise InvariantError(f"fences {list(self._fences)} outlive step {self._applied}")
