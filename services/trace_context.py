"""W3C trace context in and out of gRPC metadata.

Owns the two headers `traceparent` and `tracestate`. Must not touch the current context: a context is a value
that callers pass on, since a current span across a `yield` or a queue belongs to the wrong request sooner or
later. Source: W3C Trace Context, Recommendation of 2021-11-23.
"""

from collections.abc import Iterable
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, format_trace_id, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes

from services.names import MD_TRACEPARENT, MD_TRACESTATE

_W3C: Final = TraceContextTextMapPropagator()

Metadata = Iterable[tuple[str, str | bytes]]


def extract(metadata: Metadata) -> Context:
    """The remote parent that metadata names; an empty Context when there is none or it is malformed."""
    carrier = {
        key: value for key, value in metadata if key in (MD_TRACEPARENT, MD_TRACESTATE) and isinstance(value, str)
    }
    return _W3C.extract(carrier, Context())


def inject(span: Span) -> tuple[tuple[str, str], ...]:
    """The metadata that makes `span` the parent of the callee's work; empty for an invalid span."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, set_span_in_context(span, Context()))
    return tuple(carrier.items())


def traceparent(span: Span) -> str:
    """`span` as one header value, to ride inside a message; "" for an invalid span."""
    return dict(inject(span)).get(MD_TRACEPARENT, "")


def context_of(span: Span) -> Context:
    """A Context whose only content is `span`: what to pass when starting its children."""
    return set_span_in_context(span, Context())


def link_to(header: str, attributes: Attributes = None) -> Link | None:
    """A link to the span that a `traceparent` value names; None when it names none."""
    span = get_current_span(extract([(MD_TRACEPARENT, header)])).get_span_context()
    return Link(span, attributes) if span.is_valid else None


def trace_id(span: Span) -> str:
    """The trace id as 32 hexadecimal digits; "" for an invalid span."""
    context = span.get_span_context()
    return format_trace_id(context.trace_id) if context.is_valid else ""
