"""One owner's step stream: reads steps, hands them to the worker, writes results and heartbeats.

Owns the stream's own state: the id that comes next, the results not yet written, which request each slot serves.
Must not know the lease's other contenders. Invariants: results leave in the order of the steps; at most
`steps_in_flight` steps are read and not answered, so a slow reader costs a bounded number of results and then its
own steps wait in the transport; nothing here blocks the event loop.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from executor.step import StepResult
from services.errors import Internal, InvalidArgument
from services.executor.lease import Holder, stale_epoch
from services.executor.observer import NOBODY, Observer, Sequence, describe_batch
from services.executor.worker import Failed, Stale, StepDone, Worker
from services.grammar_wire import grammar_from_proto
from services.rpc_errors import cap
from services.wire import StepOrder, result_to_proto, step_from_proto
from tercet.v1 import executor_pb2

Context = grpc.aio.ServicerContext[Any, Any]
Outgoing = Callable[[executor_pb2.ExecutorServiceRunResponse], Iterable[executor_pb2.ExecutorServiceRunResponse]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """heartbeat_s: seconds between heartbeats. steps_in_flight: steps read and not answered. claim_limit_s: seconds
    within which a stream's first message must come."""

    heartbeat_s: float = 1.0
    steps_in_flight: int = 8
    claim_limit_s: float = 10.0


class Session:
    """outgoing: what is sent for each message; a fake plays its faults there."""

    def __init__(
        self,
        holder: Holder,
        worker: Worker,
        settings: SessionSettings,
        observer: Observer,
        outgoing: Outgoing,
    ) -> None:
        self.holder = holder
        self._worker = worker
        self._settings = settings
        self._observer = observer
        self._outgoing = outgoing
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._room = asyncio.Semaphore(settings.steps_in_flight)
        self._wake = asyncio.Event()
        self._results: deque[executor_pb2.StepResult] = deque()
        self._prepared_answers: deque[executor_pb2.Prepared] = deque()
        self._sequences: dict[int, Sequence] = {}
        self._last_step_id = 0
        self._unfinished = 0  # read and not done by the worker
        self._heartbeat_due = False
        self._owner_leaves = False

    def end(self, error: Exception) -> None:
        """The stream ends with `error`; the first one stands."""
        if not self._ended.done():
            self._ended.set_exception(error)
            self._ended.exception()  # seen: whether anybody still waits for it is no defect

    async def until(self, work: "asyncio.Task[None]") -> None:
        """Wait for `work`, or raise what the stream is ended with, whichever comes first."""
        try:
            await asyncio.wait({work, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                self._ended.result()
            work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def pump(self, context: Context) -> None:
        """Serve the stream until the owner has left and got every answer. Raises what ended it otherwise."""
        helpers = [asyncio.create_task(self._read(context)), asyncio.create_task(self._beat())]
        try:
            await self.until(asyncio.create_task(self._write(context)))
        finally:
            for task in helpers:
                task.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            self._ended.cancel()

    async def _read(self, context: Context) -> None:
        try:
            while True:
                await self._room.acquire()
                message = await context.read()
                if message is grpc.aio.EOF:
                    break
                self._take(message)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.end(error)
        self._owner_leaves = True
        self._wake.set()

    def _take(self, message: executor_pb2.ExecutorServiceRunRequest) -> None:
        if message.WhichOneof("message") == "prepare":
            self._room.release()
            self._prepare(message.prepare)
            return
        if message.WhichOneof("message") != "step":
            raise InvalidArgument("only the first message of the stream is a claim; then come steps", field="step")
        step_id = message.step.step_id
        if step_id <= self._last_step_id:
            log.warning("step %d of epoch %d came again and is ignored", step_id, self.holder.epoch)
            self._room.release()
            return
        if step_id != self._last_step_id + 1:
            raise InvalidArgument(
                f"step {step_id} follows step {self._last_step_id}: steps are lost",
                reason="STEP_GAP",
                field="step.step_id",
                limit=self._last_step_id + 1,
            )
        order = step_from_proto(message.step)
        self._last_step_id = step_id
        served = self._served(order)
        self._unfinished += 1
        self._worker.submit(order, time.monotonic_ns(), lambda done: self._done(done, served))

    def _prepare(self, asked: executor_pb2.Prepare) -> None:
        grammar = grammar_from_proto(asked.grammar, "prepare.grammar")
        self._worker.prepare(grammar, lambda problem, busy: self._prepared(asked.prepare_id, problem, busy))

    def _prepared(self, prepare_id: int, problem: str | None, busy: bool) -> None:
        self._prepared_answers.append(
            executor_pb2.Prepared(prepare_id=prepare_id, problem=cap(problem or ""), busy=busy)
        )
        self._wake.set()

    def _served(self, order: StepOrder) -> tuple[Sequence, ...]:
        """The sequences of the step's slices, and what the slots hold from here on."""
        labels = dict(order.labels)
        for piece in order.step.slices:
            if piece.new is not None:
                self._sequences[piece.slot] = Sequence(labels[piece.slot], piece.new.prompt_len)
        return tuple(self._sequences.get(piece.slot, NOBODY) for piece in order.step.slices)

    def _done(self, done: StepDone, served: tuple[Sequence, ...]) -> None:
        self._unfinished -= 1
        self._observer.step(done, served)
        match done.outcome:
            case StepResult() as result:
                self._results.append(result_to_proto(result))
                self._wake.set()
            case Stale():
                self.end(stale_epoch(done.order.epoch, self.holder.epoch))
            case Failed(error, bad_step):
                self.end(self._failure(done.order, error, bad_step, served))

    def _failure(self, order: StepOrder, error: Exception, bad_step: bool, served: tuple[Sequence, ...]) -> Exception:
        step_id = order.step.step_id
        if bad_step:
            return InvalidArgument(f"step {step_id}: {error}", reason="BAD_STEP", field="step")
        # Lengths and ids say what was in the batch; texts and tokens stay out of logs.
        log.error(
            "step %d of epoch %d failed: %s",
            step_id,
            order.epoch,
            type(error).__name__,
            exc_info=error,
            extra={"batch": describe_batch(order.step, served)},
        )
        return Internal(
            f"step {step_id} failed as a whole ({type(error).__name__}); the cause is in the executor's log",
            reason="STEP_FAILED",
        )

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._settings.heartbeat_s)
            self._heartbeat_due = True
            self._wake.set()

    async def _write(self, context: Context) -> None:
        while True:
            while self._results:
                await self._send(context, executor_pb2.ExecutorServiceRunResponse(result=self._results.popleft()))
                self._room.release()
            while self._prepared_answers:
                answer = self._prepared_answers.popleft()
                await self._send(context, executor_pb2.ExecutorServiceRunResponse(prepared=answer))
            if self._heartbeat_due:
                self._heartbeat_due = False
                await self._send(context, executor_pb2.ExecutorServiceRunResponse(heartbeat=self._heartbeat()))
            if self._owner_leaves and not self._unfinished and not self._results:
                return
            await self._wake.wait()
            self._wake.clear()

    async def grant(self, context: Context, instance_id: str) -> None:
        granted = executor_pb2.Granted(instance_id=instance_id, epoch=self.holder.epoch)
        await self._send(context, executor_pb2.ExecutorServiceRunResponse(granted=granted))

    async def _send(self, context: Context, message: executor_pb2.ExecutorServiceRunResponse) -> None:
        for each in self._outgoing(message):
            await context.write(each)

    def _heartbeat(self) -> executor_pb2.Heartbeat:
        running = self._worker.running
        if running is None or running.order.epoch != self.holder.epoch:
            return executor_pb2.Heartbeat(queued_steps=self._unfinished)
        return executor_pb2.Heartbeat(
            step_id=running.order.step.step_id,
            running_ns=time.monotonic_ns() - running.started_ns,
            queued_steps=max(0, self._unfinished - 1),
        )
