"""Traces, lengths, tenants, cost models: read rightly, and refused by name."""

import os
import random
from pathlib import Path

import pytest

from services.simulate.cost import PRESETS, CostError, CostModel, StepWork, chunk_context, from_json
from services.simulate.load import (
    Arrivals,
    LoadError,
    Request,
    Tenant,
    generate,
    lengths_of,
    parse_lengths,
    parse_tenants,
    reshaped,
)
from services.simulate.traces import TraceError, read_trace

MOONCAKE = '{"timestamp": 27, "input_length": 600, "output_length": 3, "hash_ids": [4, 5]}'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def write(directory: Path, name: str, *lines: str) -> Path:
    path = directory / name
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_mooncake(tmp_path: Path) -> None:
    second = MOONCAKE.replace("27", "3000").replace("[4, 5]", "[4, 6]")
    assert read_trace(write(tmp_path, "a.jsonl", MOONCAKE, "", second, "")) == [
        Request(27_000_000, 600, 3, (4, 5)),
        Request(3_000_000_000, 600, 3, (4, 6)),
    ]


def test_azure(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", AZURE, "2023-11-16 23:59:59.9799600,4808,10", "2023-11-17 00:00:00.0319600,34,8")
    assert read_trace(path) == [Request(0, 4808, 10), Request(52_000_000, 34, 8)]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", r"a.jsonl:2: not JSON"),
        ("[]", r"a.jsonl:2: needs an object with timestamp"),
        (MOONCAKE.replace('"output_length"', '"out"'), r"a.jsonl:2: needs an object"),
        (MOONCAKE.replace("600", "-1"), r"a.jsonl:2: input_length is -1"),
        (MOONCAKE.replace("600", "true"), r"a.jsonl:2: input_length is True"),
        (MOONCAKE.replace("600", "1.5"), r"a.jsonl:2: input_length is 1.5"),
        (MOONCAKE.replace("600", "2000"), r"a.jsonl:2: 2 hash_ids; 2000 tokens are 4 blocks"),
        (MOONCAKE.replace('"output_length": 3', '"output_length": 0'), r"a.jsonl:2: 600 tokens in, 0 out"),
        (MOONCAKE.replace("[4, 5]", '[4, "5"]'), r"a.jsonl:2: hash_ids must be"),
        (MOONCAKE.replace("27", "26"), r"a.jsonl:2: its time is before"),
    ],
)
def test_malformed_mooncake_lines_are_named(tmp_path: Path, line: str, problem: str) -> None:
    with pytest.raises(TraceError, match=problem):
        read_trace(write(tmp_path, "a.jsonl", MOONCAKE, line))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("2023-11-16 18:17:03.9799600,4808", r"a.csv:3: 2 cells, not 3"),
        ("16.11.2023,4808,10", r"a.csv:3: TIMESTAMP '16.11.2023' is not"),
        ("2023-11-16 18:17:03.x,4808,10", r"a.csv:3: TIMESTAMP .* fraction"),
        ("2023-11-16 18:17:03.9,many,10", r"a.csv:3: ContextTokens is 'many'"),
        ("2023-11-16 18:17:03.9,5,-10", r"a.csv:3: GeneratedTokens is '-10'"),
        ("2023-11-16 18:17:03.9,5,0", r"a.csv:3: 5 tokens in, 0 out"),
        ("2023-11-15 18:17:03.9,5,6", r"a.csv:3: its time is before"),
    ],
)
def test_malformed_azure_lines_are_named(tmp_path: Path, line: str, problem: str) -> None:
    with pytest.raises(TraceError, match=problem):
        read_trace(write(tmp_path, "a.csv", AZURE, "2023-11-16 00:00:00.5,1,1", line))


@pytest.mark.parametrize(
    ("name", "count", "shared"),
    [
        ("mooncake_conversation.jsonl", 12_031, True),
        ("mooncake_synthetic.jsonl", 3_993, True),
        ("azure_conv_2023.csv", 19_366, False),
        ("azure_code_2023.csv", 8_819, False),
    ],
)
def test_the_published_traces_are_read_whole(name: str, count: int, shared: bool) -> None:
    """In the directory that TERCET_TESTS_TRACES names."""
    path = Path(os.environ.get("TERCET_TESTS_TRACES", "")) / name
    if not path.is_file():
        pytest.skip(f"{name} is missing: TERCET_TESTS_TRACES names no directory with it")
    requests = read_trace(path)
    assert len(requests) == count
    assert requests[0].at_ns == 0
    assert all(bool(request.block_ids) == shared for request in requests)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"a.csv:1: the header is 'time,in'"):
        read_trace(write(tmp_path, "a.csv", "time,in"))
    with pytest.raises(TraceError, match=r"known are .jsonl, .csv"):
        read_trace(write(tmp_path, "a.txt", ""))
    with pytest.raises(TraceError, match="holds no request"):
        read_trace(write(tmp_path, "empty.jsonl", ""))


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("fixed:7", 7, 7), ("uniform:3:9", 3, 9), ("lognormal:50:1:80", 1, 80), ("lognormal:1:3", 1, 10**9)],
)
def test_lengths_stay_in_their_range(text: str, low: int, high: int) -> None:
    source, draw = random.Random(1), parse_lengths(text, "x")
    values = [draw(source) for _ in range(500)]
    assert low <= min(values)
    assert max(values) <= high


@pytest.mark.parametrize(
    "text", ["", "fixed", "fixed:0", "fixed:a", "uniform:9:3", "lognormal:5", "normal:1:1", "fixed:nan"]
)
def test_lengths_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(LoadError, match="outputs"):
        parse_lengths(text, "outputs")


def test_tenants() -> None:
    assert parse_tenants("a=10,b,c=0.5@3") == (Tenant("a", 10), Tenant("b"), Tenant("c", 0.5, 3))
    for text in ("a=x", "a=1,a=2", "=3", "a=0", "a=1@high"):
        with pytest.raises(LoadError, match="tenants"):
            parse_tenants(text)


def test_arrivals_have_their_rate_and_bursts() -> None:
    one = parse_lengths("fixed:1", "x")
    single = [request.at_ns for request in generate(4000, Arrivals(50), one, one, 3)]
    assert single == sorted(single)
    assert 4000 / (single[-1] / 1e9) == pytest.approx(50, rel=0.06)
    bursts = [request.at_ns for request in generate(4000, Arrivals(50, burst=4), one, one, 3)]
    assert len(set(bursts)) == 1000
    assert 4000 / (bursts[-1] / 1e9) == pytest.approx(50, rel=0.12)
    for arrivals in ((0, 1), (float("nan"), 1), (1, 0)):
        with pytest.raises(LoadError):
            Arrivals(*arrivals)


def test_lengths_drawn_from_a_trace_stay_pairs() -> None:
    trace = [Request(0, 10, 100), Request(1, 20, 200)]
    prompts, outputs = lengths_of(trace, 5)
    made = list(generate(50, Arrivals(1), prompts, outputs, 5))
    assert {(request.prompt_len, request.output_len) for request in made} == {(10, 100), (20, 200)}


def test_reshaping() -> None:
    trace = [Request(0, 10, 1, (1,)), Request(1000, 9, 8, (1,)), Request(9000, 1, 1, (2,))]
    assert reshaped(trace, rate_scale=2, length_divisor=4, limit=2) == [Request(0, 3, 1), Request(500, 3, 2)]
    assert reshaped(trace) == trace
    with pytest.raises(LoadError, match="rate_scale"):
        reshaped(trace, rate_scale=0)


def test_cost_models() -> None:
    model = CostModel(1000, 10, 100, 1, 2, free_tokens=8, request_ns=5)
    assert model.step_ns(StepWork(0, 0, 0, 0)) == 1000
    assert model.step_ns(StepWork(6, 2, 0, 0)) == 1000
    assert model.step_ns(StepWork(6, 4, 0, 0)) == 1200
    assert model.step_ns(StepWork(20, 1, 3, 4)) == 1000 + 120 + 100 + 3 + 8
    assert from_json(model.to_json()) == model
    assert model.scaled(2).step_ns(StepWork(20, 1, 3, 4)) == 2 * model.step_ns(StepWork(20, 1, 3, 4))
    assert chunk_context(3, 2) == 4 + 5
    for name, preset in PRESETS.items():
        assert from_json(preset.to_json()) == preset, name


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"base_ns": 1, "speed": 2}', "speed is unknown, prefill_token_ns is missing"),
        (PRESETS["gpu-like"].to_json().replace("6000000.0", "-1"), "base_ns is -1"),
        (PRESETS["gpu-like"].to_json().replace("6000000.0", '"x"'), "base_ns is 'x'"),
        (PRESETS["gpu-like"].to_json().replace("200", "1.5"), "free_tokens is 1.5; a whole number"),
    ],
)
def test_cost_models_that_make_no_sense_are_refused(text: str, problem: str) -> None:
    with pytest.raises(CostError, match=problem):
        from_json(text)
