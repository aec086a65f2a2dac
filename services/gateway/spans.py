"""The SERVER span of one HTTP request: started and ended by hand, never current, ended exactly once.

Owns which failures mark a span as an error: those from 500 on; a caller's mistake or a caller who left is not the
server's error.
"""

from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from services import names, trace_context
from services.gateway.openai import Generation
from services.gateway.transcript import Transcript


class RequestSpan:
    """One request's span. `context` is the parent of what the request starts."""

    def __init__(
        self, tracer: Tracer, method: str, route: str, scheme: str, headers: Sequence[tuple[str, str]]
    ) -> None:
        self._span = tracer.start_span(
            f"{method} {route}",
            context=trace_context.extract(headers),
            kind=SpanKind.SERVER,
            attributes={
                names.HTTP_REQUEST_METHOD: method,
                names.HTTP_ROUTE: route,
                names.URL_PATH: route,
                names.URL_SCHEME: scheme,
            },
        )
        self.context: Context = trace_context.context_of(self._span)
        self._ended = False

    @property
    def span(self) -> Span:
        return self._span

    @property
    def trace_id(self) -> str:
        return trace_context.trace_id(self._span)

    def identify(self, request_id: str) -> None:
        self._span.set_attribute(names.REQUEST_ID, request_id)

    def ask(self, generation: Generation) -> None:
        """What is asked for, without its text."""
        self._span.set_attribute(names.GEN_AI_REQUEST_STREAM, generation.stream)
        if generation.request.HasField("model"):
            self._span.set_attribute(names.GEN_AI_REQUEST_MODEL, generation.request.model)

    def answer(self, transcript: Transcript) -> None:
        """What there is so far, also of a request that fails or is given up."""
        self._span.set_attribute(names.PROMPT_TOKENS, transcript.prompt_tokens)
        self._span.set_attribute(names.OUTPUT_TOKENS, transcript.streamed_tokens)

    def end(self, status: int, outcome: str, error_type: str | None) -> None:
        """status: what the caller got, or would have got had it stayed. error_type: None for success."""
        if self._ended:
            return
        self._ended = True
        self._span.set_attribute(names.HTTP_RESPONSE_STATUS_CODE, status)
        self._span.set_attribute(names.OUTCOME, outcome)
        if error_type is not None:
            self._span.set_attribute(names.ERROR_TYPE, error_type)
            if status >= 500:
                self._span.set_status(Status(StatusCode.ERROR, error_type))
        self._span.end()
