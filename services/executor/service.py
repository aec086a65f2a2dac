"""The executor's gRPC surface: Describe, and Run with its lease.

Owns who may step and the watch over hung steps. Must not know a model: the worker has it. Invariants: nothing here
blocks the event loop; a new epoch is granted only after the last step of the old one has ended and the pool is empty;
however a stream ends, its lease is released and no further step of it starts.

Who is gone is learned from streams: the transport pings an owner (`services.rpc`) and ends its stream when it does not
answer, so a frozen owner cannot keep the executor.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc

from services.description import ExecutorDescription, description_to_proto
from services.errors import FailedPrecondition, InvalidArgument, ServiceError, Unavailable
from services.executor.lease import Lease, lease_lost
from services.executor.observer import UNOBSERVED, Observer
from services.executor.session import Outgoing, Session, SessionSettings
from services.executor.worker import Running, Worker
from tercet.v1 import executor_pb2, executor_pb2_grpc

LOADING = "loading the model"

log = logging.getLogger(__name__)


def each_once(
    message: executor_pb2.ExecutorServiceRunResponse,
) -> tuple[executor_pb2.ExecutorServiceRunResponse, ...]:
    return (message,)


class ExecutorService(executor_pb2_grpc.ExecutorServiceServicer):
    """on_hang: told once about each step that exceeds its limit; a process ends itself there."""

    def __init__(
        self,
        worker: Worker,
        *,
        on_hang: Callable[[Running], None],
        settings: SessionSettings = SessionSettings(),
        observer: Observer = UNOBSERVED,
        outgoing: Outgoing = each_once,
    ) -> None:
        self._worker = worker
        self._on_hang = on_hang
        self._settings = settings
        self._observer = observer
        self._outgoing = outgoing
        self._lease = Lease()
        self._description: ExecutorDescription | None = None
        self._session: Session | None = None
        self._ownerless = asyncio.Event()
        self._ownerless.set()

    def open(self, description: ExecutorDescription) -> None:
        """The worker has loaded and warmed up: calls are served from here on."""
        self._description = description

    def drain(self) -> None:
        """No new owner from here on; the present one goes on."""
        self._lease.drain()

    async def ownerless(self) -> None:
        """Return when nobody owns the executor."""
        await self._ownerless.wait()

    def evict(self, error: ServiceError) -> None:
        """End the present owner's stream, if there is one."""
        if self._session is not None:
            self._session.end(error)

    async def watch(self) -> None:
        """Look at the running step for ever, and tell about one that hangs."""
        told: Running | None = None
        while True:
            await asyncio.sleep(self._settings.heartbeat_s)
            running = self._worker.running
            if running is None or running is told:
                continue
            if time.monotonic_ns() - running.started_ns > running.limit_ns:
                told = running
                self._on_hang(running)

    async def Describe(
        self,
        request: executor_pb2.ExecutorServiceDescribeRequest,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> executor_pb2.ExecutorServiceDescribeResponse:
        return description_to_proto(self._ready())

    # It writes by itself instead of yielding, so that no generator is left to the garbage collector.
    async def Run(  # type: ignore[override]
        self,
        request_iterator: Any,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> None:
        description = self._ready()
        claim = await self._claim(context)
        _check_claim(claim, description)
        session = self._install(claim)
        try:
            await session.until(asyncio.create_task(self._worker.reset()))
            await session.grant(context, description.instance_id)
            log.info("granted epoch %d to %s", session.holder.epoch, session.holder.scheduler_id)
            await session.pump(context)
        finally:
            self._remove(session)

    def _ready(self) -> ExecutorDescription:
        if self._description is None:
            raise Unavailable(f"the executor is not ready: {LOADING}", reason="LOADING", retry_after_s=1.0)
        return self._description

    async def _claim(self, context: "grpc.aio.ServicerContext[Any, Any]") -> executor_pb2.Claim:
        limit_s = self._settings.claim_limit_s
        try:
            async with asyncio.timeout(limit_s):
                message = await context.read()
        except TimeoutError as error:
            raise InvalidArgument(
                f"no claim came within {limit_s:g} s", field="claim", limit=f"{limit_s:g} s"
            ) from error
        if message is grpc.aio.EOF or message.WhichOneof("message") != "claim":
            raise InvalidArgument("the first message of the stream must be a claim", field="claim")
        claim: executor_pb2.Claim = message.claim
        return claim

    def _install(self, claim: executor_pb2.Claim) -> Session:
        try:
            grant = self._lease.claim(claim.scheduler_id, takeover=claim.takeover, now_ns=time.monotonic_ns())
        except ServiceError:
            self._observer.refused()
            raise
        self._observer.granted(grant)
        if grant.ousted is not None and self._session is not None:
            self._session.end(lease_lost(grant.ousted, grant.holder))
        session = Session(grant.holder, self._worker, self._settings, self._observer, self._outgoing)
        self._session = session
        self._ownerless.clear()
        self._worker.admit(grant.holder.epoch)
        return session

    def _remove(self, session: Session) -> None:
        self._lease.release(session.holder.epoch)
        self._worker.revoke(session.holder.epoch)
        if self._session is session:
            self._session = None
            self._ownerless.set()
        log.info("epoch %d of %s is over", session.holder.epoch, session.holder.scheduler_id)


def _check_claim(claim: executor_pb2.Claim, description: ExecutorDescription) -> None:
    revision = int(claim.schema_revision)
    if revision != description.schema_revision:
        raise _mismatch("schema_revision", str(revision), str(description.schema_revision), "SCHEMA_MISMATCH")
    if claim.model_hash != description.model.model_hash:
        raise _mismatch("model_hash", claim.model_hash, description.model.model_hash, "MODEL_MISMATCH")


def _mismatch(field: str, claimed: str, held: str, reason: str) -> ServiceError:
    return FailedPrecondition(
        f"claim.{field} is {claimed or 'empty'}, the executor has {held}",
        reason=reason,
        field=f"claim.{field}",
        metadata={"claimed": claimed, "held": held},
    )
