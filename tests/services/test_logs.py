"""One record, one line of JSON, whatever is in it."""

import io
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services import logs
from services.logs import JsonFormatter, RequestLine, Surroundings, request_line, slow_request_line


@pytest.fixture
def lines() -> Iterator[Any]:
    """Reads what was logged since the last look."""
    root = logging.getLogger()
    kept = (list(root.handlers), root.level, threading.excepthook, sys.excepthook)
    stream = io.StringIO()
    logs.setup("scheduler", "info", stream)

    def read() -> list[dict[str, Any]]:
        text = stream.getvalue()
        stream.seek(0)
        stream.truncate()
        return [json.loads(line) for line in text.splitlines()]

    yield read
    root.handlers[:], level, threading.excepthook, sys.excepthook = kept
    root.setLevel(level)
    logging.getLogger("opentelemetry.exporter").setLevel(logging.NOTSET)


LINE = RequestLine(
    request_id="r-1",
    trace_id="a" * 32,
    outcome="stop",
    prompt_tokens=5,
    output_tokens=7,
    total_s=1.23456789,
    queue_s=0.5,
)


def test_a_request_line_has_typed_fields_and_no_absent_ones(lines: Any) -> None:
    request_line(LINE)
    (line,) = lines()
    assert line.pop("ts").endswith("Z")
    assert line == {
        "level": "info",
        "service": "scheduler",
        "logger": "services.requests",
        "message": "request",
        "request_id": "r-1",
        "trace_id": "a" * 32,
        "outcome": "stop",
        "prompt_tokens": 5,
        "output_tokens": 7,
        "total_s": 1.234568,
        "queue_s": 0.5,
        "reason": "",
        "model": "",
        "tenant": "",
    }


def test_a_slow_request_tells_its_surroundings(lines: Any) -> None:
    around = Surroundings(running=3, waiting=9, kv_blocks_live=10, kv_blocks_total=20, rss_bytes=1 << 30)
    assert not slow_request_line(LINE, around, limit_s=2.0)
    assert lines() == []
    assert slow_request_line(LINE, around, limit_s=1.0)
    (line,) = lines()
    assert (line["level"], line["running"], line["rss_bytes"], line["limit_s"]) == ("warning", 3, 1 << 30, 1.0)
    assert line["request_id"] == "r-1"


def test_levels_and_exceptions(lines: Any) -> None:
    log = logging.getLogger("x")
    log.debug("not shown")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("it failed: %s", "why")
    (line,) = lines()
    assert (line["level"], line["message"]) == ("error", "it failed: why")
    assert "ValueError: two\nlines" in line["exception"]


def test_a_thread_that_dies_is_logged(lines: Any) -> None:
    def die() -> None:
        raise RuntimeError("in a thread")

    thread = threading.Thread(target=die, name="model")
    thread.start()
    thread.join()
    (line,) = lines()
    assert line["message"] == "thread model died"
    assert line["logger"] == "services.logs.thread"
    assert "in a thread" in line["exception"]


def test_a_process_that_dies_says_so_in_json() -> None:
    program = "from services import logs\nlogs.setup('s', 'info')\nraise RuntimeError('end')\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    (line,) = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 1
    assert (line["level"], line["logger"]) == ("critical", "services.logs.process")
    assert "RuntimeError: end" in line["exception"]


class Unprintable:
    def __str__(self) -> str:
        raise ValueError


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(alphabet=st.characters(exclude_categories=[])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.text(alphabet=st.characters(exclude_categories=[])), values, st.sampled_from(["extra", "ts", "level"]))
def test_any_record_is_one_line_of_json(message: str, value: object, key: str) -> None:
    record = logging.makeLogRecord({"msg": message, "levelname": "INFO", "levelno": 20, key: value})
    text = JsonFormatter("s").format(record)
    assert "\n" not in text
    text.encode()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert line["service"] == "s"
    assert line["level"] == "info"


def test_records_that_cannot_be_formatted_are_not_lost() -> None:
    record = logging.makeLogRecord({"msg": "%d of %s", "args": ("x",), "bad": Unprintable(), "ok": object})
    line = json.loads(JsonFormatter("s").format(record))
    assert line["message"] == "%d of %s ('x',)"
    assert line["bad"] == "<Unprintable>"
