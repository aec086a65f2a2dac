"""The server side of every call: one interceptor that gives it an identity, a span, a status and an end.

Owns: the request id, who calls (`services.gate`), the SERVER span, the mapping of exceptions to statuses, the call's
duration, and closing of the handler's generator. Must not know any service. Invariants: the span ends exactly once,
with the status that the caller sees; no exception text other than a ServiceError's message reaches the caller; a
handler's `finally` blocks have run when its call is over (grpc.aio itself leaves generators to the garbage collector);
the span is never current, handlers take it from `call_context`.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn, Protocol, cast

import grpc
from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Span, SpanKind, Status, StatusCode, Tracer

from services import names, trace_context
from services.errors import Internal, InvalidArgument, ServiceError
from services.gate import OPEN_GATE, Gate, check_role, least_role
from services.keys import Principal
from services.rpc_errors import cap, code_from_number, status_code, to_grpc_status
from services.rpc_stream import deliver

IDENTIFYING: Final = frozenset({names.MD_REQUEST_ID, names.MD_TENANT, names.MD_PRIORITY, names.MD_AUTHORIZATION})
REQUEST_ID_FORMAT: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")

# The RPC conventions: other codes are the caller's doing and leave a server span's status unset.
SERVER_FAULTS: Final = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)

# Polled, or open for the life of a lease: a trace of its own says nothing of any request. Traced as part of another.
HOUSEKEEPING: Final = ("/Describe", "ExecutorService/Run", "VllmEngine/HealthCheck", "/GetLoads", "/SubscribeKvEvents")
NO_TRACER: Final = NoOpTracer()

# A status waits behind what the client has not read; after this it is left to the transport.
STATUS_S: Final = 2.0

log = logging.getLogger(__name__)


class CallObserver(Protocol):
    """Told about each finished call: its method, the status the caller got, seconds, its span."""

    def __call__(self, method: str, code: str, seconds: float, span: Span) -> None: ...


@dataclass(frozen=True, slots=True)
class CallContext:
    """What a handler knows about its call besides the request.

    method: `pkg.v1.Service/Method`. metadata: the caller's text metadata, last value of each key. span: the
    SERVER span. context: the same as a Context, the parent of the handler's own spans. started_ns:
    `time.monotonic_ns` at arrival. request_id_given: the caller chose the id. principal: whose key came with the call;
    None where no keys are asked for.
    """

    method: str
    request_id: str
    metadata: Mapping[str, str]
    span: Span
    context: Context
    started_ns: int
    request_id_given: bool
    principal: Principal | None = None


def call_context(context: "grpc.aio.ServicerContext[Any, Any]") -> CallContext:
    """The CallContext of a call on a server with the ServerInterceptor; TypeError on any other."""
    if not isinstance(context, ServerContext):
        raise TypeError("this server has no ServerInterceptor: make it with services.rpc.make_server")
    return context.call


class ServerContext(grpc.aio.ServicerContext):  # type: ignore[type-arg]
    """grpc.aio's context plus the CallContext; remembers an abort and caps its message."""

    def __init__(self, inner: "grpc.aio.ServicerContext[Any, Any]", call: CallContext) -> None:
        self._inner = inner
        self.call = call
        self.abort_error: BaseException | None = None
        self.limit_s: float | None = self.time_remaining()

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Any = (),
    ) -> NoReturn:
        try:
            await self._inner.abort(code, cap(details), tuple(trailing_metadata))
        except grpc.aio.AbortError as error:
            self.abort_error = error
            raise
        raise AssertionError("abort returned")

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        await self.abort(status.code, status.details or "", tuple(status.trailing_metadata or ()))

    def read(self) -> Awaitable[Any]:  # type: ignore[override]
        return self._inner.read()

    def write(self, message: Any) -> Awaitable[None]:  # type: ignore[override]
        return self._inner.write(message)

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        await self._inner.send_initial_metadata(initial_metadata)

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self._inner.set_trailing_metadata(trailing_metadata)

    def trailing_metadata(self) -> Any:
        return self._inner.trailing_metadata()

    def invocation_metadata(self) -> Any:
        return self._inner.invocation_metadata()

    def set_code(self, code: grpc.StatusCode) -> None:
        self._inner.set_code(code)

    def code(self) -> grpc.StatusCode:
        """The status set or sent so far; OK if none."""
        code: Any = self._inner.code()
        if isinstance(code, grpc.StatusCode):
            return code
        return grpc.StatusCode.OK if code is None else code_from_number(int(code))

    def set_details(self, details: str) -> None:
        self._inner.set_details(cap(details))

    def details(self) -> str:
        return self._inner.details()

    def set_compression(self, compression: grpc.Compression) -> None:
        self._inner.set_compression(compression)

    def disable_next_message_compression(self) -> None:
        self._inner.disable_next_message_compression()

    def peer(self) -> str:
        return self._inner.peer()

    def peer_identities(self) -> Iterable[bytes] | None:
        return self._inner.peer_identities()

    def peer_identity_key(self) -> str | None:
        return self._inner.peer_identity_key()

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return self._inner.auth_context()

    def time_remaining(self) -> float | None:  # type: ignore[override]
        """Seconds until the caller's deadline; None when it set none (the stubs leave None out)."""
        return self._inner.time_remaining()

    def add_done_callback(self, callback: Any) -> None:
        self._inner.add_done_callback(callback)

    def cancelled(self) -> bool:
        return self._inner.cancelled()

    def done(self) -> bool:
        return self._inner.done()

    def cancellation_code(self) -> grpc.StatusCode:
        """Whether a cancelled call ran out of time or was given up.

        The caller's timer fires first and reaches us as a cancellation. Ours runs later by the transit time
        and by up to 1 % of the time limit, since gRPC sends limits with three digits, rounded up.
        """
        left = self.time_remaining()
        if left is None or self.limit_s is None or left > 0.05 + 0.01 * self.limit_s:
            return grpc.StatusCode.CANCELLED
        return grpc.StatusCode.DEADLINE_EXCEEDED


class ServerInterceptor(grpc.aio.ServerInterceptor):
    """Wraps each handler; see the module's docstring for what the wrapping guarantees."""

    def __init__(
        self,
        tracer: Tracer,
        observer: CallObserver | None = None,
        slow_reader_s: float | None = None,
        gate: Gate = OPEN_GATE,
    ) -> None:
        self._gate = gate
        self._tracer = tracer
        self._observer = observer
        self._slow_reader_s = slow_reader_s

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        handler = await continuation(handler_call_details)
        details = handler_call_details
        # gRPC's own services (health, reflection) are polled all day: no spans, no request ids.
        if handler is None or details.method.startswith("/grpc."):
            return handler
        if handler.request_streaming:
            arity = "stream_stream" if handler.response_streaming else "stream_unary"
        else:
            arity = "unary_stream" if handler.response_streaming else "unary_unary"
        behaviour = getattr(handler, arity)
        decode = _decoder(handler.request_deserializer)
        encode = handler.response_serializer or _same

        async def wrapped(request: Any, inner: "grpc.aio.ServicerContext[Any, Any]") -> bytes | None:
            context = ServerContext(inner, self._open(details.method, details.invocation_metadata))
            try:
                _check_once(details.invocation_metadata)
                _check_request_id(context.call)
                context.call = self._identified(context.call)
                message = request if handler.request_streaming else decode(request)
                result = behaviour(message, context)
                if handler.response_streaming:
                    await deliver(result, context.write, self._slow_reader_s)
                    reply = None
                else:
                    reply = encode(await result)
            except BaseException as error:
                await self._fail(context, error)
            self._close(context, context.code())
            return reply

        # The wrapper decodes unary requests and encodes unary replies itself, so that a failure there is the
        # call's failure, with a span and a status of its own.
        factory = cast(Callable[..., Any], getattr(grpc, f"{arity}_rpc_method_handler"))
        return factory(
            wrapped,
            request_deserializer=decode if handler.request_streaming else None,
            response_serializer=encode if handler.response_streaming else None,
        )

    def _open(self, path: str, metadata: Sequence[tuple[str, str | bytes]]) -> CallContext:
        method = path.removeprefix("/")
        texts = {key: value for key, value in metadata if isinstance(value, str)}
        given = texts.get(names.MD_REQUEST_ID)
        parent = trace_context.extract(metadata)
        tracer = NO_TRACER if method.endswith(HOUSEKEEPING) and not parent else self._tracer
        span = tracer.start_span(
            method,
            context=parent,
            kind=SpanKind.SERVER,
            attributes={names.RPC_SYSTEM_NAME: "grpc", names.RPC_METHOD: method},
        )
        valid = given is not None and REQUEST_ID_FORMAT.fullmatch(given) is not None
        request_id = given if given is not None and valid else uuid.uuid4().hex
        span.set_attribute(names.REQUEST_ID, request_id)
        return CallContext(
            method=method,
            request_id=request_id,
            metadata=texts,
            span=span,
            context=trace_context.context_of(span),
            started_ns=time.monotonic_ns(),
            request_id_given=valid,
        )

    def _identified(self, call: CallContext) -> CallContext:
        principal = self._gate.admit(call.metadata.get(names.MD_AUTHORIZATION))
        check_role(principal, least_role(call.method), call.method)
        return replace(call, principal=principal)

    async def _fail(self, context: ServerContext, error: BaseException) -> NoReturn:
        """Send the status that `error` means, end the span with it, and raise what grpc.aio expects."""
        if context.abort_error is not None:  # sent already; whatever was raised on the way out changes nothing
            self._close(context, context.code())
            raise context.abort_error
        if isinstance(error, asyncio.CancelledError) and _cancelled_from_outside():
            self._close(context, context.cancellation_code())
            raise error
        if isinstance(error, grpc.aio.InternalError):  # a write to a caller who is gone
            self._close(context, context.cancellation_code())
            raise asyncio.CancelledError from error
        if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):  # this process or loop ends
            self._close(context, grpc.StatusCode.UNAVAILABLE)
            raise error
        failure = error if isinstance(error, ServiceError) else self._unexpected(context, error)
        # Ended before sending: when the caller sees the status, the span is already complete.
        self._close(context, status_code(failure), failure.reason)
        try:
            async with asyncio.timeout(STATUS_S):
                await context.abort_with_status(to_grpc_status(failure, context.call.request_id))
        except (grpc.aio.InternalError, TimeoutError) as gone:
            raise asyncio.CancelledError from gone

    def _unexpected(self, context: ServerContext, error: BaseException) -> Internal:
        call = context.call
        log.error(
            "uncaught %s in %s",
            type(error).__name__,
            call.method,
            exc_info=error,
            extra={"request_id": call.request_id, "trace_id": trace_context.trace_id(call.span)},
        )
        return Internal(
            f"internal error, see the server log under request id {call.request_id}",
            reason="UNCAUGHT_EXCEPTION",
        )

    def _close(self, context: ServerContext, code: grpc.StatusCode, reason: str | None = None) -> None:
        call = context.call
        span = call.span
        span.set_attribute(names.RPC_STATUS_CODE, code.name)
        if reason is not None:
            span.set_attribute(names.REASON, reason)
        if code is not grpc.StatusCode.OK:
            span.set_attribute(names.ERROR_TYPE, code.name)
        if code in SERVER_FAULTS:
            span.set_status(Status(StatusCode.ERROR, code.name))
        span.end()
        if self._observer is not None:
            seconds = (time.monotonic_ns() - call.started_ns) / 1e9
            self._observer(call.method, code.name, seconds, span)


def _cancelled_from_outside() -> bool:
    """Whether this call's task was cancelled; a CancelledError without that is a defect of the handler."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _check_once(metadata: Sequence[tuple[str, str | bytes]]) -> None:
    """Of two values neither may win in silence: a proxy may have added the one, and the caller sent the other."""
    seen: dict[str, str | bytes] = {}
    for key, value in metadata:
        if key in IDENTIFYING and seen.setdefault(key, value) != value:
            raise InvalidArgument(f"the metadata {key} comes twice with different values", field=key)


def _check_request_id(call: CallContext) -> None:
    if not call.request_id_given and names.MD_REQUEST_ID in call.metadata:
        raise InvalidArgument(
            f"{names.MD_REQUEST_ID} must be 1 to 128 characters of A-Z a-z 0-9 . _ : -",
            field=names.MD_REQUEST_ID,
            limit=128,
        )


def _same(message: Any) -> Any:
    return message


def _decoder(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    def decode(raw: bytes) -> Any:
        if deserialize is None:
            return raw
        try:
            return deserialize(raw)
        except Exception as error:
            raise InvalidArgument(
                "the request is not a valid message of this method", reason="MALFORMED_MESSAGE"
            ) from error

    return decode
