"""Who was served how much: the virtual token counters of the fair policy.

Knows tenants as names, and nothing of queues. A counter grows by uncached prompt tokens and by twice the output
tokens, over the tenant's weight; what is recomputed was paid for already. The tenant with the least comes first, so
two that both have work waiting differ by a bound that does not grow with time. (Sheng et al., "Fairness in Serving
Large Language Models", OSDI 2024.) Integer arithmetic: equal calls give equal counters.
"""

from collections.abc import Iterable, Mapping
from typing import Final

PROMPT_COST: Final = 1  # a token
OUTPUT_COST: Final = 2
_UNIT: Final = 1 << 20  # of a counter, for a token at weight 1
_MEMORY: Final = 1024  # tenants without work that are remembered


class TokenCounters:
    def __init__(self, weights: Mapping[str, float], default_weight: float = 1.0) -> None:
        self._weights = dict(weights)
        self._default = default_weight
        self._served: dict[str, int] = {}
        self._changed: dict[str, None] = {}  # tenants charged since somebody asked
        self._floor = 0  # counter of the tenant whose work left the queue last

    def __len__(self) -> int:
        return len(self._served)

    def served(self, tenant: str) -> int:
        return self._served.get(tenant, 0)

    def charge(self, tenant: str, *, prompt: int = 0, output: int = 0) -> None:
        cost = prompt * PROMPT_COST + output * OUTPUT_COST
        weight = self._weights.get(tenant, self._default)
        self._served[tenant] = self.served(tenant) + int(cost * _UNIT / weight)
        self._changed[tenant] = None

    def take_changed(self) -> tuple[str, ...]:
        """Tenants whose counters moved since the last call."""
        changed = tuple(self._changed)
        self._changed.clear()
        return changed

    def returned(self, tenant: str, waiting: Iterable[str]) -> None:
        """A tenant with nothing in the queue comes back: idle time earns no credit. `waiting`: tenants that have."""
        least = min(map(self.served, waiting), default=self._floor)
        self._served[tenant] = max(self.served(tenant), least)
        self._changed[tenant] = None

    def emptied(self, tenant: str) -> None:
        """The tenant's last waiting sequence was admitted or ended."""
        self._floor = self.served(tenant)

    def forget_idle(self, live: Mapping[str, object]) -> None:
        """Bounds the memory: of tenants without work, those that were served most are remembered."""
        idle = [tenant for tenant in self._served if tenant not in live]
        if len(idle) > 2 * _MEMORY:
            for tenant in sorted(idle, key=lambda name: (self.served(name), name))[:-_MEMORY]:
                del self._served[tenant]
