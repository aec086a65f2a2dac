"""What a process says: one JSON object per line on standard error.

Owns the format and the lines about requests. Must not hold text of prompts or answers: the fields of a request
line are ids, lengths, times and names of outcomes. Invariant: whatever is logged, a record is exactly one line
of valid JSON.
"""

import json
import logging
import sys
import threading
import time
import types
from dataclasses import dataclass, fields
from typing import Any, Final, TextIO

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_RESERVED: Final = frozenset({"ts", "level", "service", "logger", "message", "exception"})

log = logging.getLogger("services.requests")
thread_log = logging.getLogger("services.logs.thread")
process_log = logging.getLogger("services.logs.process")


class JsonFormatter(logging.Formatter):
    """ts (UTC, microseconds), level, service, logger, message, then the record's extra fields."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        whole = time.gmtime(int(record.created))
        line: dict[str, Any] = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", whole) + f".{int(record.created % 1 * 1e6):06d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": _message(record),
        }
        for key, value in vars(record).items():
            if key not in _STANDARD:
                line[f"{key}_" if key in _RESERVED else key] = _plain(value)
        if record.exc_info is not None and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        elif record.stack_info:
            line["exception"] = record.stack_info
        return json.dumps(line, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace").decode()


def setup(service: str, level: str, stream: TextIO | None = None) -> logging.Handler:
    """Make the root logger write JSON lines, replacing what was there; and log what kills a thread or the process.

    level: debug, info, warning or error. Returns the handler. Called once, by a process's main.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # The exporter logs each failed attempt; the failures are counted in tercet_spans_total as well.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)
    threading.excepthook = _thread_died
    sys.excepthook = _process_died
    return handler


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One request at its end. Times in seconds, None where the phase was not reached."""

    request_id: str
    trace_id: str
    outcome: str
    prompt_tokens: int
    output_tokens: int
    total_s: float
    reason: str = ""
    model: str = ""
    tenant: str = ""
    cached_tokens: int | None = None
    sampled_tokens: int | None = None
    preemptions: int | None = None
    prompt_bytes: int | None = None
    tokenize_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    first_token_s: float | None = None
    decode_s: float | None = None
    detokenize_s: float | None = None
    attempt: int | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What went on while a request was slow: requests running and waiting, KV blocks, memory of the process."""

    running: int
    waiting: int
    kv_blocks_live: int | None = None
    kv_blocks_total: int | None = None
    rss_bytes: int | None = None


def request_line(line: RequestLine) -> None:
    """Log a request's end."""
    log.info("request", extra=_present(line))


def slow_request_line(line: RequestLine, around: Surroundings, limit_s: float) -> bool:
    """Log a request that took longer than `limit_s`, with its surroundings; whether it did."""
    if line.total_s <= limit_s:
        return False
    log.warning("slow request", extra={**_present(line), **_present(around), "limit_s": limit_s})
    return True


def _present(values: RequestLine | Surroundings) -> dict[str, Any]:
    pairs = ((field.name, getattr(values, field.name)) for field in fields(values))
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in pairs if value is not None}


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # arguments that do not fit the format; the line must not be lost
        return f"{record.msg} {record.args!r}"


def _plain(value: object) -> Any:
    """A value that JSON has: others, and numbers that JSON lacks, as text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"


def _thread_died(died: threading.ExceptHookArgs) -> None:
    if died.exc_type is SystemExit:
        return
    name = died.thread.name if died.thread is not None else "?"
    value = died.exc_value or died.exc_type()
    thread_log.error("thread %s died", name, exc_info=(died.exc_type, value, died.exc_traceback))


def _process_died(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    process_log.critical("the process ends with %s", kind.__name__, exc_info=(kind, error, trace))
