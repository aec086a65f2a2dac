"""What all suites are made of: checks with names, their outcomes, and how a status is expected.

A check is given a subject (a server, as its stubs) and returns where the server keeps to the contract. Invariant: a
check ends within its time limit with one of three outcomes; only a check that was carried out can pass.
"""

import asyncio
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Generic, NoReturn, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.errors import ServiceError
from services.rpc_errors import from_rpc_error

S = TypeVar("S")
T = TypeVar("T")

ANSWER_S: Final = 10.0


class Failed(Exception):
    """The server breaks the contract; the message says what it did, and what was expected."""


class NotApplicable(Exception):
    """This server can't be asked that; the message says why."""


class Outcome(Enum):
    PASS = "pass"
    FAIL = "FAIL"
    NOT_APPLICABLE = "n/a"


@dataclass(frozen=True, slots=True)
class Check(Generic[S]):
    """rule: what the contract says, in a phrase."""

    name: str
    rule: str
    run: Callable[[S], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    rule: str
    outcome: Outcome
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """A call that ended badly: the status as it was sent, and what its details say."""

    code: grpc.StatusCode
    error: ServiceError


async def run_checks(
    checks: Sequence[Check[S]], subject: S, limit_s: float, told: Callable[[Result], None] = lambda result: None
) -> list[Result]:
    """One after the other, each within `limit_s` seconds. told: of each result at once."""
    results = []
    for check in checks:
        results.append(await _run(check, subject, limit_s))
        told(results[-1])
    return results


async def _run(check: Check[S], subject: S, limit_s: float) -> Result:
    started = time.monotonic()
    outcome, detail = Outcome.FAIL, ""
    try:
        async with asyncio.timeout(limit_s):
            await check.run(subject)
        outcome = Outcome.PASS
    except NotApplicable as reason:
        outcome, detail = Outcome.NOT_APPLICABLE, str(reason)
    except Failed as failure:
        detail = str(failure)
    except grpc.aio.AioRpcError as error:
        detail = f"the call ended with {error.code().name}: {error.details()}"
    except TimeoutError:
        detail = f"no end within {limit_s:g} s"
    return Result(check.name, check.rule, outcome, detail, time.monotonic() - started)


def require(holds: object, message: str) -> None:
    if not holds:
        raise Failed(message)


def fail(message: str) -> NoReturn:
    raise Failed(message)


async def refusal(call: Awaitable[Any], *codes: grpc.StatusCode, what: str) -> Refusal:
    """The status that `call` is refused with, which must be one of `codes`. what: was asked for, in words."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return check_status(error, *codes, what=what)
    fail(f"{what} was answered ({_short(answer)}); expected {_names(codes)}")


async def stream_refusal(stream: AsyncIterable[Any], *codes: grpc.StatusCode, what: str) -> Refusal:
    """The same of a stream, which must be refused before its first message."""
    try:
        first = await anext(aiter(stream), None)
    except grpc.aio.AioRpcError as error:
        return check_status(error, *codes, what=what)
    fail(f"{what} was begun ({_short(first)}); expected {_names(codes)}")


def check_status(error: grpc.aio.AioRpcError, *codes: grpc.StatusCode, what: str) -> Refusal:
    found = Refusal(error.code(), from_rpc_error(error))
    require(
        found.code in codes, f"{what} ended with {found.code.name} ({found.error.message!r}); expected {_names(codes)}"
    )
    return found


def require_field(found: Refusal, field: str) -> None:
    """The refusal names the field that is wrong, or one within it."""
    named = found.error.field or ""
    require(field in named, f"the refusal names the field {named!r} in BadRequest; expected {field!r}")


def require_reason(found: Refusal, reason: str) -> None:
    """The refusal is for this reason: another one may have the same status."""
    told = found.error.reason
    require(told == reason, f"ErrorInfo.reason is {told!r} ({found.error.message!r}); expected {reason!r}")


async def check_health(channel: grpc.aio.Channel, service: str) -> None:
    """Serving, as a whole and by name; alive; and an unknown service is NOT_FOUND."""
    stub = health_pb2_grpc.HealthStub(channel)
    for name in ("", "liveness", service):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=ANSWER_S)
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        require(status == "SERVING", f"grpc.health.v1 says {status} of {name!r}")
    unknown = health_pb2.HealthCheckRequest(service="no.such.Service")
    await refusal(
        stub.Check(unknown, timeout=ANSWER_S), grpc.StatusCode.NOT_FOUND, what="the health of an unknown service"
    )


async def until(holds: Callable[[], Awaitable[bool]], what: str, limit_s: float = ANSWER_S) -> None:
    """Asks again and again."""
    deadline = time.monotonic() + limit_s
    while not await holds():
        require(time.monotonic() < deadline, f"{what}: not within {limit_s:g} s")
        await asyncio.sleep(0.02)


def table(results: Sequence[Result]) -> list[str]:
    """Lines for people: one a check, the reason below those that did not pass, the sums last."""
    width = max((len(result.name) for result in results), default=0)
    lines = []
    for result in results:
        lines.append(f"{result.outcome.value:<4}  {result.name:<{width}}  {result.rule}  ({result.seconds:.2f} s)")
        if result.detail:
            lines.append(f"      {'':<{width}}  {result.detail}")
    counts = {outcome: sum(result.outcome is outcome for result in results) for outcome in Outcome}
    lines.append(
        f"{counts[Outcome.PASS]} passed, {counts[Outcome.FAIL]} failed, {counts[Outcome.NOT_APPLICABLE]} not applicable"
    )
    return lines


def chosen(checks: Sequence[Check[S]], only: Collection[str]) -> list[Check[S]]:
    """Those whose names are in `only`, or begin with one of its entries; all where it is empty. ValueError: no such."""
    unknown = [part for part in only if not any(check.name.startswith(part) for check in checks)]
    if unknown:
        raise ValueError(f"there is no check {', '.join(unknown)}")
    return [check for check in checks if not only or any(check.name.startswith(part) for part in only)]


def _names(codes: Sequence[grpc.StatusCode]) -> str:
    return " or ".join(code.name for code in codes)


def _short(message: object) -> str:
    text = " ".join(str(message).split())
    return text if len(text) <= 80 else text[:77] + "..."
