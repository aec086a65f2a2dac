"""Who was served how much: the virtual token counters of the fair policy.

Knows tenants as names, and nothing of queues. What a tenant was served grows by uncached prompt tokens when they are
computed and by twice the output tokens when they are drawn, over the tenant's weight; what is recomputed was paid for
already. The tenant with the least comes first, so two that both have work waiting differ by a bound that does not grow
with time. (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.)

That paper charges the prompt at admission. Then a tenant of long prompts pays for many before one is computed, and the
others run ahead of it meanwhile. So here a running sequence only holds a *deposit*, what it is about to cost in the
next moments, which is given back at its end: without one, whoever is behind would get all free slots at once.

Integer arithmetic: equal calls give equal counters.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from services.scheduler.core.calls import InvariantError

PROMPT_COST: Final = 1  # a token
OUTPUT_COST: Final = 2
_UNIT: Final = 1 << 20  # of a counter, for a token at weight 1
_MEMORY: Final = 1024  # tenants without work that are remembered


class TokenCounters:
    def __init__(self, weights: Mapping[str, float], default_weight: float = 1.0) -> None:
        self._weights = dict(weights)
        self._default = default_weight
        self._served: dict[str, int] = {}
        self._held: dict[str, int] = {}  # deposits; no zeros
        self._changed: dict[str, None] = {}  # tenants charged since somebody asked
        self._floor = 0  # counter of the tenant whose work left the queue last

    def __len__(self) -> int:
        return len(self._served)

    def served(self, tenant: str) -> int:
        return self._served.get(tenant, 0)

    def counter(self, tenant: str) -> int:
        """What the order is by: service and deposits."""
        return self._served.get(tenant, 0) + self._held.get(tenant, 0)

    def charge(self, tenant: str, *, prompt: int = 0, output: int = 0) -> None:
        cost = self._weighed(tenant, prompt, output)
        self._served[tenant] = self.served(tenant) + cost
        self._changed[tenant] = None

    def of_prompt(self, tenant: str, tokens: int) -> int:
        """By how much so many tokens of a prompt move its counter."""
        return self._weighed(tenant, tokens, 0)

    def price(self, tenant: str, *, prompt: int, output: int, soon: int) -> int:
        """The deposit for a sequence that has so many tokens before it, and draws `soon` of them in a moment."""
        return min(self._weighed(tenant, prompt, output), self._weighed(tenant, 0, soon))

    def deposit(self, tenant: str, amount: int) -> None:
        """Less than 0: what was held is given back."""
        held = self._held.pop(tenant, 0) + amount
        if held < 0:
            raise InvariantError(f"tenant {tenant} is given back {-amount}, more than it deposited")
        if held:
            self._held[tenant] = held
        self._changed[tenant] = None

    def take_changed(self) -> tuple[str, ...]:
        """Tenants whose counters moved since the last call."""
        changed = tuple(self._changed)
        self._changed.clear()
        return changed

    def returned(self, tenant: str, waiting: Iterable[str]) -> None:
        """A tenant with nothing in the queue comes back: idle time earns no credit. `waiting`: tenants that have."""
        least = min(map(self.counter, waiting), default=self._floor)
        self._served[tenant] = max(self.served(tenant), least - self._held.get(tenant, 0))
        self._changed[tenant] = None

    def emptied(self, tenant: str) -> None:
        """The tenant's last waiting sequence was admitted or ended."""
        self._floor = self.counter(tenant)

    def forget_idle(self, live: Mapping[str, object]) -> None:
        """Bounds the memory: of tenants without work, those that were served most are remembered."""
        idle = [tenant for tenant in self._served if tenant not in live]
        if len(idle) > 2 * _MEMORY:
            for tenant in sorted(idle, key=lambda name: (self.served(name), name))[:-_MEMORY]:
                del self._served[tenant]

    def check(self, deposits: Mapping[str, int]) -> None:
        """`deposits`: of those that run, by tenant. Raises InvariantError."""
        if deposits != self._held:
            raise InvariantError(f"tenants hold deposits of {self._held}, and their sequences made {deposits}")

    def _weighed(self, tenant: str, prompt: int, output: int) -> int:
        cost = prompt * PROMPT_COST + output * OUTPUT_COST
        return int(cost * _UNIT / self._weights.get(tenant, self._default))
