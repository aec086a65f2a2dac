"""A trace as text: one line per span, indented by depth, with a bar on a common time axis. Pure.

Owns the drawing. Must not know the terminal: the width is an argument, and the text has no control codes
(those in names and values are shown as `?`, since a trace may come from elsewhere).
"""

from collections.abc import Sequence
from typing import Final

from services import names
from services.spans import SpanRecord, Value, flatten, tree

# What is worth a line's space, in this order, under a short name.
SHOWN: Final = (
    (names.OUTCOME, "outcome"),
    (names.RPC_STATUS_CODE, "status"),
    (names.REASON, "reason"),
    (names.GEN_AI_REQUEST_MODEL, "model"),
    (names.GEN_AI_USAGE_INPUT_TOKENS, "in"),
    (names.GEN_AI_USAGE_OUTPUT_TOKENS, "out"),
    (names.PROMPT_TOKENS, "prompt"),
    (names.CACHED_TOKENS, "cached"),
    (names.CHUNKS, "chunks"),
    (names.OUTPUT_TOKENS, "output"),
    (names.PREEMPTIONS, "preemptions"),
    (names.STEP_TOKENS, "tokens"),
    (names.STEP_SEQUENCES, "sequences"),
    (names.GEN_AI_RESPONSE_FINISH_REASONS, "finish"),
)
BAR: Final = "█"
NARROWEST: Final = 60


def waterfall(spans: Sequence[SpanRecord], width: int = 120) -> list[str]:
    """Lines of at most `width` characters (never less than 60), a heading first; no spans give no lines.

    Columns: service, indented name, start after the first span, duration, bar, key attributes.
    """
    rows = flatten(tree(spans))
    if not rows:
        return []
    width = max(width, NARROWEST)
    origin = min(span.start_ns for _, span in rows)
    total = max(1, max(span.end_ns for _, span in rows) - origin)
    services = [_clean(span.service) for _, span in rows]
    labels = ["  " * depth + _clean(span.name) + (" (client)" if span.kind == "CLIENT" else "") for depth, span in rows]
    service_width = min(max(map(len, [*services, "service"])), width // 6)
    label_width = min(max(map(len, [*labels, "span"])), width * 2 // 5)
    bar_width = max(8, min(32, width - service_width - label_width - 24))
    lines = [
        f"{_fit('service', service_width)} {_fit('span', label_width)} {'start':>9} {'duration':>9} "
        f"{_span_of_time(total)}".rstrip()
    ]
    for (_, span), service, label in zip(rows, services, labels, strict=True):
        line = (
            f"{_fit(service, service_width)} {_fit(label, label_width)} "
            f"{_time(span.start_ns - origin):>9} {_time(span.end_ns - span.start_ns):>9} "
            f"{_bar(span, origin, total, bar_width)} {_details(span)}"
        )
        lines.append(line.rstrip())
    return [line if len(line) <= width else line[: width - 1] + "…" for line in lines]


def _bar(span: SpanRecord, origin: int, total: int, width: int) -> str:
    """At least one cell, always inside the axis."""
    first = min(width - 1, (span.start_ns - origin) * width // total)
    last = max(first + 1, min(width, -((origin - span.end_ns) * width // total)))
    return ("·" * first + BAR * (last - first)).ljust(width, "·")


def _details(span: SpanRecord) -> str:
    parts = ["FAILED"] if span.failed else []
    parts += [f"{short}={_show(span.attributes[key])}" for key, short in SHOWN if key in span.attributes]
    if span.links:
        parts.append(f"links={len(span.links)}")
    counts: dict[str, int] = {}
    for event in span.events:
        counts[event.name] = counts.get(event.name, 0) + 1
    parts += [f"{_clean(name)}×{count}" if count > 1 else f"+{_clean(name)}" for name, count in counts.items()]
    return " ".join(parts)


def _time(ns: int) -> str:
    """Three significant digits and a unit."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if abs(ns) >= size:
            value = ns / size
            digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
            return f"{value:.{digits}f} {unit}"
    return f"{ns} ns"


def _span_of_time(total: int) -> str:
    return f"0 … {_time(total)}"


def _show(value: Value) -> str:
    if isinstance(value, tuple):
        return ",".join(_show(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else _clean(str(value))


def _fit(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else text[: width - 1] + "…"


def _clean(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)
