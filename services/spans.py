"""Finished spans as values, and the tree that they form. Pure.

Owns the record that readers of traces share (the OTLP sink, the waterfall, tests). Must not know how spans
arrive. Source: OpenTelemetry trace data model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Value = str | int | float | bool | bytes | None | tuple["Value", ...]


@dataclass(frozen=True, slots=True)
class EventRecord:
    name: str
    time_ns: int
    attributes: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class LinkRecord:
    trace_id: str
    span_id: str
    attributes: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One finished span. Ids in hexadecimal, `parent_id` "" for a root; times in ns since the epoch;
    kind as in the API ("SERVER", ...); failed: the span's status is ERROR."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: str
    service: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)
    failed: bool = False
    events: tuple[EventRecord, ...] = ()
    links: tuple[LinkRecord, ...] = ()
    instance: str = ""

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True, slots=True)
class Node:
    """A span and its children in order of start."""

    span: SpanRecord
    children: tuple["Node", ...]


def tree(spans: Iterable[SpanRecord]) -> list[Node]:
    """The spans as trees, roots in order of start. A span whose parent is not among them is a root; each span
    appears exactly once, whatever the parents claim."""
    ordered = sorted(spans, key=lambda span: (span.start_ns, -span.end_ns, span.span_id))
    unique = {(span.trace_id, span.span_id): span for span in ordered}
    children: dict[tuple[str, str], list[SpanRecord]] = {}
    roots = []
    for key, span in unique.items():
        above = (span.trace_id, span.parent_id)
        if above in unique and not _in_circle(key, unique):
            children.setdefault(above, []).append(span)
        else:
            roots.append(span)
    return [_node(root, children) for root in roots]


def _node(span: SpanRecord, children: Mapping[tuple[str, str], list[SpanRecord]]) -> Node:
    below = children.get((span.trace_id, span.span_id), [])
    return Node(span, tuple(_node(child, children) for child in below))


def _in_circle(key: tuple[str, str], spans: Mapping[tuple[str, str], SpanRecord]) -> bool:
    """Whether following the parents of a span comes back to it: data from the network may claim so."""
    at = (key[0], spans[key].parent_id)
    seen = {key}
    while at in spans and at not in seen:
        seen.add(at)
        at = (at[0], spans[at].parent_id)
    return at == key


def flatten(nodes: Iterable[Node], depth: int = 0) -> list[tuple[int, SpanRecord]]:
    """The trees in reading order, each span with its depth."""
    rows: list[tuple[int, SpanRecord]] = []
    for node in nodes:
        rows.append((depth, node.span))
        rows.extend(flatten(node.children, depth + 1))
    return rows
