"""One request's spans and times in the scheduler: queue, prefill, decode.

A span is started and ended explicitly and is never current. Times are the engine's clock; they also make the reply's
PhaseTimes, the metrics and the log line, so all four tell the same story.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer

from services import names

STALL_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Times:
    """Nanoseconds. first_token is None where there was none."""

    queue_ns: int
    prefill_ns: int
    decode_ns: int
    first_token_ns: int | None
    total_ns: int


def joined(times: Sequence[Times]) -> Times:
    """Of a request's answers, of which there is one at least: up to the first token those of the answer that had one
    first, from then on the longest."""
    first = min(times, key=lambda one: one.total_ns if one.first_token_ns is None else one.first_token_ns)
    return replace(first, decode_ns=max(one.decode_ns for one in times), total_ns=max(one.total_ns for one in times))


class RequestTrace:
    """Told what happens to an answer, in order. index: None where it is the only one."""

    def __init__(self, tracer: Tracer, parent: Context, now: int, index: int | None = None) -> None:
        self._tracer = tracer
        self._index = index
        self._parent = parent
        self._start = now
        self._queued_at: int | None = None
        self._queue_ns = 0
        self._wait_before_first_ns = 0
        self._admitted_at: int | None = None
        self._first_token_at: int | None = None
        self._last_token_at: int | None = None
        self._queue: Span | None = None
        self._work: Span | None = None  # prefill, then decode
        self.chunks = 0
        self.inter_token_ns: int | None = None

    @property
    def phase(self) -> str:
        if self._queue is not None:
            return names.SPAN_QUEUE
        return names.SPAN_PREFILL if self._first_token_at is None else names.SPAN_DECODE

    def queued(self, reason: str, now: int) -> None:
        self._queued_at = now
        self._queue = self._open(names.SPAN_QUEUE, {names.REASON: reason})
        if self._work is not None:
            event = names.EVENT_PREEMPTED if reason == "preempted" else names.EVENT_EXECUTOR_LOST
            self._work.add_event(event)

    def admitted(self, cached_tokens: int, step_id: int, now: int) -> None:
        self._leave_queue(now)
        if self._admitted_at is None:
            self._admitted_at = now
            self._work = self._open(names.SPAN_PREFILL, {names.CACHED_TOKENS: cached_tokens, names.STEP_FIRST: step_id})
        elif self._work is not None:
            self._work.add_event(names.EVENT_RESUMED)

    def computed(self) -> None:
        """A chunk was computed before the first token."""
        if self._first_token_at is None:
            self.chunks += 1

    def token(self, step_id: int, now: int) -> None:
        if self._first_token_at is None:
            self._first_token_at = now
            self._end_work({names.CHUNKS: self.chunks, names.STEP_LAST: step_id})
            self._work = self._open(names.SPAN_DECODE, {names.STEP_FIRST: step_id})
        elif self._last_token_at is not None:
            self.inter_token_ns = now - self._last_token_at
            if self.inter_token_ns > STALL_NS and self._work is not None:
                self._work.add_event(names.EVENT_STALLED, {"ms": self.inter_token_ns // 1_000_000})
        self._last_token_at = now

    def stopped(self) -> None:
        if self._work is not None:
            self._work.add_event(names.EVENT_STOPPED)

    def finished(self, output_tokens: int, now: int) -> Times:
        """Ends whatever is open."""
        self._leave_queue(now)
        if self._first_token_at is None:
            self._end_work({names.CHUNKS: self.chunks})
        else:
            self._end_work({names.OUTPUT_TOKENS: output_tokens})
        first, last = self._first_token_at, self._last_token_at
        prefill = 0
        if self._admitted_at is not None:
            prefill = (now if first is None else first) - self._admitted_at - self._wait_before_first_ns
        return Times(
            queue_ns=self._queue_ns,
            prefill_ns=max(prefill, 0),
            decode_ns=0 if first is None or last is None else last - first,
            first_token_ns=None if first is None else first - self._start,
            total_ns=now - self._start,
        )

    def _leave_queue(self, now: int) -> None:
        if self._queue is None or self._queued_at is None:
            return
        waited = now - self._queued_at
        self._queue_ns += waited
        if self._admitted_at is not None and self._first_token_at is None:
            self._wait_before_first_ns += waited
        self._queue.end()
        self._queue = None

    def _open(self, name: str, attributes: dict[str, str | int]) -> Span:
        if self._index is not None:
            attributes = {**attributes, names.ANSWER_INDEX: self._index}
        return self._tracer.start_span(name, context=self._parent, attributes=attributes)

    def _end_work(self, attributes: dict[str, int]) -> None:
        if self._work is not None:
            self._work.set_attributes(attributes)
            self._work.end()
            self._work = None
