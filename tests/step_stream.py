"""The owner's side of a step stream, as small as a test needs it."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
from fake_stack import MODEL_HASH, RunningExecutor

from executor.step import NewSequence, SamplingParams, Slice, Step, StepResult
from services.errors import ServiceError
from services.rpc import make_channel
from services.rpc_errors import from_rpc_error
from services.wire import RequestLabel, StepOrder, result_from_proto, step_to_proto
from tercet.v1 import common_pb2, executor_pb2, executor_pb2_grpc

Options = Sequence[tuple[str, int | str]]


class Owner:
    """A scheduler's hold on an executor."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.epoch = 0
        self.instance_id = ""
        self.heartbeats: list[executor_pb2.Heartbeat] = []

    async def claim(
        self,
        scheduler_id: str = "a",
        *,
        takeover: bool = False,
        model_hash: str = MODEL_HASH,
        schema_revision: int = common_pb2.SCHEMA_REVISION_ONE,
    ) -> "Owner":
        claim = executor_pb2.Claim(
            scheduler_id=scheduler_id,
            takeover=takeover,
            model_hash=model_hash,
            schema_revision=common_pb2.SchemaRevision.ValueType(schema_revision),
        )
        await self.send(executor_pb2.ExecutorServiceRunRequest(claim=claim))
        message = await self.read()
        assert message.WhichOneof("message") == "granted"
        self.epoch = message.granted.epoch
        self.instance_id = message.granted.instance_id
        return self

    async def step(self, step_id: int, *slices: Slice, epoch: int | None = None, **order: Any) -> None:
        whole = StepOrder(Step(step_id, slices), self.epoch if epoch is None else epoch, **order)
        await self.send(executor_pb2.ExecutorServiceRunRequest(step=step_to_proto(whole)))

    async def send(self, message: executor_pb2.ExecutorServiceRunRequest) -> None:
        try:
            await self.call.write(message)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def result(self) -> StepResult:
        """The next result; heartbeats before it are kept aside."""
        while True:
            message = await self.read()
            if message.WhichOneof("message") == "result":
                return result_from_proto(message.result)
            self.heartbeats.append(message.heartbeat)

    async def heartbeat(self) -> executor_pb2.Heartbeat:
        """The next message, which must be a heartbeat."""
        message = await self.read()
        assert message.WhichOneof("message") == "heartbeat"
        return message.heartbeat

    async def read(self) -> executor_pb2.ExecutorServiceRunResponse:
        """The next message. Raises the ServiceError that the stream ended with, EOFError where it ended well."""
        try:
            message = await self.call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        if message is grpc.aio.EOF:
            code = await self.call.code()
            if code is grpc.StatusCode.OK:
                raise EOFError
            raise await self._failure(code)
        answer: executor_pb2.ExecutorServiceRunResponse = message
        return answer

    async def end(self) -> ServiceError:
        """What the stream ends with; results and heartbeats before it are skipped."""
        while True:
            try:
                await self.read()
            except ServiceError as error:
                return error

    async def leave(self) -> None:
        await self.call.done_writing()

    async def _failure(self, code: grpc.StatusCode) -> ServiceError:
        trailers = await self.call.trailing_metadata()
        error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, await self.call.details())
        return from_rpc_error(error)


@asynccontextmanager
async def stream_to(target: str, extra: Options = ()) -> AsyncIterator[Owner]:
    """A stream to the executor at `target`, not claimed yet; cancelled at the end. extra: channel options."""
    async with make_channel(target, extra=extra) as channel:
        call: Any = executor_pb2_grpc.ExecutorServiceStub(channel).Run()
        try:
            yield Owner(call)
        finally:
            call.cancel()


def owner_of(executor: RunningExecutor, extra: Options = ()) -> AbstractAsyncContextManager[Owner]:
    return stream_to(executor.target, extra)


def first(slot: int, ids: tuple[int, ...], blocks: tuple[int, ...], **sampling: Any) -> Slice:
    """The whole prompt of a new sequence, and a draw."""
    return Slice(slot, 0, len(ids), ids, blocks, True, NewSequence(SamplingParams(**sampling), len(ids)))


def further(slot: int, start: int, blocks: tuple[int, ...] = ()) -> Slice:
    """A running sequence's next token, fed by the executor itself."""
    return Slice(slot, start, 1, (), blocks, True)


def label(slot: int, request_id: str, traceparent: str | None = None) -> tuple[int, RequestLabel]:
    return slot, RequestLabel(request_id, traceparent)
