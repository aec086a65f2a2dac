"""The shell's part of the prefix cache: keys for ids, pins, and the log of KV events.

The core knows keys only, this knows how they are made of ids; the engine calls it and owns both. Keys are made for
blocks of one size, that of the executor attached last: executors with other blocks serve without a cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.errors import FailedPrecondition
from services.scheduler.core.calls import LaneId
from services.scheduler.core.core import SchedulerCore
from services.scheduler.intake import CacheUse
from services.scheduler.kv_events import KvEventLog
from services.scheduler.prefix_keys import KeyChain, NameSpace


@dataclass(frozen=True, slots=True)
class PrefixConfig:
    enabled: bool = True
    pin_max_ns: int = 3_600_000_000_000
    kept_event_keys: int = 1 << 16


@dataclass(frozen=True, slots=True)
class Pinned:
    tokens: int
    ttl_ns: int


@dataclass(slots=True)
class Prefixes:
    config: PrefixConfig
    log: KvEventLog = field(init=False)
    _block_size: int = 0
    _executors: dict[LaneId, str] = field(default_factory=dict)  # targets

    def __post_init__(self) -> None:
        self.log = KvEventLog(self.config.kept_event_keys)

    def attached(self, lane: LaneId, executor: str, block_size: int) -> None:
        self._executors[lane] = executor
        self._block_size = block_size

    def chain(self, tenant: str, cache: CacheUse, numerics: str) -> KeyChain | None:
        """None for a request that takes no part in the cache."""
        if not self.config.enabled or cache.bypass or not self._block_size:
            return None
        return KeyChain(NameSpace(numerics, tenant, self._block_size, cache.salt))

    def pin(
        self,
        core: SchedulerCore,
        tenant: str,
        cache: CacheUse,
        numerics: str,
        prompt_ids: Sequence[int],
        ttl_ns: int,
        now: int,
    ) -> Pinned:
        """Raises FailedPrecondition where nothing is ever cached."""
        chain = self.chain(tenant, cache, numerics)
        if chain is None:
            raise FailedPrecondition("nothing is cached here: the prefix cache is off, or bypassed", reason="NO_CACHE")
        ttl_ns = min(ttl_ns, self.config.pin_max_ns)
        blocks = core.pin(chain.grow(prompt_ids), chain.block_size, tenant, ttl_ns, now)
        return Pinned(blocks * chain.block_size, ttl_ns)

    def collect(self, core: SchedulerCore) -> None:
        """Moves what the core has to tell into the log."""
        for event in core.take_kv_events():
            self.log.add(event, self._executors[event.lane])

    def lost(self, lane: LaneId) -> None:
        del self._executors[lane]
