"""Keys of KV blocks: a block's tokens, all tokens before them, and in whose name and by what they were computed.

Pure. Each key is a SHA-256 over the key before it and the ids of the block, so equal keys mean equal prefixes, and
nobody can make two that collide. Every part that goes into a hash is framed by its length and hashes of different
kinds begin with different tags, so no two lists of parts give the same bytes.

The tenant always goes in, on the server's own account of who that is: a caller's salt divides its own name space and
can't reach another's.
"""

import hashlib
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from services.scheduler.core.calls import BlockKey

_ROOT = b"tercet.prefix.root.1"
_BLOCK = b"tercet.prefix.block.1"


@dataclass(frozen=True, slots=True)
class NameSpace:
    """Within which equal tokens give equal keys and values that may be shared."""

    numerics: str  # model, revision, KV format, back end: as told by the executor
    tenant: str
    block_size: int  # tokens
    salt: str | None = None  # None: the tenant's common one, which no salt equals
    adapter: str = ""


def root(space: NameSpace) -> BlockKey:
    """What the key of a first block is chained to."""
    salt = () if space.salt is None else (space.salt.encode(),)
    return _hash(
        _ROOT,
        space.numerics.encode(),
        space.adapter.encode(),
        space.tenant.encode(),
        space.block_size.to_bytes(8, "little"),
        *salt,
    )


def chained(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """The key of the block behind `parent` that holds these ids, each below 2**32."""
    return _hash(_BLOCK, parent, _ids(token_ids))


class KeyChain:
    """The keys of one growing sequence."""

    def __init__(self, space: NameSpace) -> None:
        self.block_size = space.block_size
        self._last = root(space)
        self._keyed = 0  # tokens

    def copy(self) -> "KeyChain":
        """Of a sequence with the same start, to grow by itself from here on."""
        return copy(self)

    def grow(self, token_ids: Sequence[int]) -> tuple[BlockKey, ...]:
        """`token_ids`: the sequence from its start. The keys of the blocks that became full since the last call."""
        keys = []
        while (end := self._keyed + self.block_size) <= len(token_ids):
            self._last = chained(self._last, token_ids[self._keyed : end])
            self._keyed = end
            keys.append(self._last)
        return tuple(keys)


def _ids(token_ids: Sequence[int]) -> bytes:
    return b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)


def _hash(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    digest.update(len(parts).to_bytes(8, "little"))
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
