"""The stream of the sync client: `StreamState` driven by a plain gRPC call."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol, Self

import grpc

from tercet._request import GenerateCall
from tercet._state import StreamState
from tercet._tracing import CallSpan
from tercet.errors import TercetError, from_rpc_error
from tercet.options import RetryPolicy
from tercet.types import Answer, Delta
from tercet.v1 import tokenizer_pb2


class Call(Protocol):
    """What is used of gRPC's call."""

    def __next__(self) -> tokenizer_pb2.TokenizerServiceGenerateResponse: ...

    def cancel(self) -> bool: ...


# A message and the seconds that its call may take.
Send = Callable[[tokenizer_pb2.TokenizerServiceGenerateRequest, float], Call]


class Stream(StreamState, Iterator[Delta]):
    """A generation under way: iterate it for its deltas, or call `text()`.

    It runs from the moment it is made. Leaving its `with` block, `cancel()` and garbage collection end it on the
    server. Iterating raises a `TercetError` where the generation fails, and again if it is iterated further. One thread
    iterates; any thread may cancel.
    """

    def __init__(self, call: GenerateCall, policy: RetryPolicy, span: CallSpan, send: Send) -> None:
        super().__init__(call, policy, span, time.monotonic())
        self._send = send
        self._lock = threading.Lock()
        self._stop = threading.Event()
        try:
            self._call = send(self._message(), self._retries.remaining(time.monotonic()))
        except TercetError as error:
            raise self._failure(error) from error.__cause__

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        while not self._ended:
            try:
                delta = self._take(next(self._call), time.monotonic())
            except StopIteration:
                self._close()
            except grpc.RpcError as raw:
                self._retry(raw)
            except TercetError as broken:
                self._call.cancel()
                raise self._failure(broken) from None
            except BaseException:
                self.cancel()
                raise
            else:
                if delta is not None:
                    return delta
        if self._error is not None:
            raise self._error
        raise StopIteration

    def text(self, index: int = 0) -> str:
        """Run to the end; the whole text of answer `index`."""
        return self.collect()[index].text

    def collect(self) -> tuple[Answer, ...]:
        """Run to the end; all answers."""
        for _ in self:
            pass
        return self.answers

    def cancel(self) -> None:
        """End the generation, on the server too. Without effect once it has ended."""
        self._stop.set()
        with self._lock:
            self._call.cancel()
        self._cancelled()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self.cancel()

    def _close(self) -> None:
        try:
            self._complete()
        except TercetError as broken:
            raise self._failure(broken) from None

    def _retry(self, raw: grpc.RpcError) -> None:
        """Start the next try, or raise what ended this one."""
        error = from_rpc_error(raw)
        if self._is_whole(error):
            return
        delay = self._again(error, time.monotonic(), random.random())
        if delay is None:
            raise self._failure(error) from raw
        if self._stop.wait(delay):
            raise self._cancelled() from raw
        with self._lock:
            if self._stop.is_set():
                raise self._cancelled() from raw
            try:
                self._call = self._send(self._message(), self._retries.remaining(time.monotonic()))
            except TercetError as closed:
                raise self._failure(closed) from raw
