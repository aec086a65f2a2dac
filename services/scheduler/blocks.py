"""The block pool of one lane: which KV blocks are free, live, or fenced.

Knows steps only as numbers and owners not at all. The fence: a block is reassigned only in a step planned after the
results of every step that references it were applied; until then a released block is *fenced*. A block that holds
a cached prefix will be a fourth state, between live and free.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from enum import IntEnum

from services.scheduler.calls import InvariantError


class _State(IntEnum):
    FREE = 0
    LIVE = 1
    FENCED = 2


class BlockPool:
    def __init__(self, total: int) -> None:
        self.total = total
        self._state = bytearray(total)  # a _State a block
        self._free = deque(range(total))  # longest free first
        self._fenced: dict[int, list[int]] = {}  # by the last step that references them; every such step is in flight
        self._applied = 0  # steps up to here have results

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def fenced(self) -> int:
        return sum(map(len, self._fenced.values()))

    @property
    def live(self) -> int:
        return self.total - self.free - self.fenced

    def allocate(self, count: int) -> tuple[int, ...]:
        """`count` free blocks, now live. The caller looked at `free` first: asking for more is an InvariantError."""
        if not 0 <= count <= len(self._free):
            raise InvariantError(f"{count} blocks asked for, {len(self._free)} are free")
        blocks = tuple(self._free.popleft() for _ in range(count))
        for block in blocks:
            self._state[block] = _State.LIVE
        return blocks

    def release(self, blocks: Sequence[int], last_step: int) -> None:
        """Give live blocks back. `last_step` is the last planned step that references them; 0: none did."""
        for block in blocks:
            if self._state[block] != _State.LIVE:
                raise InvariantError(f"block {block} is released while {_State(self._state[block]).name}")
            self._state[block] = _State.FREE if last_step <= self._applied else _State.FENCED
        if last_step <= self._applied:
            self._free.extend(blocks)
        elif blocks:
            self._fenced.setdefault(last_step, []).extend(blocks)

    def applied(self, step_id: int) -> None:
        """The results of `step_id` are in: what only it fenced is free."""
        if step_id != self._applied + 1:
            raise InvariantError(f"step {step_id} applied after step {self._applied}")
        self._applied = step_id
        blocks = self._fenced.pop(step_id, [])
        for block in blocks:
            self._state[block] = _State.FREE
        self._free.extend(blocks)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """`tables` are the block tables of all owners. Raises InvariantError."""
        owned: dict[int, int] = {}
        for table in tables:
            for block in table:
                owned[block] = owned.get(block, 0) + 1
                if self._state[block] != _State.LIVE:
                    raise InvariantError(f"block {block} is owned and {_State(self._state[block]).name}")
        doubled = [block for block, owners in owned.items() if owners > 1]
        if doubled:
            raise InvariantError(f"blocks {doubled} have two owners")
        if len(owned) != self.live:
            raise InvariantError(f"{self.live} blocks are live, {len(owned)} are owned")
        fenced = [block for blocks in self._fenced.values() for block in blocks]
        for name, state, blocks in (("free", _State.FREE, list(self._free)), ("fenced", _State.FENCED, fenced)):
            if any(self._state[block] != state for block in blocks):
                raise InvariantError(f"a block listed as {name} is in another state")
            if len(dict.fromkeys(blocks)) != len(blocks):
                raise InvariantError(f"a block is listed as {name} twice")
        if any(step <= self._applied for step in self._fenced):
            raise InvariantError(f"fences {list(self._fenced)} outlive step {self._applied}")
