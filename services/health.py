"""Whether a process is alive and whether it can serve, as grpc.health.v1.

Owns the names: "" is readiness, `liveness` is the process itself, and each service has readiness under its own
name. Must not know what makes a process ready; its shell says so, with a reason. Invariant: a watcher sees the
last state, however many others watch or leave (the package's servicer forgets watchers when one leaves).

`python -m services.health TARGET [SERVICE]` exits 0 when TARGET serves, else 1: the check of a container.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.commands import calling
from services.errors import NotFound, ServiceError
from services.rpc import PLAIN, Outgoing, make_channel
from services.rpc_errors import cap, from_rpc_error, to_grpc_status

READY: Final = ""
LIVENESS: Final = "liveness"
STARTING: Final = "starting"
REASON_KEY: Final = "tercet-reason-bin"  # binary: a text value with a line break would be no valid trailer


class Readiness:
    """Whether a process can serve now, and if not, why. One event loop owns it."""

    def __init__(self, services: Iterable[str]) -> None:
        self.services = frozenset(services)
        self._reason: str | None = STARTING
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        return self._reason is None

    @property
    def reason(self) -> str:
        """Why not; "" when ready."""
        return self._reason or ""

    def set_ready(self) -> None:
        """Ready from now on. Without effect after `close`."""
        self._set(None)

    def set_not_ready(self, reason: str) -> None:
        """Not ready from now on; `reason` is shown to whoever asks. Without effect after `close`."""
        if not reason:
            raise ValueError("a reason is needed")
        self._set(cap(reason))

    def close(self, reason: str) -> None:
        """Not ready for good: the process drains."""
        self.set_not_ready(reason)
        self._closed = True

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._changed.wait()

    def _set(self, reason: str | None) -> None:
        if self._closed or reason == self._reason:
            return
        self._reason = reason
        self._changed.set()
        self._changed = asyncio.Event()


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """grpc.health.v1.Health over a Readiness. The reason travels in the trailer `tercet-reason-bin`."""

    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness

    async def Check(self, request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
        status = self._status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            unknown = NotFound(f"no service {request.service!r} here", field="service")
            await context.abort_with_status(to_grpc_status(unknown))
        if status == health_pb2.HealthCheckResponse.NOT_SERVING:
            context.set_trailing_metadata(((REASON_KEY, self._readiness.reason.encode()),))
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> AsyncIterator[Any]:
        last = None
        while True:
            status = self._status(request.service)
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
                continue  # it may have changed while the message was written
            await self._readiness.changed()

    def _status(self, service: str) -> int:
        kinds = health_pb2.HealthCheckResponse
        if service == LIVENESS:
            status: int = kinds.SERVING
        elif service != READY and service not in self._readiness.services:
            status = kinds.SERVICE_UNKNOWN
        else:
            status = kinds.SERVING if self._readiness.ready else kinds.NOT_SERVING
        return status


def add_health(server: grpc.aio.Server, readiness: Readiness) -> None:
    """Serve grpc.health.v1 on a server that is not started yet."""
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(readiness), server)


async def check(target: str, service: str = READY, timeout: float = 3.0, outgoing: Outgoing = PLAIN) -> str | None:
    """None when `service` at `target` serves, else the reason in one line. `timeout` in seconds."""
    async with make_channel(target, outgoing=outgoing) as channel:
        call = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=service), timeout=timeout
        )
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
            return f"{error.code().name}: {failure.message}"
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            return None
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        reason = dict(await call.trailing_metadata()).get(REASON_KEY, b"no reason given")
        return f"{name}: {reason.decode(errors='replace')}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status for a container's health check."""
    parser = argparse.ArgumentParser(prog="python -m services.health", allow_abbrev=False)
    parser.add_argument("target", help="host:port or unix:/path")
    parser.add_argument("service", nargs="?", default=READY, help=f"service name; {LIVENESS}; default readiness")
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds")
    calling.add_flags(parser)
    chosen = parser.parse_args(argv)
    try:
        outgoing = calling.outgoing(chosen, os.environ)
        reason = asyncio.run(check(chosen.target, chosen.service, chosen.timeout, outgoing))
    except ServiceError as error:
        reason = error.message
    if reason is not None:
        print(reason, file=sys.stderr)
    return 0 if reason is None else 1


if __name__ == "__main__":
    sys.exit(main())
