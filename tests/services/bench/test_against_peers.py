"""The comparison's own parts: what is measured when, what a table says, what is left when something fails."""

import importlib
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_stack import until
from tiny_model import write_tiny_model

from executor.loading.load import load_runner

ROOT = Path(__file__).parents[3]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("against_peers")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("peer_figures")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("engine_speed")


def test_rounds_alternate_and_perplexity_comes_once(tool: Any) -> None:
    assert list(tool.planned(("perplexity", "engine"), 2)) == [
        (0, "engine", "tercet"),
        (0, "engine", "peers"),
        (0, "perplexity", "tercet"),
        (0, "perplexity", "peers"),
        (1, "engine", "peers"),
        (1, "engine", "tercet"),
    ]
    served = [who for _, _, who in tool.planned(("served",), 2)]
    assert served[:5] == list(reversed(served[5:])) == ["tercet", "tercet-engine", "llama-q8", "llama-q40", "vllm"]


def test_a_table_has_medians_and_the_ratios_of_each_round(figures: Any) -> None:
    measured = [
        figures.Figure(number, part, system, name, value)
        for part, system, name, values in (
            ("engine", "vllm-bf16", "decode x1", (100, 200, 100)),
            ("engine", "tercet", "decode x1", (200, 300, 400)),
            ("engine", "llama", "decode x1", (100, 100)),
            ("perplexity", "tercet", "perplexity", (19.2,)),
            ("perplexity", "llama", "perplexity", (19.3,)),
        )
        for number, value in enumerate(values)
    ]
    assert figures.table(measured, figures.GROUPS[0])[2:] == [
        "| | decode x1 | perplexity |",
        "|---|---|---|",
        "| **Tercet** | 300 | 19.2 |",
        "| llama.cpp, the same file | 100 (2.50x, 2.00 to 3.00) | 19.3 |",
        "| vLLM, bf16 | 100 (2.00x, 1.50 to 4.00) | - |",
        "",
    ]
    assert figures.table(measured, figures.GROUPS[1]) == []


def test_every_system_that_is_measured_has_a_name_in_the_table(figures: Any, tool: Any) -> None:
    assert {*tool.OWN, *(who for part in tool.WHO.values() for who in part)} <= set(figures.NAMES)


def test_a_mode_is_measured_with_its_own_settings(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def lines_of(command: list[str], _: Path) -> list[dict[str, Any]]:
        asked.append(command)
        return [{"batch": 8, "prefill": 1.0, "decode": 2.0, "output": 3.0}]

    monkeypatch.setattr(tool, "lines_of", lines_of)
    bench = tool.Bench(tmp_path, tmp_path, "m", "cpu", tmp_path)
    assert bench.measure("modes", "tercet-int8-8bit") == [
        ("tercet-int8-8bit", "decode x8", 2.0),
        ("tercet-int8-8bit", "prefill 1000", 1.0),
    ]
    for command in asked:
        assert command[-4:] == ["--weights", "int8", "--activations", "8bit"]
    assert bench.measure("served", "tercet-engine") == [("tercet-engine", "tokens/s x8", 3.0)]
    assert asked[-1][asked[-1].index("--prompt") + 1] == "256"


def test_of_a_time_less_is_better(figures: Any) -> None:
    name = "first token x8, 1,000 in, ms"
    measured = [
        figures.Figure(0, "served", system, name, value) for system, value in (("tercet", 50.0), ("vllm", 200.0))
    ]
    assert figures.cell(measured, "vllm", name) == "200 (4.00x)"


def test_what_is_measured_is_kept_and_what_failed_is_measured_again(tool: Any, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    broken = {"vllm"}
    asked = []

    class Bench:
        def measure(self, part: str, who: str) -> list[tuple[str, str, float]]:
            asked.append(who)
            if who in broken:
                raise tool.MeasurementFailed("as the script says")
            return [(who, "tokens/s x1", 10.0)]

    settings = {"model": "m", "backend": "cpu"}
    assert tool.measure(Bench(), tool.planned(("served",), 1), tool.read_state(path, settings), path, math.inf) == 1
    assert asked == ["tercet", "tercet-engine", "llama-q8", "llama-q40", "vllm"]
    assert tool.measure(Bench(), tool.planned(("served",), 1), tool.read_state(path, settings), path, -math.inf) == 0
    assert len(asked) == 5, "measured though its time was over"
    broken.clear()
    state = tool.read_state(path, settings)
    assert tool.measure(Bench(), tool.planned(("served",), 1), state, path, math.inf) == 0
    assert asked[5:] == ["vllm"]
    assert len(tool.read_state(path, settings).figures) == 5
    with pytest.raises(SystemExit, match="of another run"):
        tool.read_state(path, {**settings, "backend": "reference"})


def test_the_table_goes_between_the_markers(figures: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.md"
    path.write_text(f"before\n{figures.BEGIN}\nold\n{figures.END}\nafter\n")
    figures.put(path, "new\n")
    assert path.read_text() == f"before\n{figures.BEGIN}\n\nnew\n\n{figures.END}\nafter\n"
    path.write_text("nothing")
    with pytest.raises(ValueError, match="has no"):
        figures.put(path, "new")
    assert figures.BEGIN in (ROOT / "docs/performance.md").read_text()


STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
PARENT = (
    "import subprocess, sys, time; "
    f"print(subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]).pid, flush=True); time.sleep(600)"
)


async def test_a_process_is_ended_with_all_it_started(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child of a child, which ignores SIGTERM."""
    monkeypatch.setattr(tool, "END_S", 0.2)
    with tool.process([sys.executable, "-c", PARENT], os.environ, tmp_path / "log", stdout=subprocess.PIPE) as child:
        grandchild = int(child.stdout.readline())
        assert child.stdout.readline() == "up\n"
        assert sorted(tool.alive(child.pid)) == sorted([child.pid, grandchild])
    child.stdout.close()
    await until(lambda: not tool.alive(child.pid), "the end of both")
    assert child.returncode == -signal.SIGTERM


def test_a_command_that_fails_says_why(tool: Any, tmp_path: Path) -> None:
    good = [sys.executable, "-c", "print('noise'); print('{\"a\": 1}')"]
    assert tool.lines_of(good, tmp_path / "log") == [{"a": 1}]
    with pytest.raises(tool.MeasurementFailed, match="exit code 3"):
        tool.lines_of([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log")
    with pytest.raises(tool.MeasurementFailed, match="vLLM gave no result"):
        tool.lines_of([sys.executable, "-c", "print('vLLM gave no result')"], tmp_path / "log")


def test_a_missing_file_and_an_unknown_part_are_refused(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, problem in (
        (["--peers", "nowhere.py"], "there is no nowhere.py"),
        (["--peers", __file__, "--only", "speed"], "known are engine"),
        (["--peers", __file__, "--only", "engine", "--rounds", "0"], "--rounds"),
    ):
        with pytest.raises(SystemExit):
            tool.main(argv)
        assert problem in capsys.readouterr().err


def test_the_engine_is_driven_by_steps_that_follow(engine: Any, tmp_path: Path) -> None:
    """Prompts that don't fit a step, several of them in one, and blocks for every token."""
    runner = load_runner(
        write_tiny_model(tmp_path / "tiny.gguf"),
        backend="reference",
        block_size=engine.BLOCK,
        total_blocks=3 * 3,
        max_batched_tokens=24,
        max_sequences=3,
        max_model_len=45,
    )
    speed = engine.measure(runner, "tercet", 3, 40, 5, 1)
    assert (speed.batch, speed.prompt, speed.new) == (3, 40, 5)
    assert speed.prefill > 0
    assert speed.decode > speed.output > 0
    assert engine.measure(runner, "tercet", 1, 40, 1, 1).decode is None
    assert runner.live_sequences == 0
    json.dumps(speed.prefill)
