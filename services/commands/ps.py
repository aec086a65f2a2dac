"""`tercet ps`: the live requests of one scheduler or several as a table, oldest first."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Final

import grpc

from services.commands import calling
from services.commands.which_scheduler import add_flag, which
from services.errors import ServiceError
from services.rpc import Outgoing, make_channel
from services.rpc_errors import from_rpc_error
from services.settings import ConfigError
from tercet.v1 import scheduler_pb2, scheduler_pb2_grpc

ANSWER_S: Final = 5.0
PAGE: Final = 1000
STATES: Final = {
    scheduler_pb2.REQUEST_STATE_WAITING: "waiting",
    scheduler_pb2.REQUEST_STATE_PREFILL: "prefill",
    scheduler_pb2.REQUEST_STATE_DECODE: "decode",
    scheduler_pb2.REQUEST_STATE_PREEMPTED: "preempted",
    scheduler_pb2.REQUEST_STATE_GRAMMAR: "grammar",
}
HEADINGS: Final[tuple[str, ...]] = (
    "REQUEST",
    "TENANT",
    "PRI",
    "STATE",
    "AGE",
    "WAITS FOR",
    "SINCE",
    "PLACE",
    "PROMPT",
    "OUTPUT",
    "COMPUTED",
    "BLOCKS",
    "PREEMPTED",
    "EXECUTOR",
)
TO_THE_LEFT: Final = frozenset({"REQUEST", "TENANT", "STATE", "WAITS FOR", "EXECUTOR", "SCHEDULER"})


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tercet ps", description=__doc__, allow_abbrev=False)
    add_flag(parser)
    calling.add_flags(parser)
    chosen = parser.parse_args(argv)
    targets = which(chosen.scheduler, os.environ)
    try:
        outgoing = calling.outgoing(chosen, os.environ)
    except ConfigError as error:
        parser.error(error.message)
    found = asyncio.run(_requests(targets, outgoing))
    seen: list[tuple[str, scheduler_pb2.RequestSnapshot]] = []
    failed = False
    for target, answer in zip(targets, found, strict=True):
        if isinstance(answer, ServiceError):
            print(f"tercet ps: the scheduler at {target}: {answer.message}", file=sys.stderr)
            failed = True
        else:
            seen += [(target, request) for request in answer]
    if len(targets) > 1:
        seen.sort(key=lambda one: -one[1].age_ns)
        print("\n".join(table([request for _, request in seen], [target for target, _ in seen])))
    elif not failed:
        print("\n".join(table([request for _, request in seen])))
    return 1 if failed else 0


async def _requests(
    targets: Sequence[str], outgoing: Outgoing
) -> list[list[scheduler_pb2.RequestSnapshot] | ServiceError]:
    async def ask(target: str) -> list[scheduler_pb2.RequestSnapshot] | ServiceError:
        try:
            async with make_channel(target, outgoing=outgoing) as channel:
                return await live_requests(scheduler_pb2_grpc.SchedulerServiceStub(channel))
        except ServiceError as error:
            return error

    return list(await asyncio.gather(*(ask(target) for target in targets)))


async def live_requests(stub: "scheduler_pb2_grpc.SchedulerServiceAsyncStub") -> list[scheduler_pb2.RequestSnapshot]:
    """All of them, page by page. Raises ServiceError."""
    requests: list[scheduler_pb2.RequestSnapshot] = []
    token = ""
    try:
        while True:
            page = await stub.ListRequests(
                scheduler_pb2.SchedulerServiceListRequestsRequest(page_size=PAGE, page_token=token), timeout=ANSWER_S
            )
            requests.extend(page.requests)
            token = page.next_page_token
            if not token:
                return requests
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None


def table(requests: Sequence[scheduler_pb2.RequestSnapshot], schedulers: Sequence[str] | None = None) -> list[str]:
    """Lines: the headings, then one a request. schedulers: where each is, as a further column."""
    headings, rows = HEADINGS, [_row(request) for request in requests]
    if schedulers is not None:
        headings = (*HEADINGS, "SCHEDULER")
        rows = [(*row, target) for row, target in zip(rows, schedulers, strict=True)]
    rows = [headings, *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(headings))]
    return [
        "  ".join(
            cell.ljust(width) if heading in TO_THE_LEFT else cell.rjust(width)
            for cell, width, heading in zip(row, widths, headings, strict=True)
        ).rstrip()
        for row in rows
    ]


def duration(nanoseconds: int) -> str:
    """In three digits or so: "480ms", "12.3s", "4m05s"."""
    seconds = nanoseconds / 1e9
    if seconds < 1:
        return f"{nanoseconds // 1_000_000}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def _row(request: scheduler_pb2.RequestSnapshot) -> tuple[str, ...]:
    waits = bool(request.waits_for)
    return (
        request.request_id,
        request.tenant,
        str(request.priority),
        STATES.get(request.state, "unknown"),
        duration(request.age_ns),
        request.waits_for or "-",
        duration(request.waited_ns) if waits else "-",
        str(request.position) if waits else "-",
        str(request.prompt_tokens),
        str(request.output_tokens),
        str(request.computed_tokens),
        str(request.blocks),
        str(request.preemptions),
        request.executor or "-",
    )
