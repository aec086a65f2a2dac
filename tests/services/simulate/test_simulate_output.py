"""Figures, tables, charts, and the command itself."""

import importlib.util
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from services.simulate import png
from services.simulate.__main__ import main
from services.simulate.calibrate import CalibrationError, batch_probe, fit, prompt_probe
from services.simulate.charts import Chart, Line
from services.simulate.cost import CostModel, StepWork, chunk_context
from services.simulate.load import Request
from services.simulate.records import Records, Timeline
from services.simulate.summary import jain, percentile, spread
from services.simulate.svg import draw, linear_ticks, log_ticks

SMALL = ["--requests", "60", "--rate", "4", "--prompts", "fixed:40", "--outputs", "uniform:1:30"]


def test_percentiles_are_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.95, 0.99)] == [50, 95, 99]
    assert percentile([3.0], 0.99) == 3
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2
    assert spread([]).p50 is None


def test_jain() -> None:
    assert jain([5, 5, 5]) == 1
    assert jain([9, 0, 0]) == pytest.approx(1 / 3)
    assert jain([]) == 1


def test_the_timeline_keeps_its_means_when_bins_are_joined() -> None:
    fine, coarse = Timeline(bins=4096, width_ns=10), Timeline(bins=8, width_ns=10)
    for timeline in (fine, coarse):
        for at, waiting in ((0, 1), (35, 4), (90, 0), (555, 7), (3000, 2)):
            timeline.change(at, waiting, 1)
    ends = [timeline.points(4000) for timeline in (fine, coarse)]
    areas = [sum(point.waiting for point in points) * points[1].at_ns for points in ends]
    assert areas[0] == pytest.approx(areas[1]) == pytest.approx(35 + 55 * 4 + 2445 * 7 + 1000 * 2)
    assert len(ends[1]) <= 8
    assert coarse.peak_waiting == 7


def test_a_request_ends_once() -> None:
    records = Records()
    number = records.arrive(Request(0, 3, 3), 5)
    assert (number, len(records), list(records.submitted)) == (0, 1, [5])


def test_the_command_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, lines = tmp_path / "out.html", tmp_path / "out.json"
    argv = [*SMALL, "--policies", "fcfs,shortest", "--vary", "slots=2,8", "--slo", "ttft=900,tpot=200"]
    assert main([*argv, "--tenants", "a=3,b=1", "--html", str(page), "--json", str(lines)]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^(\w+ slots=\d)  ", shown.split("\n\n")[0], re.M) == [
        "fcfs slots=2",
        "fcfs slots=8",
        "shortest slots=2",
        "shortest slots=8",
    ]
    summaries = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [summary["served"] for summary in summaries] == [60] * 4
    assert summaries[0]["ttft"]["p50"] > summaries[1]["ttft"]["p50"]
    assert {tenant["name"] for tenant in summaries[0]["tenants"]} == {"a", "b"}
    text = page.read_text()
    for slug in ("Time to the first token", "Requests that wait", "fcfs slots=2", "tercet simulate"):
        assert slug in text


class _References(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "xlink:href", "data", "action")]


def test_the_page_refers_to_nothing_outside(tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    assert main([*SMALL, "--html", str(page)]) == 0
    text = page.read_text()
    parsed = _References()
    parsed.feed(text)
    assert not parsed.found
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    assert parsed.tags.count("svg") == 5
    assert not re.search(r"https?:|url\(|@import|//\w", text)


def test_the_page_escapes_what_it_shows(tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    assert main([*SMALL, "--tenants", "<b>=1,c&d=1", "--html", str(page)]) == 0
    assert "<b>=1" not in page.read_text()
    assert "<td>&lt;b&gt;</td>" in page.read_text()


def test_a_share_of_saturation_sets_the_rate(tmp_path: Path) -> None:
    lines = tmp_path / "out.json"
    argv = ["--requests", "400", "--prompts", "fixed:40", "--outputs", "fixed:20", "--set", "slots=4"]
    assert main([*argv, "--vary", "load=0.5,2", "--json", str(lines)]) == 0
    half, twice = (json.loads(line) for line in lines.read_text().splitlines())
    assert half["mean_waiting"] < 3
    assert twice["mean_waiting"] > 50
    assert twice["requests_per_s"] == pytest.approx(2 * half["requests_per_s"], rel=0.25)


def test_a_trace_of_blocks_is_simulated_with_its_block_size(tmp_path: Path) -> None:
    trace, lines = tmp_path / "t.jsonl", tmp_path / "out.json"
    entry = {"timestamp": 0, "input_length": 1100, "output_length": 4, "hash_ids": [1, 2, 3]}
    trace.write_text("\n".join(json.dumps({**entry, "timestamp": at}) for at in (0, 60_000)))
    assert main(["--trace", str(trace), "--json", str(lines)]) == 0
    assert json.loads(lines.read_text())["hit_ratio"] == pytest.approx(1024 / 2200)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--policies", "best"], "policy best is unknown; there are fcfs"),
        (["--set", "sluts=3"], "'sluts' can't be set; there are policy"),
        (["--set", "slots=x"], "max_sequences is 'x'; a number is needed"),
        (["--set", "slots=0"], "slots: max_sequences is 0, below 1"),
        (["--set", "slots"], "--set 'slots' is not NAME=VALUE"),
        (["--set", "cost=abacus"], "cost 'abacus' is no preset"),
        (["--set", "limits=soon=3"], "limits: 'soon' is none of"),
        (["--set", "load=0"], "load is 0.0"),
        (["--slo", "speed=3"], "--slo: 'speed' is none of ttft, tpot, e2e"),
        (["--requests", "0"], "requests is 0"),
        (["--rate", "-1"], "rate is -1"),
        (["--first", "3"], "--first is of a --trace"),
        (["--trace", "nowhere.csv"], "nowhere.csv"),
        (["--clients", "0"], "clients is 0"),
        (["--clients", "3", "--set", "load=0.5"], "exclude each other"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 1
    told = capsys.readouterr().err
    assert problem in told
    assert "Traceback" not in told


def test_png_without_a_plotter_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([*SMALL, "--png", str(tmp_path / "charts")]) == 1
    told = capsys.readouterr()
    assert "--png needs matplotlib" in told.err
    assert not told.out
    assert not (tmp_path / "charts").exists()


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="PNG charts need the extra `simulate`")
    chart = Chart("ttft", "T", "ms", "%", (Line("a", ((1.0, 2.0), (3.0, 4.0))),), log_x=True)
    (path,) = png.write([chart], tmp_path / "charts")
    assert path.name == "ttft.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_ticks_surround_the_values() -> None:
    assert linear_ticks(0, 97) == [0, 20, 40, 60, 80, 100]
    assert linear_ticks(0, 0) == [0, 0.2] or linear_ticks(0, 0)[-1] > 0
    assert log_ticks(3, 450) == [2, 5, 10, 20, 50, 100, 200, 500]
    assert log_ticks(10, 10) == [10, 20]
    assert log_ticks(0.03, 4000) == [0.02, 0.1, 1, 10, 100, 1000, 5000]
    assert log_ticks(1, 1e9) == [10.0**power for power in range(10)]


def test_a_drawn_chart_stays_in_its_box() -> None:
    lines = tuple(Line(f"line {n}", ((0.5, 0), (700, n))) for n in range(12))
    drawn = draw(Chart("x", "X < Y", "ms", "%", lines, log_x=True))
    for x, y in re.findall(r"([\d.]+),([\d.]+)", " ".join(re.findall(r'points="([^"]*)"', drawn))):
        assert 56 <= float(x) <= 616
        assert 50 <= float(y) <= 314
    assert "X &lt; Y" in drawn


def test_lines_that_hide_each_other_are_one() -> None:
    same = ((1.0, 2.0), (3.0, 4.0))
    drawn = draw(Chart("x", "T", "ms", "%", (Line("a", same), Line("b", ((1.0, 1.0),)), Line("c", same))))
    assert drawn.count("<polyline") == 2
    assert ">a = c</text>" in drawn


def test_a_legend_takes_as_many_rows_as_its_names_need() -> None:
    names = [f"policy max_queued_requests={number}" for number in range(8)]
    drawn = draw(Chart("x", "T", "ms", "%", tuple(Line(name, ((1.0, float(at)),)) for at, name in enumerate(names))))
    ends = [float(x) + 6.6 * len(name) for x, name in re.findall(r'<text x="([\d.]+)" y="\d+">(policy[^<]*)<', drawn)]
    assert len(ends) == 8
    assert max(ends) <= 640


def test_the_fit_finds_the_model_that_made_the_measurements() -> None:
    model = CostModel(2e7, 1.5e6, 5e6, 300.0, 2000.0, request_ns=8_000_000)
    probes = []
    for length in (16, 64, 256, 512, 1024, 1536):
        steps, left, start = 0, length, 0
        while left:
            count = min(512, left)
            steps += model.step_ns(StepWork(count, 0, chunk_context(start, count), 0))
            start, left = start + count, left - count
        probes.append(prompt_probe(length, steps + model.request_ns))
    for streams, length in ((1, 16), (2, 16), (8, 16), (1, 768), (4, 768)):
        probes.append(batch_probe(streams, length, model.step_ns(StepWork(0, streams, 0, streams * (length + 20)))))
    fitted = fit(probes)
    for name in ("base_ns", "prefill_token_ns", "decode_row_ns", "prefill_context_ns", "decode_context_ns"):
        assert getattr(fitted, name) == pytest.approx(getattr(model, name), rel=1e-3), name
    assert fitted.request_ns == pytest.approx(model.request_ns, rel=1e-3)


def test_a_fit_never_goes_below_zero() -> None:
    probes = [prompt_probe(length, 1e7 + 1e5 * length - 5 * length * length) for length in (16, 64, 256, 512)]
    probes += [batch_probe(streams, 16, 1e7 + 1e6 * streams) for streams in (1, 2, 4)]
    probes += [batch_probe(2, 768, 1.2e7)]
    fitted = fit(probes)
    assert fitted.prefill_context_ns == 0
    assert fitted.base_ns == pytest.approx(1e7, rel=0.2)


def test_a_fit_over_too_little_is_refused() -> None:
    with pytest.raises(CalibrationError, match="don't tell the costs apart"):
        fit([prompt_probe(16, 1e7), prompt_probe(16, 1e7)])


def test_runs_in_processes_of_their_own_give_the_same(tmp_path: Path) -> None:
    found = []
    for jobs in ("1", "2"):
        lines = tmp_path / f"{jobs}.json"
        argv = [*SMALL, "--policies", "fcfs,shortest", "--set", "load=0.7", "--jobs", jobs, "--json", str(lines)]
        assert main(argv) == 0
        found.append(lines.read_text())
    assert found[0] == found[1]


def test_a_trace_with_blocks_is_replayed_on_a_large_accelerator_at_a_share_of_its_capacity(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    lines = [
        {"timestamp": 40 * n, "input_length": 700 + n, "output_length": 9, "hash_ids": [n % 3, 100 + n]}
        for n in range(40)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    told = tmp_path / "out.json"
    assert main(["--trace", str(trace), "--json", str(told), "--html", str(tmp_path / "out.html")]) == 0
    assert "960 blocks of 512 tokens" in (tmp_path / "out.html").read_text()
    as_recorded = pytest.approx(40 / 1.56, rel=0.1)
    assert json.loads(told.read_text())["requests_per_s"] != as_recorded
    assert main(["--trace", str(trace), "--set", "rate-scale=1", "--json", str(told)]) == 0
    assert json.loads(told.read_text())["requests_per_s"] == as_recorded
