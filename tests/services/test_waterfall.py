"""The drawing of a trace, and the tree under it."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services import names
from services.spans import EventRecord, LinkRecord, SpanRecord, flatten, tree
from services.waterfall import waterfall

MS = 1_000_000


def span(name: str, id_: str, parent: str, start_ms: int, end_ms: int, **more: object) -> SpanRecord:
    made = SpanRecord("t", id_, parent, name, "INTERNAL", "scheduler", start_ms * MS, end_ms * MS)
    return replace(made, **more)  # type: ignore[arg-type]


TRACE = [
    span("decode", "4", "2", 60, 100, attributes={names.OUTPUT_TOKENS: 8}, events=(EventRecord("stopped", 0, {}),) * 2),
    span("queue", "3", "2", 10, 20),
    span("a.v1.S/Generate", "2", "1", 5, 100, kind="SERVER", attributes={names.RPC_STATUS_CODE: "OK"}),
    span("a.v1.S/Generate", "1", "0", 0, 100, kind="CLIENT", service="edge", failed=True),
    span("executor.step", "9", "", 62, 63, service="executor", trace_id="u", links=(LinkRecord("t", "4", {}),)),
]


def test_a_whole_trace() -> None:
    assert waterfall(TRACE, 110) == [
        "service   span                         start  duration 0 … 100 ms",
        "edge      a.v1.S/Generate (client)      0 ns    100 ms ████████████████████████████████ FAILED",
        "scheduler   a.v1.S/Generate          5.00 ms   95.0 ms ·███████████████████████████████ status=OK",
        "scheduler     queue                  10.0 ms   10.0 ms ···████·························",
        "scheduler     decode                 60.0 ms   40.0 ms ···················█████████████ output=8 stopped×2",
        "executor  executor.step              62.0 ms   1.00 ms ···················██··········· links=1",
    ]


def test_nothing_gives_nothing() -> None:
    assert waterfall([]) == []


def test_hostile_names_draw_no_control_codes() -> None:
    lines = waterfall([span("a\x1b[2Jb\nc", "1", "", 0, 1, attributes={names.OUTCOME: "x\r\ny\u202e"})])
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)
    assert "a?[2Jb?c" in lines[1]
    assert "outcome=x??y?" in lines[1]


ids = st.sampled_from("abcdef")
records = st.builds(
    lambda id_, parent, start, length, name: SpanRecord(
        "t", id_, parent, name, "INTERNAL", name, start, start + length
    ),
    ids,
    ids | st.just(""),
    st.integers(0, 10**12),
    st.integers(-5, 10**12),
    st.text(max_size=80),
)


@given(st.lists(records, max_size=12), st.integers(0, 200))
def test_any_spans_draw_within_the_width_each_once(spans: list[SpanRecord], width: int) -> None:
    """Also with parents that form circles, ids used twice and spans that end before they start."""
    lines = waterfall(spans, width)
    count = len({item.span_id for item in spans})
    assert len(lines) == (count + 1 if spans else 0)
    assert all(len(line) <= max(width, 60) for line in lines)
    rows = flatten(tree(spans))
    assert sorted(row.span_id for _, row in rows) == sorted({item.span_id for item in spans})


def test_children_follow_their_parent_in_order_of_start() -> None:
    rows = flatten(tree(TRACE))
    assert [(depth, row.span_id) for depth, row in rows] == [(0, "1"), (1, "2"), (2, "3"), (2, "4"), (0, "9")]
