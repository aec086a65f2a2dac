"""What the engine tells to whoever counts and logs. Defined by its teller, so that the engine runs without either."""

from dataclasses import dataclass
from typing import Protocol

from opentelemetry.trace import Span

from services.errors import ServiceError
from services.scheduler.core.calls import Load, Totals, Usage
from services.scheduler.live import LiveAnswer, LiveRequest
from services.scheduler.request_trace import Times


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that was never queued. request_id, tenant: as far as they could be read."""

    error: ServiceError
    span: Span  # the call's own
    request_id: str
    tenant: str
    prompt_tokens: int
    total_ns: int


class Observer(Protocol):
    def accepted(self, live: LiveRequest) -> None:
        """A request is queued."""

    def refused(self, refusal: Refusal) -> None:
        """A request was refused before it was queued."""

    def tokens(self, answer: LiveAnswer) -> None:
        """Tokens were delivered; `answer.trace.inter_token_ns` is the gap before them, if there was one."""

    def preempted(self, answer: LiveAnswer, why: str) -> None:
        """It lost its blocks: "preempted" or "executor_lost"."""

    def ended(self, live: LiveRequest, usage: Usage, times: Times, outcome: str) -> None:
        """Once per accepted request; usage and times are of all its answers."""

    def planned(self, tokens: int, sequences: int) -> None:
        """A step was planned."""

    def applied(self, elapsed_ns: int) -> None:
        """A step's result was taken, so long after it was planned."""

    def lost(self) -> None:
        """An executor's lease is over."""

    def load(self, load: Load, totals: Totals) -> None:
        """Now and then."""


class Silent:
    """Counts nothing."""

    def accepted(self, live: LiveRequest) -> None: ...

    def refused(self, refusal: Refusal) -> None: ...

    def tokens(self, answer: LiveAnswer) -> None: ...

    def preempted(self, answer: LiveAnswer, why: str) -> None: ...

    def ended(self, live: LiveRequest, usage: Usage, times: Times, outcome: str) -> None: ...

    def planned(self, tokens: int, sequences: int) -> None: ...

    def applied(self, elapsed_ns: int) -> None: ...

    def lost(self) -> None: ...

    def load(self, load: Load, totals: Totals) -> None: ...
