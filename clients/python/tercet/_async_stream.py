"""The stream of the async client: `StreamState` driven by a grpc.aio call."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Protocol, Self

import grpc

from tercet._request import GenerateCall
from tercet._state import StreamState
from tercet._tracing import CallSpan
from tercet.errors import TercetError, from_rpc_error
from tercet.options import RetryPolicy
from tercet.types import Answer, Delta
from tercet.v1 import tokenizer_pb2


class Call(Protocol):
    """What is used of grpc.aio's call."""

    def read(self) -> Awaitable[Any]: ...

    def cancel(self) -> bool: ...


# A message and the seconds that its call may take.
Send = Callable[[tokenizer_pb2.TokenizerServiceGenerateRequest, float], Call]


class AsyncStream(StreamState, AsyncIterator[Delta]):
    """A generation under way: iterate it for its deltas, or await `text()`.

    It runs from the moment it is made. Leaving its `async with` block, `cancel()`, cancelling the task that iterates
    it, and garbage collection end it on the server. Iterating raises a `TercetError` where the generation fails, and
    again if it is iterated further. One task iterates.
    """

    def __init__(self, call: GenerateCall, policy: RetryPolicy, span: CallSpan, send: Send) -> None:
        super().__init__(call, policy, span, time.monotonic())
        self._send = send
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        try:
            self._call = send(self._message(), self._retries.remaining(time.monotonic()))
        except TercetError as error:
            raise self._failure(error) from error.__cause__

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._ended:
            try:
                event = await self._call.read()
                delta = None if event is grpc.aio.EOF else self._take(event, time.monotonic())
            except grpc.RpcError as raw:
                await self._retry(raw)
            except TercetError as broken:
                self._call.cancel()
                raise self._failure(broken) from None
            except asyncio.CancelledError:
                self.cancel()
                # grpc.aio raises the same for a call cancelled by us and for a task cancelled from outside.
                if task_is_cancelled():
                    raise
                raise self._cancelled() from None
            except BaseException:
                self.cancel()
                raise
            else:
                if event is grpc.aio.EOF:
                    self._close()
                elif delta is not None:
                    return delta
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def text(self, index: int = 0) -> str:
        """Run to the end; the whole text of answer `index`."""
        return (await self.collect())[index].text

    async def collect(self) -> tuple[Answer, ...]:
        """Run to the end; all answers."""
        async for _ in self:
            pass
        return self.answers

    def cancel(self) -> None:
        """End the generation, on the server too. Without effect once it has ended."""
        self._stop.set()
        self._call.cancel()
        self._cancelled()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        if not hasattr(self, "_call") or self._ended:
            return
        self._cancelled()
        # Garbage may be collected on any thread, and after the loop is gone. grpc.aio's own finalizer does not run
        # while the call waits for its first event.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._call.cancel)

    def _close(self) -> None:
        try:
            self._complete()
        except TercetError as broken:
            raise self._failure(broken) from None

    async def _retry(self, raw: grpc.RpcError) -> None:
        """Start the next try, or raise what ended this one."""
        error = from_rpc_error(raw)
        if self._is_whole(error):
            return
        delay = self._again(error, time.monotonic(), random.random())
        if delay is None:
            raise self._failure(error) from raw
        try:
            async with asyncio.timeout(delay):
                await self._stop.wait()
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._stop.is_set():
            raise self._cancelled() from raw
        try:
            self._call = self._send(self._message(), self._retries.remaining(time.monotonic()))
        except TercetError as closed:
            raise self._failure(closed) from raw


def task_is_cancelled() -> bool:
    """Whether the running task was cancelled, and not only what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
