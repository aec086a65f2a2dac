"""The edge's metrics, span attributes and log line of one request.

Owns a request's story at the edge, from arrival to whatever ends it; each is counted once. Must not change an answer.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from opentelemetry.trace import Span, get_current_span

from services import errors, names, trace_context
from services.errors import ServiceError
from services.gateway.engine import EngineCall
from services.logs import RequestLine, request_line
from services.metrics import TokenizerMetrics, observe
from tercet.v1 import common_pb2, tokenizer_pb2

FINISHED: Final = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_TIME_LIMIT: "time_limit",
}
FAILED: Final = {
    errors.InvalidArgument: ("rejected", "invalid"),
    errors.NotFound: ("rejected", "invalid"),
    errors.Unimplemented: ("rejected", "unsupported"),
    errors.FailedPrecondition: ("rejected", "unsupported"),
    errors.AlreadyExists: ("rejected", "duplicate"),
    errors.ResourceExhausted: ("rejected", "queue_full"),
    errors.DeadlineExceeded: ("deadline_exceeded", ""),
    errors.Unavailable: ("unavailable", ""),
    errors.Cancelled: ("cancelled", ""),
}
OPERATIONS: Final = {"chat": "chat", "text": "text_completion", "token_ids": "text_completion"}


class EdgeReport:
    def __init__(self, metrics: TokenizerMetrics, model_name: str) -> None:
        self._metrics = metrics
        self._model_name = model_name

    @contextmanager
    def request(self, request: tokenizer_pb2.TokenizerServiceGenerateRequest, call: EngineCall) -> Iterator["Told"]:
        """Around a request's whole life; however it ends, it is told once."""
        told = Told(request, call, self._metrics, self._model_name)
        self._metrics.received.inc()
        self._metrics.running.inc()
        try:
            yield told
        except ServiceError as error:
            outcome, rejection = FAILED.get(type(error), ("failed", ""))
            if error.reason == "SLOW_READER":
                outcome, rejection = "slow_reader", ""
            if rejection:
                self._metrics.rejections[rejection].inc()
            told.end(outcome, error.reason)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            told.end("cancelled", "CALLER_GONE")
            raise
        except BaseException:
            told.end("failed", "UNEXPECTED")
            raise
        finally:
            self._metrics.running.dec()
            told.end("failed", "NO_END")


class Told:
    """What one request has told so far."""

    def __init__(
        self,
        request: tokenizer_pb2.TokenizerServiceGenerateRequest,
        call: EngineCall,
        metrics: TokenizerMetrics,
        model_name: str,
    ) -> None:
        self.span: Span = get_current_span(call.context)
        self._operation = OPERATIONS.get(request.WhichOneof("prompt") or "", "other")
        self._call = call
        self._metrics = metrics
        self._model_name = model_name
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._tokenize_ns = 0
        self._first_token_ns: int | None = None
        self._ended = False
        self.span.set_attributes(
            {
                names.REQUEST_ID: call.request_id,
                names.GEN_AI_OPERATION_NAME: self._operation,
                names.GEN_AI_PROVIDER_NAME: names.PROVIDER,
                names.GEN_AI_REQUEST_MODEL: model_name,
            }
        )

    def tokenized(self, prompt_tokens: int, elapsed_ns: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._tokenize_ns = elapsed_ns
        observe(self._metrics.tokenize, elapsed_ns / 1e9, self.span)

    def delta(self, tokens: int) -> None:
        self._output_tokens += tokens
        if self._first_token_ns is None:
            self._first_token_ns = self._elapsed()

    def finished(self, finished: tokenizer_pb2.Finished) -> tokenizer_pb2.Finished:
        """The same message with this edge's own times; the request has ended well."""
        finished.times.tokenize_ns = self._tokenize_ns
        finished.times.first_token_ns = self._first_token_ns or 0
        finished.times.total_ns = self._elapsed()
        self._output_tokens = finished.usage.delivered_tokens
        if finished.HasField("stop_match"):
            self._metrics.stop_strings.inc()
        reason = FINISHED.get(finished.reason, "failed")
        self.span.set_attributes(
            {
                names.GEN_AI_RESPONSE_FINISH_REASONS: [reason],
                names.CACHED_TOKENS: finished.usage.cached_tokens,
                names.PREEMPTIONS: finished.usage.preemptions,
            }
        )
        self.end(reason, "")
        return finished

    def end(self, outcome: str, reason: str) -> None:
        """The first call counts."""
        if self._ended:
            return
        self._ended = True
        total_s = self._elapsed() / 1e9
        first_s = None if self._first_token_ns is None else self._first_token_ns / 1e9
        self._metrics.requests[outcome].inc()
        self._metrics.gen_ai.record(self._operation, outcome, total_s, first_s, self._output_tokens, self.span)
        self.span.set_attributes(
            {
                names.OUTCOME: outcome,
                names.GEN_AI_USAGE_INPUT_TOKENS: self._prompt_tokens,
                names.GEN_AI_USAGE_OUTPUT_TOKENS: self._output_tokens,
            }
        )
        request_line(
            RequestLine(
                request_id=self._call.request_id,
                trace_id=trace_context.trace_id(self.span),
                outcome=outcome,
                reason=reason,
                prompt_tokens=self._prompt_tokens,
                output_tokens=self._output_tokens,
                total_s=total_s,
                model=self._model_name,
                tenant=self._call.tenant or "",
                tokenize_s=self._tokenize_ns / 1e9,
                first_token_s=first_s,
            )
        )

    def _elapsed(self) -> int:
        return time.monotonic_ns() - self._call.started_ns
