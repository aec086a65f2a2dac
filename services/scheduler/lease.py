"""One executor's lease: claim it, keep steps in flight, apply results, notice when it is lost, claim again.

Owns the step stream of one executor. The engine decides what runs; this carries it there and back.
Invariant: whatever ends the stream, the lane is lost exactly once, so its work waits again.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services import trace_context, wire
from services.errors import FailedPrecondition, ServiceError
from services.grammar_wire import grammar_to_proto
from services.health import READY
from services.rpc_errors import from_rpc_error
from services.scheduler.core.calls import LaneSpec, OutOfStep
from services.scheduler.core.cost import StepCost
from services.scheduler.engine import Engine
from services.scheduler.grammars import Asked, Grammars
from services.scheduler.intake import ServedModel
from services.scheduler.live import FilledStep
from tercet.v1 import common_pb2, executor_pb2, executor_pb2_grpc

log = logging.getLogger(__name__)

SCHEMA_REVISION: Final = common_pb2.SCHEMA_REVISION_ONE
HANDSHAKE_S: Final = 5.0
SILENCE_S: Final = 5.0  # heartbeats come every second
HANG_FLOOR_NS: Final = 10_000_000_000
HANG_FACTOR: Final = 20
BACKOFF_S: Final = (0.1, 0.2, 0.4, 0.8, 1.6)
REFUSED_S: Final = 5.0  # until a refused executor is looked at again: it may have been started anew, as another one


class LaneLost(Exception):
    """The executor no longer runs our steps; the message says how that was noticed."""


class Refused(Exception):
    """This executor can't serve here as it is: another model, or another contract."""


class Ousted(Exception):
    """Another scheduler took this executor over, and keeps it."""


@dataclass(frozen=True, slots=True)
class LeaseState:
    """What readiness and load tell of one executor."""

    target: str
    reason: str  # why it doesn't serve; empty: it does
    description: executor_pb2.ExecutorServiceDescribeResponse | None = None
    instance_id: str = ""
    epoch: int = 0
    heard_ns: int = 0


class Lease:
    """Holds the lease of one executor for as long as it can."""

    def __init__(
        self,
        target: str,
        channel: grpc.aio.Channel,
        engine: Engine,
        scheduler_id: str,
        changed: Callable[[], None],
        grammars: Grammars,
    ) -> None:
        self._stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)
        self._engine = engine
        self._scheduler_id = scheduler_id
        self._changed = changed
        self._grammars = grammars
        self._cost = StepCost()
        self._sent: dict[int, int] = {}  # steps in flight -> their tokens
        self._taken = 0  # the last step whose result was taken
        self._told = ""  # which reason was logged last
        self._leaving = False  # the executor drains: its last sequences end there, then the lease does
        self.state = LeaseState(target, "not connected yet")

    @property
    def lane(self) -> str:
        return f"{self.state.instance_id}:{self.state.epoch}"

    async def run(self) -> None:
        """Until cancelled, or ousted."""
        failures = 0
        while True:
            pause: float | None = None
            try:
                await self._hold()
            except Ousted as error:
                self._tell(f"ousted: {error}", "OUSTED", logging.ERROR)
                return
            except Refused as error:
                self._tell(f"refused: {error}", str(error), logging.ERROR)
                pause = REFUSED_S
            except ServiceError as error:
                self._tell(error.message, error.reason, logging.WARNING)
            except (LaneLost, OutOfStep) as error:
                self._tell(str(error), str(error), logging.WARNING)
            except Exception as error:  # whatever it is, this executor's work must go on elsewhere, and so must we
                log.exception("the lease ended with a defect", extra={"executor": self.state.target})
                self._tell(type(error).__name__, type(error).__name__, logging.ERROR)
            failures = 0 if self.state.epoch else failures + 1
            self.state = replace(self.state, epoch=0)
            await asyncio.sleep(pause or BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])

    async def _hold(self) -> None:
        """One lease, from claim to loss. Raises what ended it."""
        try:
            description = await self._stub.Describe(executor_pb2.ExecutorServiceDescribeRequest(), timeout=HANDSHAKE_S)
            self._check(description)
            call = self._stub.Run()
            try:
                await self._claim(call, description)
                await self._serve(call, description)
            finally:
                call.cancel()
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
            if failure.reason == "LEASE_LOST":
                raise Ousted(failure.message) from error
            if failure.reason in ("MODEL_MISMATCH", "SCHEMA_MISMATCH"):
                raise Refused(failure.message) from error
            raise failure from error

    def _check(self, description: executor_pb2.ExecutorServiceDescribeResponse) -> None:
        if description.schema_revision != SCHEMA_REVISION:
            raise Refused(
                f"the executor speaks schema revision {description.schema_revision}, this scheduler {SCHEMA_REVISION}"
            )
        if self._engine.serves_other(description.numerics):
            raise Refused(f"the executor computes with numerics {description.numerics}, those that serve with others")

    async def _claim(self, call: Any, description: executor_pb2.ExecutorServiceDescribeResponse) -> None:
        claim = executor_pb2.Claim(
            scheduler_id=self._scheduler_id,
            model_hash=description.model.model_hash,
            schema_revision=SCHEMA_REVISION,
        )
        await call.write(executor_pb2.ExecutorServiceRunRequest(claim=claim))
        answer = await self._read(call, HANDSHAKE_S)
        if answer.WhichOneof("message") != "granted":
            raise FailedPrecondition("the executor did not answer the claim with Granted")
        granted = answer.granted
        self.state = LeaseState(
            self.state.target, "", description, granted.instance_id, granted.epoch, time.monotonic_ns()
        )

    async def _serve(self, call: Any, description: executor_pb2.ExecutorServiceDescribeResponse) -> None:
        self._check(description)  # again: meanwhile another executor may have come to serve
        lane = self.lane
        spec = LaneSpec(
            block_size=description.block_size,
            total_blocks=description.total_blocks,
            max_batched_tokens=description.max_batched_tokens,
            max_sequences=description.max_sequences,
            max_model_len=description.model.max_model_len,
        )
        model = ServedModel(
            vocab_size=description.model.vocab_size,
            max_model_len=description.model.max_model_len,
            eos_token_ids=tuple(description.model.eos_token_ids),
            numerics=description.numerics,
            grammars=executor_pb2.EXECUTOR_CAPABILITY_GRAMMAR in description.capabilities,
            scores_prompts=executor_pb2.EXECUTOR_CAPABILITY_PROMPT_LOGPROBS in description.capabilities,
        )
        self._sent.clear()
        self._taken = 0
        self._leaving = False
        wake = self._engine.attach(lane, spec, model, self.state.target)
        if model.grammars:
            used = (live.admission.sampling.grammar for live in self._engine.live_requests())
            self._grammars.attached(lane, wake, (one for one in used if one is not None))
        self._told = ""
        log.info("lease granted", extra={"executor": self.state.target, "epoch": self.state.epoch})
        self._changed()
        sender = asyncio.create_task(self._send(call, lane, wake))
        receiver = asyncio.create_task(self._receive(call, lane))
        watcher = asyncio.create_task(self._watch(lane))
        try:
            await asyncio.wait((sender, receiver), return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
            await receiver
        finally:
            for task in (sender, receiver, watcher):
                task.cancel()
            await asyncio.gather(sender, receiver, watcher, return_exceptions=True)
            self._grammars.lost(lane)
            self._engine.lose(lane)

    async def _send(self, call: Any, lane: str, wake: asyncio.Event) -> None:
        """Returns when nothing can be sent any more: why not is for the receiver to find out."""
        while True:
            wake.clear()
            while (asked := self._grammars.next(lane)) is not None:
                if not await self._write(call, executor_pb2.ExecutorServiceRunRequest(prepare=_prepare(asked))):
                    return
            while (filled := self._engine.plan(lane)) is not None:
                if not await self._write(call, executor_pb2.ExecutorServiceRunRequest(step=self._message(filled))):
                    return
            if self._leaving and self._engine.is_empty(lane):
                await call.done_writing()  # the executor waits for its owner to leave
                return
            await wake.wait()

    @staticmethod
    async def _write(call: Any, message: executor_pb2.ExecutorServiceRunRequest) -> bool:
        """Whether it could be sent."""
        try:
            await call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return False
        return True

    async def _watch(self, lane: str) -> None:
        """An executor that was ready when it granted the lease, and no longer is, drains."""
        call = self._health.Watch(health_pb2.HealthCheckRequest(service=READY))
        try:
            async for answer in call:
                if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING and not self._leaving:
                    self._leaving = True
                    self._tell("the executor is draining", "DRAINING", logging.INFO)
                    self._engine.close(lane)
        except grpc.aio.AioRpcError:
            pass  # it does not say; the stream of steps tells when it has gone
        finally:
            call.cancel()

    def _message(self, filled: FilledStep) -> executor_pb2.Step:
        labels = tuple(
            (slot, wire.RequestLabel(live.admission.caller.request_id, trace_context.traceparent(live.span) or None))
            for slot, live in ((slot, answer.request) for slot, answer in filled.new.items())
        )
        self._sent[filled.step.step_id] = filled.tokens
        return wire.step_to_proto(
            wire.StepOrder(
                step=filled.step,
                epoch=self.state.epoch,
                predicted_ns=self._cost.predict(filled.tokens),
                labels=labels,
            )
        )

    async def _receive(self, call: Any, lane: str) -> None:
        while True:
            message = await self._read(call, SILENCE_S)
            self.state = replace(self.state, heard_ns=time.monotonic_ns())
            match message.WhichOneof("message"):
                case "result":
                    self._take(lane, message.result)
                case "heartbeat":
                    self._check_progress(message.heartbeat)
                case "prepared":
                    prepared = message.prepared
                    self._grammars.answered(lane, prepared.prepare_id, prepared.problem, prepared.busy)
                case other:
                    raise LaneLost(f"the executor sent {other} where a result or heartbeat was expected")

    def _take(self, lane: str, result: executor_pb2.StepResult) -> None:
        tokens = self._sent.pop(result.step_id, None)
        if tokens is None:
            if result.step_id > self._taken:
                raise LaneLost(f"the executor answered step {result.step_id}, which was not sent")
            return  # a repeated result says nothing new
        self._taken = result.step_id
        timings = result.timings
        self._cost.observe(tokens, timings.prepare_ns + timings.forward_ns + timings.sample_ns)
        self._engine.apply(lane, wire.result_from_proto(result))

    def _check_progress(self, heartbeat: executor_pb2.Heartbeat) -> None:
        """The executor exits by itself when a step hangs; this is for the one that can't."""
        predicted = self._cost.predict(self._sent.get(heartbeat.step_id, 0))
        if heartbeat.step_id and predicted is not None:
            limit = 2 * max(HANG_FLOOR_NS, HANG_FACTOR * predicted)
            if heartbeat.running_ns > limit:
                raise LaneLost(f"step {heartbeat.step_id} hangs")

    async def _read(self, call: Any, limit_s: float) -> executor_pb2.ExecutorServiceRunResponse:
        try:
            async with asyncio.timeout(limit_s):
                message = await call.read()
        except TimeoutError:
            raise LaneLost(f"the executor was silent for {limit_s:g} s") from None
        if message is grpc.aio.EOF:
            code = await call.code()
            if code is not grpc.StatusCode.OK:
                raise grpc.aio.AioRpcError(
                    code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
                )
            raise LaneLost("the executor ended the step stream")
        return message  # type: ignore[no-any-return]

    def _tell(self, reason: str, kind: str, level: int) -> None:
        """kind: reasons of one kind in a row are logged once."""
        if kind != self._told:
            log.log(level, "executor not available", extra={"executor": self.state.target, "reason": reason})
        self._told = kind
        self.state = replace(self.state, reason=reason)
        self._changed()


def _prepare(asked: Asked) -> executor_pb2.Prepare:
    return executor_pb2.Prepare(prepare_id=asked.prepare_id, grammar=grammar_to_proto(asked.grammar))
