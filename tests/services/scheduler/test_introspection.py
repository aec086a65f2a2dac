"""What a scheduler tells of its requests, and how `tercet ps` and `tercet top` show it."""

import asyncio
import io
from dataclasses import replace
from pathlib import Path

import pytest
from chain import CAPACITY, Chain, chain, scheduler
from fake_stack import running_executor, until

from services import cli
from services.commands import ps, top
from services.commands.which_scheduler import default_target, which
from services.rpc import PLAIN
from services.scheduler.core.calls import CoreConfig
from tercet.v1 import common_pb2, scheduler_pb2

ONE_SLOT = replace(CAPACITY, max_sequences=1)


def request(name: str, tokens: int = 100, length: int = 6, priority: int = 0) -> object:
    return scheduler_pb2.SchedulerServiceGenerateRequest(
        context=common_pb2.RequestContext(request_id=name, priority=priority),
        prompt_ids=list(range(3 + len(name), 3 + len(name) + length)),
        sampling=common_pb2.SamplingParams(max_tokens=tokens, temperature=0.0),
    )


async def accepted(running: Chain, message: object) -> object:
    call = running.stub.Generate(message)  # type: ignore[arg-type]
    assert (await call.read()).HasField("accepted")
    return call


async def listed(running: Chain) -> dict[str, scheduler_pb2.RequestSnapshot]:
    answer = await running.stub.ListRequests(scheduler_pb2.SchedulerServiceListRequestsRequest())
    return {one.request_id: one for one in answer.requests}


async def test_who_waits_is_told_for_what_since_when_and_where() -> None:
    async with chain(capacity=ONE_SLOT) as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.02)
        calls = [await accepted(running, request("first"))]
        await until(lambda: running.engine.load().waiting == 0, "the admission")
        calls += [await accepted(running, request(name)) for name in ("second", "third")]
        await asyncio.sleep(0.05)
        seen = await listed(running)
        assert seen["first"].executor == fake.target
        assert (seen["first"].waits_for, seen["first"].waited_ns, seen["first"].position) == ("", 0, 0)
        assert (seen["second"].waits_for, seen["second"].position) == ("slots", 0)
        assert (seen["third"].waits_for, seen["third"].position) == ("queue", 1)
        for name in ("second", "third"):
            assert seen[name].executor == ""
            assert 40_000_000 < seen[name].waited_ns <= seen[name].age_ns
        for call in calls:
            call.cancel()  # type: ignore[attr-defined]


async def test_blocks_and_executors_are_named_too() -> None:
    small = replace(CAPACITY, total_blocks=16, max_model_len=64)
    async with running_executor("hash", small) as fake:
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.02)
        async with scheduler(fake.target, CoreConfig(watermark=0.0)) as running:
            await until(lambda: not running.lease.state.reason, "the lease")
            calls = [await accepted(running, request("big", 24, 40, priority=7))]
            await until(lambda: running.engine.load().waiting == 0, "the admission")
            calls.append(await accepted(running, request("other", 10, 40)))
            await asyncio.sleep(0.02)
            seen = await listed(running)
            assert seen["big"].priority == 7
            assert seen["other"].waits_for == "blocks"
            running.engine.lose(running.lease.lane)
            seen = await listed(running)
            assert {one.waits_for for one in seen.values()} == {"executor"}
            assert {one.executor for one in seen.values()} == {""}
            for call in calls:
                call.cancel()  # type: ignore[attr-defined]


async def test_ps_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    async with chain(capacity=ONE_SLOT) as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.02)
        calls = [await accepted(running, request(name)) for name in ("first", "second")]
        await until(lambda: running.engine.load().waiting == 1, "the admission")
        lines = ps.table(await ps.live_requests(running.stub))
        assert lines[0].split()[:4] == ["REQUEST", "TENANT", "PRI", "STATE"]
        assert [line.split()[0] for line in lines[1:]] == ["first", "second"]
        assert lines[2].split()[3:6:2] == ["waiting", "slots"]
        for call in calls:
            call.cancel()  # type: ignore[attr-defined]
    assert await asyncio.to_thread(cli.main, ["ps", "--scheduler", "127.0.0.1:1"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err


async def test_top_shows_queue_batch_pool_and_speed() -> None:
    async with chain(capacity=ONE_SLOT) as (running, fake):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.01)
        calls = [await accepted(running, request(name)) for name in ("first", "second")]
        await until(lambda: running.engine.load().waiting == 1, "the admission")
        before = await top._look(running.stub)
        await asyncio.sleep(0.2)
        now = await top._look(running.stub)
        lines = top.view("here", before, now, 40)
        assert "queue 1 requests, 6 tokens   batch 1 requests" in lines[1]
        speed = float(lines[1].split()[-2])
        assert speed > 0
        pool = next(line for line in lines if "blocks [" in line)
        assert "#" in pool.partition("]")[0]
        lane = now.load.lanes[0]
        assert f"of {lane.total_blocks}" in pool
        assert f"free {lane.free_blocks}" in pool
        assert top.view("here", None, now, 40)[1].endswith("- tokens/s")
        assert any(line.startswith("first") for line in lines)
        assert top.view("here", before, now, 8)[-1].startswith("... and 1 more")
        out = io.StringIO()
        assert await top._watch([running.target], PLAIN, 0.05, once=True, out=out) == 0
        assert top.HOME_AND_CLEAR not in out.getvalue()
        assert "tokens/s" in out.getvalue()
        for call in calls:
            call.cancel()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [(480_000_000, "480ms"), (12_340_000_000, "12.3s"), (245 * 10**9, "4m05s"), (4 * 10**12, "1h06m")],
)
def test_durations(nanoseconds: int, text: str) -> None:
    assert ps.duration(nanoseconds) == text


def test_the_scheduler_of_a_running_chain_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert which(None, {}) == (default_target(),)
    socket = tmp_path / "tercet-abc" / "scheduler.sock"
    socket.parent.mkdir()
    socket.touch()
    assert which(None, {}) == (f"unix:{socket}",)
    assert which("host:1", {}) == ("host:1",)
    assert which("host:1, host:2,host:1", {}) == ("host:1", "host:2")


async def test_several_schedulers_are_shown_together(capsys: pytest.CaptureFixture[str]) -> None:
    async with chain() as (one, fake), chain() as (other, second):
        fake.runner.faults = replace(fake.runner.faults, delay_s=0.02)
        second.runner.faults = replace(second.runner.faults, delay_s=0.02)
        calls = [await accepted(one, request("first")), await accepted(other, request("second"))]
        both = f"{one.target},{other.target}"
        assert await asyncio.to_thread(cli.main, ["ps", "--scheduler", both]) == 0
        headings, *rows = capsys.readouterr().out.splitlines()
        assert headings.split()[-1] == "SCHEDULER"
        assert [(row.split()[0], row.split()[-1]) for row in rows] == [("first", one.target), ("second", other.target)]
        gone = f"{both},127.0.0.1:1"
        assert await asyncio.to_thread(cli.main, ["ps", "--scheduler", gone]) == 1
        told = capsys.readouterr()
        assert "127.0.0.1:1" in told.err
        assert len(told.out.splitlines()) == 3
        assert await asyncio.to_thread(cli.main, ["top", "--once", "--interval", "0.05", "--scheduler", gone]) == 1
        shown = capsys.readouterr().out
        assert all(target in shown for target in gone.split(","))
        assert shown.count("batch 1 requests") == 2
        assert await asyncio.to_thread(cli.main, ["top", "--once", "--scheduler", "127.0.0.1:1"]) == 1
        assert "127.0.0.1:1" in capsys.readouterr().err
        for call in calls:
            call.cancel()  # type: ignore[attr-defined]
