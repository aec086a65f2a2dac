"""Which of several equal servers a request goes to. Pure.

Requests with one beginning go to one server, whose prefix cache has it: each server scores the key and the highest
score wins (rendezvous hashing: Thaler, Ravishankar 1998), so a server that comes or goes moves no key between the
others, and all who know the same names agree. No server is given more than `BOUND` times its even share: then the key's
next best takes it (bounded loads: Mirrokni, Thorup, Zadimoghaddam 2016).
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from math import ceil
from typing import Final

BOUND: Final = 1.25
FIRST_BLOCK: Final = 16  # tokens; the default size of a KV block


def key_of(tenant: str, salt: str | None, prompt_ids: Sequence[int]) -> bytes:
    """Equal for prompts that can share their first KV block."""
    digest = blake2b(digest_size=16)
    for part in (tenant.encode(), b"" if salt is None else b"salt " + salt.encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    digest.update(b"".join(one.to_bytes(4, "little") for one in prompt_ids[:FIRST_BLOCK]))
    return digest.digest()


def order(key: bytes, active: Mapping[str, int], bound: float = BOUND) -> list[str]:
    """All servers, the one to take first; those at the bound come last.

    active: requests that each has now; at least one server. bound: at least 1; so one server is always below it.
    """
    most = ceil(bound * (sum(active.values()) + 1) / len(active))
    return sorted(active, key=lambda name: (active[name] >= most, _score(key, name), name))


def _score(key: bytes, name: str) -> int:
    """Lower is better."""
    return int.from_bytes(blake2b(name.encode(), key=key, digest_size=8).digest(), "little")
