"""`tercet conform executor|scheduler|tokenizer ADDRESS`: does a service, of whatever make, keep to the contract?

Black box: everything is asked over gRPC, nothing is assumed about the code behind it. Exit code: 0 where no check
failed, 1 where one did, 2 where the server can't be asked at all.

The executor's suite needs the lease for itself: give it an executor that no scheduler holds.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Final

import grpc

from services.commands import calling
from services.conform import asking, executor, scheduler, tokenizer
from services.conform.kit import ANSWER_S, Outcome, Result, chosen, run_checks, table
from services.conform.owner import Executor
from services.errors import ServiceError
from services.rpc import Outgoing, make_channel
from tercet.v1 import executor_pb2, executor_pb2_grpc, scheduler_pb2_grpc, tokenizer_pb2_grpc

EXIT_FAILED: Final = 1
EXIT_UNASKED: Final = 2
CHECK_S: Final = 60.0

Told = Callable[[Result], None]


async def check_executor(channel: grpc.aio.Channel, only: Sequence[str], limit_s: float, told: Told) -> list[Result]:
    stub = executor_pb2_grpc.ExecutorServiceStub(channel)
    description = await stub.Describe(executor_pb2.ExecutorServiceDescribeRequest(), timeout=ANSWER_S)
    return await run_checks(chosen(executor.CHECKS, only), Executor(channel, stub, description), limit_s, told)


async def check_scheduler(channel: grpc.aio.Channel, only: Sequence[str], limit_s: float, told: Told) -> list[Result]:
    subject = await asking.meet(channel, scheduler_pb2_grpc.SchedulerServiceStub(channel))
    return await run_checks(chosen(scheduler.CHECKS, only), subject, limit_s, told)


async def check_tokenizer(channel: grpc.aio.Channel, only: Sequence[str], limit_s: float, told: Told) -> list[Result]:
    subject = await tokenizer.meet(channel, tokenizer_pb2_grpc.TokenizerServiceStub(channel))
    return await run_checks(chosen(tokenizer.CHECKS, only), subject, limit_s, told)


Suite = Callable[[grpc.aio.Channel, Sequence[str], float, Told], Awaitable[list[Result]]]
SUITES: Final[Mapping[str, Suite]] = {
    "executor": check_executor,
    "scheduler": check_scheduler,
    "tokenizer": check_tokenizer,
}
NAMES: Final[Mapping[str, Sequence[str]]] = {
    "executor": [f"{check.name:<16} {check.rule}" for check in executor.CHECKS],
    "scheduler": [f"{check.name:<16} {check.rule}" for check in scheduler.CHECKS],
    "tokenizer": [f"{check.name:<16} {check.rule}" for check in tokenizer.CHECKS],
}


async def conform(
    kind: str,
    target: str,
    *,
    only: Sequence[str] = (),
    limit_s: float = CHECK_S,
    outgoing: Outgoing = Outgoing(),
    told: Told = lambda result: None,
) -> list[Result]:
    """Raises grpc.aio.AioRpcError where the server can't even say what it is; ValueError for an unknown check."""
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(make_channel(target, outgoing=outgoing))
        return await SUITES[kind](channel, only, limit_s, told)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tercet conform", allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("kind", choices=tuple(SUITES))
    parser.add_argument("address", nargs="?", help="host:port or unix:/path; absent: the checks are listed")
    parser.add_argument("--only", default="", help="names of checks, or how they begin, separated by commas")
    parser.add_argument("--limit-s", type=float, default=CHECK_S, help=f"longest a check may take; default {CHECK_S:g}")
    calling.add_flags(parser)
    given = parser.parse_args(argv)
    if given.address is None:
        print("\n".join(NAMES[given.kind]))
        return 0
    only = [part.strip() for part in given.only.split(",") if part.strip()]
    try:
        outgoing = calling.outgoing(given, os.environ)
        results = asyncio.run(
            conform(given.kind, given.address, only=only, limit_s=given.limit_s, outgoing=outgoing, told=_progress)
        )
    except (ServiceError, ValueError) as error:
        print(f"tercet conform: {error}", file=sys.stderr)
        return EXIT_UNASKED
    except grpc.aio.AioRpcError as error:
        print(f"tercet conform: {given.address}: {error.code().name}: {error.details()}", file=sys.stderr)
        return EXIT_UNASKED
    print("\n".join(table(results)))
    return EXIT_FAILED if any(result.outcome is Outcome.FAIL for result in results) else 0


def _progress(result: Result) -> None:
    if sys.stderr.isatty():
        print(f"{result.outcome.value:<4}  {result.name}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
