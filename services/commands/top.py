"""`tercet top`: a scheduler's queue, batch, blocks and speed, drawn anew every second.

On a terminal the view is drawn in place; elsewhere one block follows the other. Speed is what the requests that were
alive at both looks have drawn in between, so a request that came and went between two looks is not in it. Several
schedulers are shown one below the other.
"""

import argparse
import asyncio
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final, TextIO

import grpc

from services.commands import calling
from services.commands.ps import ANSWER_S, live_requests, table
from services.commands.which_scheduler import add_flag, which
from services.errors import ServiceError
from services.rpc import Outgoing, make_channel
from services.rpc_errors import from_rpc_error
from services.settings import ConfigError
from tercet.v1 import scheduler_pb2, scheduler_pb2_grpc

HOME_AND_CLEAR: Final = "\x1b[H\x1b[2J"
BAR: Final = 40  # characters of a pool's bar


@dataclass(frozen=True, slots=True)
class Look:
    """at: seconds, monotonic."""

    at: float
    load: scheduler_pb2.SchedulerServiceGetLoadResponse
    requests: tuple[scheduler_pb2.RequestSnapshot, ...]

    @property
    def drawn(self) -> Mapping[str, int]:
        return {f"{one.tenant}/{one.request_id}/{one.index}": one.output_tokens for one in self.requests}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tercet top", description=__doc__.partition("\n")[0], allow_abbrev=False)
    add_flag(parser)
    calling.add_flags(parser)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two looks; default 1")
    parser.add_argument("--once", action="store_true", help="one view, then end")
    chosen = parser.parse_args(argv)
    if not chosen.interval > 0:
        parser.error("--interval must be above 0")
    targets = which(chosen.scheduler, os.environ)
    try:
        outgoing = calling.outgoing(chosen, os.environ)
    except ConfigError as error:
        parser.error(error.message)
    return asyncio.run(_watch(targets, outgoing, chosen.interval, once=chosen.once, out=sys.stdout))


async def _watch(targets: Sequence[str], outgoing: Outgoing, interval_s: float, *, once: bool, out: TextIO) -> int:
    """Until cancelled; with `once`, and where none answers, the exit code."""
    async with AsyncExitStack() as stack:
        stubs = [
            scheduler_pb2_grpc.SchedulerServiceStub(
                await stack.enter_async_context(make_channel(target, outgoing=outgoing))
            )
            for target in targets
        ]
        before: list[Look | ServiceError] = []
        while True:
            now = await asyncio.gather(*(_look_or_error(stub) for stub in stubs))
            failed = [one for one in now if isinstance(one, ServiceError)]
            if len(failed) == len(targets):
                for target, error in zip(targets, failed, strict=True):
                    print(f"tercet top: the scheduler at {target}: {error.message}", file=sys.stderr)
                return 1
            if before or not once:  # speed takes two looks
                _draw(_views(targets, before, now, shutil.get_terminal_size().lines), out)
                if once:
                    return 1 if failed else 0
            before = list(now)
            await asyncio.sleep(interval_s)


def _views(
    targets: Sequence[str], before: Sequence[Look | ServiceError], now: Sequence[Look | ServiceError], height: int
) -> list[str]:
    lines: list[str] = []
    for index, (target, look) in enumerate(zip(targets, now, strict=True)):
        if isinstance(look, ServiceError):
            lines.append(f"tercet scheduler {target}   {look.message}")
        else:
            last = before[index] if before else None
            lines += view(target, last if isinstance(last, Look) else None, look, height // len(targets))
        lines.append("")
    return lines[:-1]


async def _look_or_error(stub: "scheduler_pb2_grpc.SchedulerServiceAsyncStub") -> Look | ServiceError:
    try:
        return await _look(stub)
    except ServiceError as error:
        return error


async def _look(stub: "scheduler_pb2_grpc.SchedulerServiceAsyncStub") -> Look:
    try:
        load = await stub.GetLoad(scheduler_pb2.SchedulerServiceGetLoadRequest(), timeout=ANSWER_S)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    return Look(time.monotonic(), load, tuple(await live_requests(stub)))


def _draw(lines: Sequence[str], out: TextIO) -> None:
    if out.isatty():
        out.write(HOME_AND_CLEAR + "\n".join(lines) + "\n")
    else:
        out.write("\n".join(lines) + "\n\n")
    out.flush()


def view(target: str, before: Look | None, now: Look, height: int) -> list[str]:
    """At most `height` lines, but for the figures, which are always whole."""
    load = now.load
    state = "draining" if load.draining else f"executors: {len(load.lanes)}"
    lines = [
        f"tercet scheduler {target}   {state}",
        f"queue {load.waiting_requests} requests, {load.waiting_tokens} tokens   "
        f"batch {load.running_requests} requests   {_speed(before, now)}",
        "",
    ]
    lines += [line for lane in load.lanes for line in _lane(lane)]
    lines.append("")
    rows = table(now.requests)
    room = max(2, height - len(lines) - 2)
    lines += rows[:room]
    if len(rows) > room:
        lines.append(f"... and {len(rows) - room} more")
    return lines


def _speed(before: Look | None, now: Look) -> str:
    if before is None or now.at <= before.at:
        return "- tokens/s"
    had = before.drawn
    drawn = sum(count - had[key] for key, count in now.drawn.items() if key in had)
    return f"{max(0, drawn) / (now.at - before.at):.1f} tokens/s"


def _lane(lane: scheduler_pb2.LaneLoad) -> list[str]:
    """Fenced blocks are shown with the live ones: they are not to be had yet."""
    live, cached, free = lane.live_blocks + lane.fenced_blocks, lane.cached_blocks, lane.free_blocks
    total = max(1, lane.total_blocks)
    marks = "#" * round(BAR * live / total) + "+" * round(BAR * cached / total)
    legend = f"# live {live}  + cached {cached}  . free {free}  of {lane.total_blocks}"
    return [
        f"executor {lane.executor}   {lane.running_requests} requests, {lane.steps_in_flight} steps in flight",
        f"  blocks [{marks[:BAR].ljust(BAR, '.')}] {legend}",
    ]
