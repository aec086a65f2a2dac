"""Recordings of a core: what is written, that it replays, and that a difference is found."""

import asyncio
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from chain import CAPACITY, chain
from scheduler_model import SPEC, answer, ask

from services.commands import replay as command
from services.scheduler.core.calls import CoreConfig, Limits, QueueFull
from services.scheduler.core.core import SchedulerCore
from services.scheduler.record import BadRecording, Recorder, replay
from tercet.v1 import common_pb2, scheduler_pb2

CONFIG = CoreConfig(max_queued_requests=3, prefill_chunk=8)


def session(core: SchedulerCore) -> None:
    """A few of everything, refusals and losses among it."""
    core.attach("lane", SPEC, 0)
    for number in range(3):
        core.submit(ask(f"tenant/s{number}#1", 5 + number, limits=Limits(total_ns=10_000)), number)
    with pytest.raises(QueueFull):
        core.submit(ask("late", 5), 3)
    for now in range(4, 20):
        plan = core.plan("lane", now)
        if plan is not None:
            core.apply("lane", answer(plan), now)
        core.check()
    core.cancel("tenant/s1#1", 20)
    core.lose("lane", 21)
    core.expire(99_999)


def recorded(path: Path) -> Path:
    core = SchedulerCore(CONFIG)
    with Recorder(path, CONFIG) as recorder:
        core.listener = recorder.note
        session(core)
    return path


@pytest.mark.parametrize("name", ["calls.jsonl", "calls.jsonl.gz"])
def test_a_recording_replays_to_the_same_answers(tmp_path: Path, name: str) -> None:
    path = recorded(tmp_path / name)
    replayed = replay(path)
    assert replayed.difference is None
    assert not replayed.cut
    text = gzip.decompress(path.read_bytes()).decode() if name.endswith("gz") else path.read_text()
    assert replayed.calls == text.count("\n") - 1
    assert {json.loads(line)[0] for line in text.splitlines()[1:]} == {
        *("attach", "submit", "plan", "apply", "cancel", "lose", "expire")
    }
    assert "QueueFull" in text


def test_the_first_difference_is_told_and_is_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded(tmp_path / "calls.jsonl")
    assert command.main([str(path)]) == 0
    assert "every answer equal" in capsys.readouterr().out
    lines = path.read_text().splitlines(keepends=True)
    at = next(index for index, line in enumerate(lines) if '"PlannedSlice"' in line)
    lines[at] = lines[at].replace('"count":', '"count":1', 1)
    path.write_text("".join(lines))
    assert command.main([str(path)]) == 1
    told = capsys.readouterr().out
    assert f"line {at + 1}: plan('lane'" in told
    assert "recorded:" in told
    assert "given:" in told
    assert command.main([str(tmp_path / "nothing")]) == 1


def test_a_file_that_was_cut_replays_as_far_as_it_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded(tmp_path / "calls.jsonl")
    whole = replay(path).calls
    path.write_text(path.read_text()[:-20])
    replayed = replay(path)
    assert (replayed.calls, replayed.cut, replayed.difference) == (whole - 1, True, None)
    assert command.main([str(path)]) == 0
    assert "not whole" in capsys.readouterr().out
    packed = tmp_path / "cut.gz"
    packed.write_bytes(recorded(tmp_path / "whole.gz").read_bytes()[:-30])
    assert replay(packed).difference is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1"),
        ("{}\n", "line 1"),
        ('{"tercet_recording": 99, "config": {"CoreConfig": {}}}\n', "form 99"),
        ('{"tercet_recording": 1, "config": {"CoreConfig": {}}}\n["_count", [], {"map": []}, null]\n', "no verb"),
        ('{"tercet_recording": 1, "config": {"CoreConfig": {}}}\nplan\n', "line 2"),
    ],
)
def test_what_is_no_recording_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad"
    path.write_text(text)
    with pytest.raises(BadRecording, match=message):
        replay(path)


def test_a_writer_that_falls_behind_ends_the_recording_and_delays_nobody(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    core = SchedulerCore(CONFIG)
    recorder = Recorder(path, CONFIG, waiting_most=5)  # its thread is not started: so it never writes
    core.listener = recorder.note
    session(core)
    assert recorder.ended
    core.check()  # the core goes on as ever
    recorder._file.close()


async def test_what_a_scheduler_served_replays_and_holds_no_token(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    capacity = replace(CAPACITY, total_blocks=24, max_model_len=64)
    config = CoreConfig(default_output_estimate=1, prefill_chunk=5)
    async with chain(capacity=capacity, core=config) as (running, _):
        with Recorder(path, config) as recorder:
            # The lane came before the recorder did: a recording begins with the core.
            recorder.note("attach", (running.lease.lane, running.core._lanes[running.lease.lane].spec, 0), {}, [])
            running.core.listener = recorder.note

            async def one(number: int) -> None:
                message = scheduler_pb2.SchedulerServiceGenerateRequest(
                    prompt_ids=[700 + number, 800, 900] * (1 + number % 4),
                    sampling=common_pb2.SamplingParams(max_tokens=20 + number, temperature=0.0),
                )
                async for _ in running.stub.Generate(message):
                    pass

            await asyncio.gather(*(one(number) for number in range(10)))
            running.core.listener = None
    replayed = replay(path)
    assert replayed.difference is None
    assert replayed.calls > 50
