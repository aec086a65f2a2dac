"""Every failure that the SDK raises: one tree, one class per kind.

Owns the table between gRPC status codes and exceptions, and reads the `google.rpc` details that Tercet's servers
send (ErrorInfo, BadRequest, RetryInfo, RequestInfo). Must not know how a call is made. Invariant: a failed call
raises a `TercetError` and nothing else, whatever the peer sent; broken or missing details lose facts, never the class.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Self, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

__all__ = [
    "AbortedError",
    "AlreadyExistsError",
    "DeadlineExceededError",
    "ErrorDetails",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "PermissionDeniedError",
    "RequestCancelledError",
    "ResourceExhaustedError",
    "TercetError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
]

_DETAILS_KEY: Final = "grpc-status-details-bin"
_Trailers: TypeAlias = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """What is known about a failure besides its message. Absent facts are None.

    code: gRPC's name of the status, as the peer sent it. reason: UPPER_SNAKE, stable, for programs. field: the request
    field at fault. limit: the bound that the field broke. request_id: of the failed request. retry_after: seconds that
    the server asks to wait. attempts: times that the request was sent. metadata: further facts.
    """

    code: str | None = None
    reason: str | None = None
    field: str | None = None
    limit: str | None = None
    request_id: str | None = None
    retry_after: float | None = None
    attempts: int | None = None
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)


class TercetError(Exception):
    """A request failed. Its class says how; `details` and the properties say the rest."""

    default_code: ClassVar[str] = "UNKNOWN"

    def __init__(self, message: str, details: ErrorDetails | None = None) -> None:
        # Both in args: so the exception can be pickled, and cross a process pool.
        details = details or ErrorDetails()
        super().__init__(message, details)
        self.message = message
        self.details = details

    def __str__(self) -> str:
        request = f" (request {self.request_id})" if self.request_id else ""
        return f"{self.code}: {self.message}{request}"

    @property
    def code(self) -> str:
        """gRPC's name of the status, such as "UNAVAILABLE"."""
        return self.details.code or self.default_code

    @property
    def reason(self) -> str:
        """UPPER_SNAKE, stable, for programs; the code where the server named none."""
        return self.details.reason or self.code

    @property
    def field(self) -> str | None:
        """The request field at fault."""
        return self.details.field

    @property
    def limit(self) -> str | None:
        """The bound that the field broke."""
        return self.details.limit

    @property
    def request_id(self) -> str | None:
        """The request's id: what to search the servers' logs for."""
        return self.details.request_id

    @property
    def retry_after(self) -> float | None:
        """Seconds that the server asks to wait before another try."""
        return self.details.retry_after

    @property
    def retryable(self) -> bool:
        """Whether the same request can succeed later, unchanged."""
        return self.retry_after is not None

    def with_facts(self, *, request_id: str | None = None, attempts: int | None = None) -> Self:
        """The same failure with what only the caller's side knows; facts that are there already stay."""
        known = self.details
        merged = replace(known, request_id=known.request_id or request_id, attempts=known.attempts or attempts)
        return type(self)(self.message, merged)


class InvalidArgumentError(TercetError, ValueError):
    """The request can never succeed as it is; `field` and `limit` say what to change."""

    default_code = "INVALID_ARGUMENT"


class UnimplementedError(TercetError):
    """The contract has it, this server does not serve it; `field` names it."""

    default_code = "UNIMPLEMENTED"


class NotFoundError(TercetError):
    """Another model is served than the one asked for."""

    default_code = "NOT_FOUND"


class AlreadyExistsError(TercetError):
    """A live request has the same id."""

    default_code = "ALREADY_EXISTS"


class ResourceExhaustedError(TercetError):
    """A queue, quota or buffer is full; `retry_after` is the server's estimate of when it is not."""

    default_code = "RESOURCE_EXHAUSTED"


class DeadlineExceededError(TercetError, TimeoutError):
    """A time limit passed before the first token, or the answer did not arrive in time."""

    default_code = "DEADLINE_EXCEEDED"


class UnavailableError(TercetError):
    """Nobody can serve this now: the server is gone, drains, or has no executor."""

    default_code = "UNAVAILABLE"

    @property
    def retryable(self) -> bool:
        """True."""
        return True


class RequestCancelledError(TercetError):
    """The request was cancelled: by `cancel()`, by closing the client, or by the server."""

    default_code = "CANCELLED"


class AbortedError(TercetError):
    """The request could not go on: its grammar allows no token, or no server can resume it."""

    default_code = "ABORTED"


class FailedPreconditionError(TercetError):
    """The client or the server is not in a state that allows this."""

    default_code = "FAILED_PRECONDITION"


class PermissionDeniedError(TercetError):
    """The key may not do this."""

    default_code = "PERMISSION_DENIED"


class UnauthenticatedError(TercetError):
    """The key is missing or unknown."""

    default_code = "UNAUTHENTICATED"


class InternalError(TercetError):
    """A defect of the server, or a peer that breaks the contract."""

    default_code = "INTERNAL"


_ERROR_OF: Final[Mapping[str, type[TercetError]]] = {
    **{
        kind.default_code: kind
        for kind in (
            InvalidArgumentError,
            UnimplementedError,
            NotFoundError,
            AlreadyExistsError,
            ResourceExhaustedError,
            DeadlineExceededError,
            UnavailableError,
            RequestCancelledError,
            AbortedError,
            FailedPreconditionError,
            PermissionDeniedError,
            UnauthenticatedError,
            InternalError,
        )
    },
    # Never sent by Tercet, but by proxies and other gRPC stacks; `code` still tells them apart.
    "OUT_OF_RANGE": InvalidArgumentError,
    "UNKNOWN": InternalError,
    "DATA_LOSS": InternalError,
}


def from_rpc_error(error: grpc.RpcError) -> TercetError:
    """The exception of a failed call, sync or aio."""
    return from_status(
        error.code().name, error.details() or "", _status(cast(_Trailers, error.trailing_metadata() or ()))
    )


def from_status(code: str, message: str, status: status_pb2.Status | None = None) -> TercetError:
    """The exception of a status code's name, its message and, where the peer sent them, its details."""
    details = ErrorDetails(code=code)
    for packed in status.details if status is not None else ():
        details = _with_detail(details, packed)
    return _ERROR_OF.get(code, InternalError)(message or code, details)


# One row per kind of detail: its message, and what it adds.
def _with_detail(known: ErrorDetails, packed: object) -> ErrorDetails:
    for kind, merge in _DETAILS.items():
        detail = kind()
        try:
            if packed.Unpack(detail):  # type: ignore[attr-defined]
                return merge(known, detail)
        except DecodeError:
            return known
    return known


def _error_info(known: ErrorDetails, info: error_details_pb2.ErrorInfo) -> ErrorDetails:
    facts = dict(info.metadata)
    return replace(known, reason=info.reason or None, limit=facts.pop("limit", None), metadata=facts)


def _bad_request(known: ErrorDetails, bad: error_details_pb2.BadRequest) -> ErrorDetails:
    return replace(known, field=bad.field_violations[0].field) if bad.field_violations else known


def _retry_info(known: ErrorDetails, info: error_details_pb2.RetryInfo) -> ErrorDetails:
    return replace(known, retry_after=max(0.0, info.retry_delay.ToNanoseconds() / 1e9))


def _request_info(known: ErrorDetails, info: error_details_pb2.RequestInfo) -> ErrorDetails:
    return replace(known, request_id=info.request_id or None)


_DETAILS: Final = {
    error_details_pb2.ErrorInfo: _error_info,
    error_details_pb2.BadRequest: _bad_request,
    error_details_pb2.RetryInfo: _retry_info,
    error_details_pb2.RequestInfo: _request_info,
}


def _status(trailers: _Trailers) -> status_pb2.Status | None:
    for key, value in trailers:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None
