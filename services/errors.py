"""The failures that a service tells its caller about. Standard library only.

Owns the vocabulary: one class per kind of failure, each carrying what the caller needs to act (which field,
which limit, when to retry). Must not know how a failure travels: the mapping to gRPC status codes is
`services.rpc_errors`, the one to HTTP is the gateway's. Invariant: `message` is written for the caller and
never holds internals (paths, tracebacks, other callers' data).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

_NOTHING: Mapping[str, str] = MappingProxyType({})


class ServiceError(Exception):
    """A failure with a name.

    message: for the caller. reason: UPPER_SNAKE, stable, for programs. field: the request field at fault.
    limit: the bound that the field broke, as text. retry_after_s: seconds to wait before trying again, where
    trying again can help. metadata: further facts as short strings.
    """

    default_reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        field: str | None = None,
        limit: object | None = None,
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] = _NOTHING,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.field = field
        self.limit = None if limit is None else str(limit)
        self.retry_after_s = retry_after_s
        self.metadata: Mapping[str, str] = MappingProxyType(dict(metadata))


class InvalidArgument(ServiceError):
    """The request can never succeed as it is; `field` and `limit` say what to change."""

    default_reason = "INVALID_ARGUMENT"


class Unimplemented(ServiceError):
    """The contract has it, this build does not serve it; `field` names it."""

    default_reason = "UNIMPLEMENTED"


class NotFound(ServiceError):
    default_reason = "NOT_FOUND"


class AlreadyExists(ServiceError):
    default_reason = "ALREADY_EXISTS"


class ResourceExhausted(ServiceError):
    """A queue, quota or buffer is full; `retry_after_s` comes from the measured drain rate."""

    default_reason = "RESOURCE_EXHAUSTED"


class DeadlineExceeded(ServiceError):
    default_reason = "DEADLINE_EXCEEDED"


class Unavailable(ServiceError):
    """Nobody can serve this now (draining, no executor); trying again elsewhere or later is sound."""

    default_reason = "UNAVAILABLE"


class Cancelled(ServiceError):
    default_reason = "CANCELLED"


class Aborted(ServiceError):
    default_reason = "ABORTED"


class FailedPrecondition(ServiceError):
    default_reason = "FAILED_PRECONDITION"


class PermissionDenied(ServiceError):
    default_reason = "PERMISSION_DENIED"


class Unauthenticated(ServiceError):
    default_reason = "UNAUTHENTICATED"


class Internal(ServiceError):
    """A defect on this side. The message names the request id, not the cause; the cause is in the log."""

    default_reason = "INTERNAL"
