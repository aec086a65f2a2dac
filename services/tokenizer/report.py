"""The edge's metrics, span attributes and log line of one request.

Owns a request's story at the edge, from arrival to whatever ends it; each is counted once. Must not change an answer.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, ParamSpec

import psutil
from opentelemetry.trace import Span, get_current_span

from services import errors, names, trace_context
from services.callers import Caller
from services.errors import ServiceError
from services.gateway.engine import EngineCall
from services.logs import RequestLine, Surroundings, request_line, slow_request_line
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
BY_REASON: Final = {
    "SLOW_READER": ("slow_reader", ""),
    "SUPERSEDED": ("cancelled", ""),
    "MODEL_CHANGED": ("unavailable", ""),
}
TextDelta = tokenizer_pb2.TextDelta
P = ParamSpec("P")
OPERATIONS: Final = {"chat": "chat", "text": "text_completion", "token_ids": "text_completion"}


class EdgeReport:
    """slow_request_s: a request that takes longer is logged once more, with its surroundings."""

    def __init__(self, metrics: TokenizerMetrics, model_name: str, slow_request_s: float) -> None:
        self._metrics = metrics
        self._model_name = model_name
        self._slow_request_s = slow_request_s
        self._running = 0

    @contextmanager
    def request(self, request: tokenizer_pb2.TokenizerServiceGenerateRequest, call: EngineCall) -> Iterator["Told"]:
        """Around a request's whole life; however it ends, it is told once."""
        told = Told(request, call, self._metrics, self._model_name, self._write)
        self._metrics.received.inc()
        self._running += 1
        self._metrics.running.set(self._running)
        try:
            yield told
        except ServiceError as error:
            outcome, rejection = FAILED.get(type(error), ("failed", ""))
            outcome, rejection = BY_REASON.get(error.reason, (outcome, rejection))
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
            told.end("failed", "NO_END")
            self._running -= 1
            self._metrics.running.set(self._running)

    def _write(self, line: RequestLine) -> None:
        request_line(line)
        if line.total_s > self._slow_request_s:
            rss_bytes = psutil.Process().memory_info().rss
            slow_request_line(line, Surroundings(self._running, waiting=0, rss_bytes=rss_bytes), self._slow_request_s)


class SchedulerGauges:
    """An observer of schedulers: the metrics that name them."""

    def __init__(self, metrics: TokenizerMetrics) -> None:
        self._metrics = metrics

    def active(self, target: str, requests: int) -> None:
        self._metrics.scheduler_requests[target].set(requests)

    def ready(self, target: str, is_ready: bool) -> None:
        self._metrics.scheduler_ready[target].set(is_ready)


class Told:
    """What one request has told so far."""

    def __init__(
        self,
        request: tokenizer_pb2.TokenizerServiceGenerateRequest,
        call: EngineCall,
        metrics: TokenizerMetrics,
        model_name: str,
        write: Callable[[RequestLine], None],
    ) -> None:
        self.span: Span = get_current_span(call.context)
        self._operation = OPERATIONS.get(request.WhichOneof("prompt") or "", "other")
        self._call = call
        self._metrics = metrics
        self._model_name = model_name
        self._write = write
        self._request_id = call.request_id
        self._tenant = call.tenant or ""
        self._prompt_bytes = _prompt_bytes(request)
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._tokenize_ns = 0
        self._detokenize_ns = 0
        self._first_token_ns: int | None = None
        self._ended = False
        self._ends: dict[int, tokenizer_pb2.Finished] = {}  # by answer
        self._scheduler: str | None = None
        self.span.set_attributes(
            {
                names.REQUEST_ID: call.request_id,
                names.GEN_AI_OPERATION_NAME: self._operation,
                names.GEN_AI_PROVIDER_NAME: names.PROVIDER,
                names.GEN_AI_REQUEST_MODEL: model_name,
            }
        )

    def identify(self, caller: Caller) -> None:
        """Who asks, as message and metadata agree."""
        self._request_id, self._tenant = caller.request_id, caller.tenant
        self.span.set_attributes({names.REQUEST_ID: caller.request_id, names.TENANT: caller.tenant})

    def placed(self, scheduler: str) -> None:
        """The scheduler that it is at now. Another one before: that was lost."""
        if self._scheduler is not None:
            self._metrics.scheduler_losses[self._scheduler].inc()
        self._scheduler = scheduler
        self.span.set_attribute(names.SCHEDULER, scheduler)

    def tokenized(self, prompt_tokens: int, elapsed_ns: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._tokenize_ns = elapsed_ns
        observe(self._metrics.tokenize, elapsed_ns / 1e9, self.span)
        if self._prompt_bytes is not None:
            observe(self._metrics.prompt_bytes, self._prompt_bytes, self.span)

    def decoding(self, decode: Callable[P, list[TextDelta]], *args: P.args, **kwargs: P.kwargs) -> Iterator[TextDelta]:
        """The deltas that `decode` gives, each counted when it is taken."""
        began = time.monotonic_ns()
        deltas = decode(*args, **kwargs)
        self._detokenize_ns += time.monotonic_ns() - began
        for delta in deltas:
            self._output_tokens += len(delta.token_ids)
            if self._first_token_ns is None:
                self._first_token_ns = self._elapsed()
            yield delta

    def finished(self, finished: tokenizer_pb2.Finished, *, by_stop_string: bool, last: bool) -> tokenizer_pb2.Finished:
        """The same message with this edge's own times. last: with it the request has ended well."""
        finished.times.tokenize_ns = self._tokenize_ns
        finished.times.first_token_ns = self._first_token_ns or 0
        finished.times.total_ns = self._elapsed()
        if by_stop_string:
            self._metrics.stop_strings.inc()
        self._ends[finished.index] = finished
        if last:
            ends = [self._ends[index] for index in sorted(self._ends)]
            reasons = [FINISHED.get(end.reason, "failed") for end in ends]
            self._output_tokens = sum(end.usage.delivered_tokens for end in ends)
            self.span.set_attributes(
                {
                    names.GEN_AI_RESPONSE_FINISH_REASONS: reasons,
                    names.CACHED_TOKENS: min(end.usage.cached_tokens for end in ends),
                    names.PREEMPTIONS: sum(end.usage.preemptions for end in ends),
                }
            )
            self.end(reasons[0], "")
        return finished

    def end(self, outcome: str, reason: str) -> None:
        """The first call counts."""
        if self._ended:
            return
        self._ended = True
        total_s = self._elapsed() / 1e9
        first_s = None if self._first_token_ns is None else self._first_token_ns / 1e9
        self._metrics.requests[outcome].inc()
        if first_s is not None:
            observe(self._metrics.detokenize, self._detokenize_ns / 1e9, self.span)
        self._metrics.gen_ai.record(self._operation, outcome, total_s, first_s, self._output_tokens, self.span)
        self.span.set_attributes(
            {
                names.OUTCOME: outcome,
                names.GEN_AI_USAGE_INPUT_TOKENS: self._prompt_tokens,
                names.GEN_AI_USAGE_OUTPUT_TOKENS: self._output_tokens,
            }
        )
        self._write(
            RequestLine(
                request_id=self._request_id,
                trace_id=trace_context.trace_id(self.span),
                outcome=outcome,
                reason=reason,
                prompt_tokens=self._prompt_tokens,
                output_tokens=self._output_tokens,
                total_s=total_s,
                model=self._model_name,
                tenant=self._tenant,
                prompt_bytes=self._prompt_bytes,
                tokenize_s=self._tokenize_ns / 1e9,
                first_token_s=first_s,
                detokenize_s=None if first_s is None else self._detokenize_ns / 1e9,
            )
        )

    def _elapsed(self) -> int:
        return time.monotonic_ns() - self._call.started_ns


def _prompt_bytes(request: tokenizer_pb2.TokenizerServiceGenerateRequest) -> int | None:
    """Of text or chat; None where the prompt came as ids."""
    match request.WhichOneof("prompt"):
        case "text":
            return len(request.text.encode("utf-8", "surrogatepass"))
        case "chat":
            return request.chat.ByteSize()
    return None
