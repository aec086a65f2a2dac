"""What the clients tell a tracer, and the tracer that does nothing. OpenTelemetry itself is `_otel`'s, if installed.

Invariant: a span ends exactly once, and is never the current one: it outlives the function that starts it.
"""

import importlib.util
from collections.abc import Sequence
from typing import Protocol

from tercet._request import GenerateCall
from tercet.errors import TercetError
from tercet.options import Settings
from tercet.types import Accepted, Answer, Usage

Headers = Sequence[tuple[str, str]]


class CallSpan(Protocol):
    """The span of one generation. trace_id: 32 hexadecimal digits; None: not traced. headers: the context to send."""

    @property
    def trace_id(self) -> str | None: ...

    @property
    def headers(self) -> Headers: ...

    def accepted(self, accepted: Accepted) -> None:
        """The request is queued."""

    def first_chunk(self, seconds: float) -> None:
        """The first delta came, `seconds` after the start."""

    def retried(self, attempt: int, error: TercetError) -> None:
        """`error` ended a try; number `attempt` is about to start."""

    def end(self, answers: Sequence[Answer], usage: Usage | None, error: TercetError | None) -> None:
        """It is over."""


class Tracing(Protocol):
    """Starts spans."""

    def start(self, call: GenerateCall) -> CallSpan:
        """The span of a generation, child of the current one."""

    def headers(self) -> Headers:
        """The current context, for a call without a span of its own."""


class NoSpan:
    """Nothing is recorded."""

    trace_id: str | None = None
    headers: Headers = ()

    def accepted(self, accepted: Accepted) -> None:
        pass

    def first_chunk(self, seconds: float) -> None:
        pass

    def retried(self, attempt: int, error: TercetError) -> None:
        pass

    def end(self, answers: Sequence[Answer], usage: Usage | None, error: TercetError | None) -> None:
        pass


class NoTracing:
    """OpenTelemetry is not installed."""

    def start(self, call: GenerateCall) -> CallSpan:
        return NoSpan()

    def headers(self) -> Headers:
        return ()


def make_tracing(settings: Settings) -> Tracing:
    """OpenTelemetry where `opentelemetry-api` is installed, else nothing."""
    if importlib.util.find_spec("opentelemetry") is None:
        return NoTracing()
    from tercet._otel import OtelTracing

    return OtelTracing(settings)
