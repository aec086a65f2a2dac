"""The client side of every call: a channel whose calls carry a trace and whose CLIENT spans always end.

Owns the CLIENT span and the two trace headers. It wraps the channel rather than using grpc.aio's client
interceptors: those hand out proxy calls that start a task per call, and lose the end of calls that are
cancelled or dropped. Invariants: a span ends exactly once, when the call's status is known, with that status;
a stream that its owner drops is cancelled at once (grpc.aio alone waits for the garbage collector, because the
call and its callback refer to each other). The parent of a span is what the caller's metadata names in
`traceparent` (see `services.trace_context.inject`), else the current context.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from types import TracebackType
from typing import Any, Final, Protocol, Self

import grpc
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from services import names, trace_context

Rows = tuple[tuple[str, str | bytes], ...]

_TRACE_KEYS: Final = frozenset({names.MD_TRACEPARENT, names.MD_TRACESTATE})


class _Iteration:
    """Iterates a stream and keeps its owner alive meanwhile, at no coroutine per message."""

    __slots__ = ("_messages", "_owner")

    def __init__(self, owner: "_ResponseStream", messages: AsyncIterator[Any]) -> None:
        self._owner = owner
        self._messages = messages

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[Any]:
        return self._messages.__anext__()


class _ResponseStream(grpc.aio.UnaryStreamCall):  # type: ignore[type-arg]
    """A call with a response stream. When the last reference to it goes, the call is cancelled."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __del__(self) -> None:
        if not self._call.done():
            self._call.cancel()

    def __aiter__(self) -> _Iteration:
        return _Iteration(self, self._call.__aiter__())

    async def read(self) -> Any:
        return await self._call.read()

    async def initial_metadata(self) -> Any:
        return await self._call.initial_metadata()

    async def trailing_metadata(self) -> Any:
        return await self._call.trailing_metadata()

    async def code(self) -> grpc.StatusCode:
        code: grpc.StatusCode = await self._call.code()
        return code

    async def details(self) -> str:
        details: str = await self._call.details()
        return details

    async def wait_for_connection(self) -> None:
        await self._call.wait_for_connection()

    def cancelled(self) -> bool:
        return bool(self._call.cancelled())

    def done(self) -> bool:
        return bool(self._call.done())

    def time_remaining(self) -> float | None:
        left: float | None = self._call.time_remaining()
        return left

    def cancel(self) -> bool:
        return bool(self._call.cancel())

    def add_done_callback(self, callback: Any) -> None:
        self._call.add_done_callback(callback)


class _DuplexStream(_ResponseStream, grpc.aio.StreamStreamCall):  # type: ignore[type-arg]
    async def write(self, request: Any) -> None:
        await self._call.write(request)

    async def done_writing(self) -> None:
        await self._call.done_writing()


class _StartCall(Protocol):
    """One of grpc's four multi-callables."""

    def __call__(self, request: Any, **options: Any) -> Any: ...


class _TracedCalls:
    """Starts calls of one method, each with its span."""

    def __init__(self, channel: "TracedChannel", path: str, start: _StartCall, wrap: Callable[[Any], Any]) -> None:
        self._channel = channel
        self._method = path.removeprefix("/")
        self._start = start
        self._wrap = wrap

    def __call__(self, request: Any = None, *, metadata: Any = None, **options: Any) -> Any:
        rows = tuple(metadata or ())
        parent = trace_context.extract(rows) if any(key in _TRACE_KEYS for key, _ in rows) else None
        span = self._channel.open_span(self._method, parent)
        headers = (
            *(row for row in rows if row[0] not in _TRACE_KEYS),
            *self._channel.authorization(rows),
            *trace_context.inject(span),
        )
        try:
            call = self._start(request, metadata=headers, **options)
        except BaseException as error:  # a closed channel, an invalid header: there is no call to end it later
            end_span(span, grpc.StatusCode.INTERNAL, type(error).__name__)
            raise
        call.add_done_callback(lambda done: end_span(span, _status_of(done)))
        return self._wrap(call)


def end_span(span: Span, code: grpc.StatusCode, error_type: str | None = None) -> None:
    """End a CLIENT span; of the RPC conventions, every status but OK is the client's error."""
    span.set_attribute(names.RPC_STATUS_CODE, code.name)
    if code is not grpc.StatusCode.OK:
        span.set_attribute(names.ERROR_TYPE, error_type or code.name)
        span.set_status(Status(StatusCode.ERROR, code.name))
    span.end()


def _status_of(call: Any) -> grpc.StatusCode:
    """The status of a call that is done. `code()` is a coroutine that then returns without waiting."""
    asking: Generator[Any, None, grpc.StatusCode] = call.code().__await__()
    try:
        asking.send(None)
    except StopIteration as answer:
        code: grpc.StatusCode = answer.value
        return code
    asking.close()
    return grpc.StatusCode.UNKNOWN


class TracedChannel(grpc.aio.Channel):
    """A grpc.aio channel that generated stubs take like any other.

    tracer: starts the CLIENT spans. address, port: of the peer, for `server.address` and `server.port`; a
    Unix socket has its path and no port. key: what this process shows to the server, asked for each call.
    """

    def __init__(
        self,
        inner: grpc.aio.Channel,
        tracer: Tracer,
        address: str,
        port: int | None,
        key: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._inner = inner
        self._key = key
        self._tracer = tracer
        self._peer: dict[str, str | int] = {names.SERVER_ADDRESS: address}
        if port is not None:
            self._peer[names.SERVER_PORT] = port

    def authorization(self, given: Rows) -> tuple[tuple[str, str], ...]:
        """The header to add to those that the caller gave: none where it gave one."""
        key = self._key()
        if key is None or any(name == names.MD_AUTHORIZATION for name, _ in given):
            return ()
        return ((names.MD_AUTHORIZATION, f"Bearer {key}"),)

    def open_span(self, method: str, parent: Context | None) -> Span:
        return self._tracer.start_span(
            method,
            context=parent,
            kind=SpanKind.CLIENT,
            attributes={names.RPC_SYSTEM_NAME: "grpc", names.RPC_METHOD: method, **self._peer},
        )

    def unary_unary(self, method: str, *coding: Any, **options: Any) -> Any:
        return _TracedCalls(self, method, self._inner.unary_unary(method, *coding, **options), _as_it_is)

    def stream_unary(self, method: str, *coding: Any, **options: Any) -> Any:
        return _TracedCalls(self, method, self._inner.stream_unary(method, *coding, **options), _as_it_is)

    def unary_stream(self, method: str, *coding: Any, **options: Any) -> Any:
        return _TracedCalls(self, method, self._inner.unary_stream(method, *coding, **options), _ResponseStream)

    def stream_stream(self, method: str, *coding: Any, **options: Any) -> Any:
        return _TracedCalls(self, method, self._inner.stream_stream(method, *coding, **options), _DuplexStream)

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        return await self._inner.__aexit__(exc_type, exc_val, exc_tb)


def _as_it_is(call: Any) -> Any:
    return call
