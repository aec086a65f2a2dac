"""Generations as OpenTelemetry spans, by the GenAI semantic conventions v0.1.0. Needs `opentelemetry-api`.

Owns the spelling of what the SDK records. No prompt and no answer is recorded.
"""

from collections.abc import Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from tercet._request import GenerateCall
from tercet._target import server_address
from tercet._tracing import CallSpan, Headers
from tercet.errors import TercetError
from tercet.options import Settings
from tercet.types import Accepted, Answer, Usage

_OPERATIONS: Final = {"chat": "chat", "generate": "text_completion"}
_W3C: Final = TraceContextTextMapPropagator()


class OtelTracing:
    """Spans from the settings' tracer provider, or the global one."""

    def __init__(self, settings: Settings) -> None:
        self._tracer = trace.get_tracer("tercet", tracer_provider=settings.tracer_provider)
        address, port = server_address(settings.target)
        self._server: dict[str, AttributeValue] = {"server.address": address}
        if port is not None:
            self._server["server.port"] = port

    def start(self, call: GenerateCall) -> CallSpan:
        """The span of a generation, child of the current one."""
        model = call.message.model
        span = self._tracer.start_span(
            f"{call.operation} {model}" if model else call.operation,
            kind=SpanKind.CLIENT,
            attributes={**self._server, **_request_attributes(call)},
        )
        return OtelSpan(span, call.operation)

    def headers(self) -> Headers:
        """The current context, as W3C headers."""
        return _inject(None)


class OtelSpan:
    """One generation."""

    def __init__(self, span: Span, operation: str) -> None:
        self._span = span
        self._operation = operation
        self.headers: Headers = _inject(trace.set_span_in_context(span, Context()))
        context = span.get_span_context()
        self.trace_id: str | None = trace.format_trace_id(context.trace_id) if context.is_valid else None

    def accepted(self, accepted: Accepted) -> None:
        self._span.update_name(f"{self._operation} {accepted.model}" if accepted.model else self._operation)
        self._span.set_attribute("gen_ai.response.model", accepted.model)
        self._span.set_attribute("gen_ai.response.id", accepted.request_id)

    def first_chunk(self, seconds: float) -> None:
        self._span.set_attribute("gen_ai.response.time_to_first_chunk", seconds)

    def retried(self, attempt: int, error: TercetError) -> None:
        self._span.add_event(
            "retry", {"tercet.attempt": attempt, "error.type": error.code, "tercet.reason": error.reason}
        )

    def end(self, answers: Sequence[Answer], usage: Usage | None, error: TercetError | None) -> None:
        reasons = [answer.finish_reason.value for answer in answers if answer.finish_reason is not None]
        if reasons:
            self._span.set_attribute("gen_ai.response.finish_reasons", reasons)
        if usage is not None:
            self._span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
            self._span.set_attribute("gen_ai.usage.output_tokens", usage.delivered_tokens)
            self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)
        if error is not None:
            self._span.set_attribute("error.type", error.code)
            self._span.set_status(Status(StatusCode.ERROR, error.reason))
        self._span.end()


def _request_attributes(call: GenerateCall) -> dict[str, AttributeValue]:
    sampling = call.sampling
    values: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": _OPERATIONS[call.operation],
        "gen_ai.provider.name": "tercet",
        "gen_ai.request.model": call.message.model or None,
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        # OpenTelemetry's integers are signed; a seed is not.
        "gen_ai.request.seed": None if sampling.seed is None or sampling.seed >= 2**63 else sampling.seed,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.choice.count": sampling.n,
        "tercet.request.id": call.identity.request_id,
    }
    return {name: value for name, value in values.items() if value is not None}


def _inject(context: Context | None) -> Headers:
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, context)
    return tuple(carrier.items())
