"""What the engine tells to whoever counts and logs. Defined by its teller, so that the engine runs without either."""

from typing import Protocol

from services.scheduler.calls import Load, Totals, Usage
from services.scheduler.live import LiveRequest
from services.scheduler.request_trace import Times


class Observer(Protocol):
    def accepted(self, live: LiveRequest) -> None:
        """A request is queued."""

    def rejected(self, reason: str) -> None:
        """A request was refused before it was queued."""

    def tokens(self, live: LiveRequest) -> None:
        """Tokens were delivered; `live.trace.inter_token_ns` is the gap before them, if there was one."""

    def preempted(self, live: LiveRequest, why: str) -> None:
        """It lost its blocks: "preempted" or "executor_lost"."""

    def ended(self, live: LiveRequest, usage: Usage, times: Times, outcome: str) -> None:
        """Once per accepted request."""

    def load(self, load: Load, totals: Totals) -> None:
        """Now and then."""


class Silent:
    """Counts nothing."""

    def accepted(self, live: LiveRequest) -> None: ...

    def rejected(self, reason: str) -> None: ...

    def tokens(self, live: LiveRequest) -> None: ...

    def preempted(self, live: LiveRequest, why: str) -> None: ...

    def ended(self, live: LiveRequest, usage: Usage, times: Times, outcome: str) -> None: ...

    def load(self, load: Load, totals: Totals) -> None: ...
