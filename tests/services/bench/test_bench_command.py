"""The command: what it prints, writes, compares and refuses."""

import asyncio
import dataclasses
import json
import re
from pathlib import Path

import pytest
from chain import text_chain
from openai_server import Play, openai_server

from services.bench.__main__ import main
from services.bench.compare import NotComparable, compare
from services.bench.document import BadDocument, Columns, Document, Environment, read, result_of, write
from services.bench.options import OptionError, Where, measure_parser, read_settings
from services.bench.plan import Settings, Stage, longest, stages
from services.bench.progress import bar
from services.bench.record import Failure, Outcome, Reply
from services.bench.report import charts_of, facts, table_of, told
from services.bench.runs import measured, varied
from services.bench.session import StageRun
from services.bench.target import ServerFacts
from services.bench.vary import VaryError, variants
from services.config import MODEL
from services.simulate.load import Request
from services.simulate.summary import Objectives
from services.stack import StackOptions

MS = 1_000_000
SMALL = ["--tiers", "20", "--output", "5", "--concurrency", "1,2", "--requests", "4", "--repeats", "2"]
MACHINE = Environment("a cpu", 2, "3.11", "Linux", 0.1, "2026-01-01")


def run_of(clients: int, repeat: int, token_ms: int, *, failure: Failure | None = None, cpu_ms: int = 0) -> StageRun:
    """`clients` requests at once, 11 tokens each after 100 ms, `token_ms` apart."""
    arrivals = tuple((100 + token_ms * index) * MS for index in range(11))
    served = Outcome(0, 0, 20, Reply(arrivals[-1], arrivals, (1,) * 11, 20, 11))
    lost = Outcome(0, 0, 20, Reply(arrivals[-1], failure=failure, detail="why"))
    outcomes = (served,) * clients if failure is None else (served,) * (clients - 1) + (lost,)
    stage = Stage("20 in, 11 out", tuple(Request(0, 20, 11) for _ in outcomes), (), clients=clients)
    return StageRun(stage, repeat, 0, cpu_ms * MS, outcomes)


def document(token_ms: dict[int, list[int]], label: str = "one", settings: Settings = Settings()) -> Document:
    """token_ms: by clients, of each repeat."""
    results = [
        result_of(run_of(clients, repeat, pause), Objectives(tpot_ms=45))
        for clients, pauses in token_ms.items()
        for repeat, pause in enumerate(pauses)
    ]
    facts = ServerFacts("tercet", "toy", 512, exact=True)
    return Document(label, f"tercet bench --label {label}", settings, facts, MACHINE, tuple(results))


def test_a_document_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = document({1: [40, 50], 8: [60, 80]})
    path = tmp_path / "a.json"
    write(made, path)
    assert json.loads(path.read_text())["schema"] == "tercet-bench/1"
    assert read(path) == made
    assert made.stages[0].requests == Columns((0.0,), (100.0,), (40.0,), (500.0,), (20,), (11,), (11,), ("",))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        ("[]", "its schema is None"),
        ('{"schema": "tercet-bench/9"}', "'tercet-bench/9', not 'tercet-bench/1'"),
        ('{"schema": "tercet-bench/1"}', "not as its schema says"),
        ('{"schema": "tercet-bench/1", "label": "", "command": "", "settings": {"speed": 1}}', "speed"),
    ],
)
def test_what_is_no_document_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(BadDocument, match=problem):
        read(path)


def test_the_table_has_medians_over_repeats() -> None:
    made = document({1: [40, 50, 41], 8: [60, 80, 61]})
    lines = table_of(made.stages).text().splitlines()
    assert len(lines) == 3
    one = dict(zip(re.split(r"\s{2,}", lines[0]), re.split(r"\s{2,}", lines[1]), strict=True))
    assert one["load"] == "1 at once"
    assert one["served"] == "3"
    assert one["TPOT ms"] == "41.0 / 41.0 / 41.0"
    assert one["output tok/s"] == "21.6 (18.3 to 22.0)"
    assert one["goodput/s"] == "1.96"  # the median of 2, 0 and 1.96: 50 ms a token breaks the limit of 45


def test_the_knee_is_told() -> None:
    assert told(document({1: [40], 2: [42], 4: [90], 8: [190]})) == [
        "20 in, 11 out: 8 at once give 2.00 times the tokens of 1; the knee is at 2: nothing beyond it gives 5% more"
    ]
    (sentence,) = told(document({1: [40], 2: [42], 4: [44]}))
    assert sentence.endswith("no knee up to 4: throughput still rises by more than 5%")


def test_what_may_spoil_a_figure_is_told() -> None:
    made = document({4: [40]})
    spoiled = result_of(run_of(4, 0, 40, failure=Failure.CUT, cpu_ms=400), Objectives())
    sentences = told(dataclasses.replace(made, stages=(spoiled,)))
    assert sentences == [
        "warning: 20 in, 11 out, 4 at once: this client took 80% of a core; it may be what is measured",
        "warning: 20 in, 11 out, 4 at once: cut: why",
    ]
    assert "1 cut" in table_of([spoiled]).text()
    assert facts(made)[0] == "tercet, model toy"


def test_charts_are_by_level_and_by_request() -> None:
    assert [chart.slug for chart in charts_of(document({1: [40], 2: [41]}).stages)] == [
        "throughput",
        "goodput",
        "ttft-level",
        "tpot-level",
        "ttft",
        "tpot",
        "e2e",
    ]
    assert [chart.slug for chart in charts_of(document({1: [40]}).stages)] == ["ttft", "tpot", "e2e"]


def test_ratios_have_the_range_of_their_pairs() -> None:
    first, second = document({8: [40, 50, 44]}), document({8: [20, 40, 33]}, "other")
    (ratio,) = [one for one in compare(first, second) if one.metric == "TPOT P50"]
    assert (ratio.ratio.median, ratio.ratio.low, ratio.ratio.high) == (0.75, 0.5, 0.8)
    assert ratio.how == "over repeats"
    assert (ratio.first, ratio.second) == (44, 33)


def test_of_one_repeat_the_range_is_a_bootstrap_of_the_requests() -> None:
    first, second = document({8: [40]}), document({8: [20]}, "other")
    found = {one.metric: one for one in compare(first, second)}
    assert found["TPOT P50"].how == "by bootstrap"
    assert (found["TPOT P50"].ratio.low, found["TPOT P50"].ratio.high) == (0.5, 0.5)
    assert found["requests/s"].how == ""
    mixed = dataclasses.replace(first.stages[0].requests, tpot=(10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0))
    spread = dataclasses.replace(first, stages=(dataclasses.replace(first.stages[0], requests=mixed),))
    (ratio,) = [one for one in compare(spread, second) if one.metric == "TPOT P50"]
    assert ratio.ratio.low < 20 / 45 < ratio.ratio.high
    assert compare(spread, second) == compare(spread, second)


def test_other_settings_are_refused_and_named() -> None:
    first, second = document({8: [40]}), document({8: [20]}, settings=Settings(output=64, seed=2))
    second = dataclasses.replace(second, environment=dataclasses.replace(MACHINE, cores=64, load_average=3.0))
    with pytest.raises(NotComparable) as refused:
        compare(first, second)
    assert refused.value.differences == ("output: 128 against 64", "seed: 1 against 2", "cores: 2 against 64")
    assert compare(first, second, force=True)
    with pytest.raises(NotComparable, match="none is in both"):
        compare(first, document({4: [40]}), force=True)


def test_compare_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    write(document({8: [40]}), Path(paths[0]))
    write(document({8: [20]}, settings=Settings(seed=2)), Path(paths[1]))
    assert main(["compare", *paths]) == 1
    assert "seed: 1 against 2" in capsys.readouterr().err
    assert main(["compare", *paths, "--force"]) == 0
    shown = capsys.readouterr()
    assert "warning: they differ in seed: 1 against 2" in shown.err
    assert re.search(r"TPOT P50 +40\.0 +20\.0 +0\.500", shown.out)


async def test_the_command_measures_a_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html, path = tmp_path / "a.html", tmp_path / "a.json"
    async with openai_server(owner="llamacpp", tokenize=True) as server:
        argv = ["--url", server.url, *SMALL, "--slo", "ttft=60000", "--html", str(html), "--json", str(path)]
        assert await asyncio.to_thread(main, argv) == 0
    shown = capsys.readouterr()
    assert re.search(r"20 in, 5 out +2 at once +8 +0 ", shown.out)
    assert "knee" in shown.err
    made = read(path)
    assert [(stage.load, stage.repeat) for stage in made.stages] == [
        ("1 at once", 0),
        ("2 at once", 0),
        ("1 at once", 1),
        ("2 at once", 1),
    ]
    assert made.stages[0].figures.goodput_per_s == made.stages[0].figures.requests_per_s
    text = html.read_text()
    assert text.count("<svg") == 7
    assert not re.search(r"https?:(?!//127)|url\(|@import|<script|<link|<img", text)


async def test_a_server_that_fails_all_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    async with openai_server(play=lambda number: Play(status=503)) as server:
        assert await asyncio.to_thread(main, ["--url", server.url, *SMALL]) == 1
        assert await asyncio.to_thread(main, ["--url", server.url, *SMALL, "--warm-up", "0"]) == 1
    shown = capsys.readouterr()
    assert "no request is served; the first: refused, HTTP 503" in shown.err
    assert "4 refused" in shown.out or "8 refused" in shown.out


@pytest.mark.parametrize("chat", [False, True])
async def test_our_own_doors_are_measured_alike(default_model_path: Path, chat: bool) -> None:
    """gRPC and HTTP, with the real tokenizer: every prompt has its exact length and every answer too."""
    settings = Settings(tiers=(64, 200), output=7, concurrency=(1, 3), requests=3, repeats=1, chat=chat)
    async with text_chain(default_model_path, "A few words, again and again and again.", ends=False) as running:
        for where in (
            Where(running.target, None, None, "cpu", None, {}, None),
            Where(None, running.http, None, "cpu", None, {}, None),
        ):
            made = await measured(where, settings, stages(settings), "x", "y")
            assert (made.server.kind, made.server.exact) == ("tercet", True)
            assert made.server.max_model_len == 512
            for stage in made.stages:
                assert (stage.figures.served, stage.figures.failures) == (3, {})
                assert stage.requests.output_tokens == (7, 7, 7)
                assert stage.figures.tokens_per_message is not None


@pytest.mark.timeout(180)
async def test_vary_starts_a_chain_for_each_value_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(tiers=(20,), output=4, concurrency=(2,), requests=2, warm_up=1, repeats=2)
    chains = [
        StackOptions(MODEL, log_level="error", executor=("--fake", "hash", "--max-sequences", slots)) for slots in "14"
    ]
    documents = await varied(chains, ["max_sequences=1", "max_sequences=4"], settings, stages(settings), "command")
    told_rounds = re.findall(r"^(max_sequences=\d), round (\d)/2$", capsys.readouterr().err, re.M)
    assert told_rounds == [(f"max_sequences={slots}", number) for number in "12" for slots in "14"]
    assert [stage.repeat for stage in documents[0].stages] == [0, 1]
    assert {ratio.metric for ratio in compare(*documents)} >= {"output tok/s", "TTFT P50"}


def test_variants_change_one_thing() -> None:
    made = variants(["executor.threads=1,2", "scheduler.policy=shortest"])
    assert [one.label for one in made] == ["threads=1", "threads=2"]
    assert made[1].flags == {"executor": ("--threads", "2"), "scheduler": ("--policy", "shortest")}
    every = variants(["executor.threads=1,2", "scheduler.prefill-chunk=64,128"], all_combinations=True)
    assert [one.label for one in every][:2] == ["threads=1 prefill_chunk=64", "threads=1 prefill_chunk=128"]


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["executor.threads=1,2", "scheduler.policy=fcfs,fair"], "one thing is changed at a time"),
        (["executor.threads=1"], "nothing to compare"),
        (["executor.threads=1,1"], "a value twice"),
        (["executor.threads=1,2", "executor.threads=3"], "executor.threads twice"),
        (["threads=1,2"], "not PROCESS.NAME=VALUE"),
        (["gateway.http=1,2"], "'gateway' is none of tokenizer, scheduler, executor"),
        (["executor.sluts=1,2"], "'sluts' is no setting of the executor"),
        (["executor.listen=a,b"], "listen is given to the executor"),
        (["executor.threads=1,many"], "--threads is 'many'"),
        (["executor.threads=1,0"], "--threads is 0"),
    ],
)
def test_what_can_t_be_varied_is_refused(texts: list[str], problem: str) -> None:
    with pytest.raises(VaryError, match=re.escape(problem)):
        variants(texts)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--target", "a:1", "--url", "http://a"], "--target and --url exclude"),
        (["--concurrency", "1", "--rate", "2"], "--concurrency and --rate exclude"),
        (["--rate", "2", "--trace", "x.csv"], "--rate and --trace exclude"),
        (["--trace", "x.csv", "--shared-prefix", "3"], "no --shared-prefix"),
        (["--trace", "x.csv", "--requests", "3"], "a trace is cut by --first"),
        (["--trace", "nowhere.csv"], "nowhere.csv"),
        (["--scale", "2"], "--scale is of a --trace"),
        (["--first", "2"], "--first and --length-divisor are of a --trace"),
        (["--tiers", "0"], "--tiers is 0, allowed is 1"),
        (["--tiers", ""], "--tiers is empty"),
        (["--tiers", "x"], "'x' is no whole number"),
        (["--output", "0"], "--output is 0"),
        (["--concurrency", "-1"], "--concurrency is -1"),
        (["--rate", "0"], "--rate"),
        (["--rate", "fast"], "'fast' is no number"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--timeout", "0"], "--timeout is 0"),
        (["--temperature", "-1"], "--temperature is -1"),
        (["--slo", "speed=3"], "--slo: 'speed' is none of"),
        (["--extra", "{}", "--server", "vllm"], "are of a --url"),
        (["--url", "http://a", "--extra", "[]"], "not a JSON object"),
        (["--url", "http://a", "--key-variable", "TERCET_TESTS_UNSET"], "TERCET_TESTS_UNSET is not set"),
        (["--target", "a:1", "--model", "x"], "a --target serves one"),
        (["--model", "nothing-like-it"], "nothing-like-it"),
        (["vary", "--set", "executor.threads=1"], "nothing to compare"),
        (["compare", "nowhere.json", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 1
    told_error = capsys.readouterr().err
    assert problem in told_error
    assert "Traceback" not in told_error


def settings_of(*argv: str) -> Settings:
    return read_settings(measure_parser().parse_args(argv), 3)


def test_stages_are_tiers_times_levels() -> None:
    made = stages(settings_of("--tiers", "10,20", "--output", "4", "--concurrency", "8,1"))
    assert [(one.name, one.load, len(one.requests), len(one.warm_up)) for one in made] == [
        ("10 in, 4 out", "1 at once", 4, 1),
        ("10 in, 4 out", "8 at once", 8, 8),
        ("20 in, 4 out", "1 at once", 4, 1),
        ("20 in, 4 out", "8 at once", 8, 8),
    ]
    assert longest(made) == 24
    (rated,) = stages(settings_of("--rate", "2", "--warm-up", "0"))
    assert (rated.load, len(rated.requests), rated.warm_up) == ("2/s", 60, ())
    assert 20 < rated.requests[-1].at_ns / 1e9 < 45
    assert stages(settings_of("--rate", "2")) == stages(settings_of("--rate", "2"))


def test_a_trace_is_replayed_faster(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    rows += [f"2023-11-16 18:00:0{second}.5,{100 + second},9" for second in range(0, 9, 2)]
    trace.write_text("\n".join(rows))
    (replayed,) = stages(settings_of("--trace", str(trace), "--scale", "4", "--first", "4", "--length-divisor", "2"))
    assert [one.at_ns / 1e9 for one in replayed.requests] == [0, 0.5, 1, 1.5]
    assert [(one.prompt_len, one.output_len) for one in replayed.requests] == [(50, 5), (51, 5), (52, 5), (53, 5)]
    assert replayed.level == pytest.approx(4 / 1.5)
    drawn = stages(settings_of("--lengths-from", str(trace), "--concurrency", "2", "--requests", "30"))
    assert {one.prompt_len for one in drawn[0].requests} <= {100, 102, 104, 106, 108}
    assert len({one.prompt_len for one in drawn[0].requests}) > 2


def test_no_option_is_silently_dropped() -> None:
    with pytest.raises(OptionError):
        settings_of("--lengths-from", "x.csv", "--trace", "y.csv")


def test_a_bar_never_wraps() -> None:
    assert bar("x", 3, 12, 41.2, 80) == "x [#######.......................] 3/12  41 tokens/s"
    assert len(bar("x" * 100, 3, 12, 41.2, 80)) == 79
