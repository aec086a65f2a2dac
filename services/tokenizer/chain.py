"""Is the chain behind a scheduler complete, and does it serve the model that this edge tokenizes for?

Owns one fact, asked anew every second. Must not know requests. Invariant: a state `takes` requests only where the
scheduler answered when last asked, and its model's tokenizer has the hash of ours.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.errors import FailedPrecondition, ServiceError, Unavailable
from services.health import REASON_KEY
from services.rpc_errors import from_rpc_error
from tercet.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc

log = logging.getLogger(__name__)

POLL_S: Final = 1.0
ANSWER_S: Final = 3.0
NOT_READY: Final = "SCHEDULER_NOT_READY"


@dataclass(frozen=True, slots=True)
class ChainState:
    """What was seen last. problem is None while a request can be served. model: the scheduler's, once it had one."""

    problem: ServiceError | None
    model: common_pb2.ModelDescription | None = None
    numerics: str = ""

    @property
    def takes(self) -> bool:
        """A scheduler that has lost its executor for now decides by itself what it still takes: only it knows the
        grace."""
        return self.problem is None or (self.problem.reason == NOT_READY and self.model is not None)


class Chain:
    """changed: told after each look."""

    def __init__(
        self, channel: grpc.aio.Channel, tokenizer_hash: str, changed: Callable[[], None] = lambda: None
    ) -> None:
        self._scheduler = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)
        self._tokenizer_hash = tokenizer_hash
        self._changed = changed
        self.state = ChainState(Unavailable("the scheduler was not asked yet", reason="STARTING"))

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            try:
                self._note(await self.look())
            except Exception:  # a defect; asking again is all that can help
                log.exception("the scheduler could not be asked")
                self._note(ChainState(Unavailable("the scheduler could not be asked", reason="NO_SCHEDULER")))
            await asyncio.sleep(POLL_S)

    async def look(self) -> ChainState:
        try:
            answer = await self._scheduler.Describe(scheduler_pb2.SchedulerServiceDescribeRequest(), timeout=ANSWER_S)
            problem = self._mismatch(answer) or await self._not_ready()
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
            return ChainState(Unavailable(f"the scheduler can't be reached: {failure.message}", reason="NO_SCHEDULER"))
        return ChainState(problem, answer.model if answer.HasField("model") else None, answer.numerics)

    def _mismatch(self, answer: scheduler_pb2.SchedulerServiceDescribeResponse) -> ServiceError | None:
        if answer.schema_revision != common_pb2.SCHEMA_REVISION_ONE:
            return FailedPrecondition(
                f"the scheduler speaks schema revision {answer.schema_revision}, "
                f"this tokenizer {common_pb2.SCHEMA_REVISION_ONE}",
                reason="SCHEMA_MISMATCH",
            )
        if answer.HasField("model") and answer.model.tokenizer_hash != self._tokenizer_hash:
            return FailedPrecondition(
                f"the executor's model {answer.model.name} has tokenizer {answer.model.tokenizer_hash[:12]}, "
                f"this tokenizer is {self._tokenizer_hash[:12]}: both must be started with the same model",
                reason="TOKENIZER_MISMATCH",
            )
        return None

    async def _not_ready(self) -> ServiceError | None:
        call = self._health.Check(health_pb2.HealthCheckRequest(service=""), timeout=ANSWER_S)
        answer = await call
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            return None
        reason = dict(await call.trailing_metadata()).get(REASON_KEY, b"no reason given")
        text = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else reason
        return Unavailable(f"the scheduler is not ready: {text}", reason=NOT_READY)

    def _note(self, state: ChainState) -> None:
        self.state = state
        self._changed()
