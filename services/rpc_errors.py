"""Domain errors <-> gRPC statuses with `google.rpc` details.

Owns the one table between `services.errors` and `grpc.StatusCode`, and the size caps. Invariant: whatever text
an error holds, the status made of it fits into HTTP/2 trailers (gRPC refuses some above 8 KiB and all above
16), so that a long message never turns into a different error about metadata size.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from services import errors
from services.errors import ServiceError

DOMAIN: Final = "tercet"
MESSAGE_CAP: Final = 1024
DETAIL_CAP: Final = 200
METADATA_ROWS_CAP: Final = 4
DETAILS_KEY: Final = "grpc-status-details-bin"

STATUS_OF: Final[Mapping[type[ServiceError], grpc.StatusCode]] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unimplemented: grpc.StatusCode.UNIMPLEMENTED,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.Aborted: grpc.StatusCode.ABORTED,
    errors.FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.Internal: grpc.StatusCode.INTERNAL,
}

# Codes that this project never sends but a proxy or another gRPC stack may.
_FOREIGN: Final[Mapping[grpc.StatusCode, type[ServiceError]]] = {
    grpc.StatusCode.UNKNOWN: errors.Internal,
    grpc.StatusCode.DATA_LOSS: errors.Internal,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidArgument,
}
_ERROR_OF: Final[Mapping[grpc.StatusCode, type[ServiceError]]] = {
    **{code: error for error, code in STATUS_OF.items()},
    **_FOREIGN,
}
_CODE_OF_NUMBER: Final[Mapping[int, grpc.StatusCode]] = {code.value[0]: code for code in grpc.StatusCode}


def cap(text: str, limit: int = MESSAGE_CAP) -> str:
    """`text` in at most `limit` bytes of UTF-8, cut between characters, with a mark where it was cut."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= limit:
        return raw.decode()
    mark = " [cut]"
    return raw[: limit - len(mark)].decode("utf-8", "ignore") + mark


def status_code(error: ServiceError) -> grpc.StatusCode:
    """The code of an error's nearest class in the table; INTERNAL for a bare ServiceError."""
    for kind in type(error).__mro__:
        code = STATUS_OF.get(kind)
        if code is not None:
            return code
    return grpc.StatusCode.INTERNAL


def code_from_number(number: int) -> grpc.StatusCode:
    """The enum member of a numeric status code; UNKNOWN for a number outside the gRPC range."""
    return _CODE_OF_NUMBER.get(number, grpc.StatusCode.UNKNOWN)


def to_status(error: ServiceError, request_id: str | None = None) -> status_pb2.Status:
    """The `google.rpc.Status` of an error: ErrorInfo always; BadRequest, RetryInfo, RequestInfo where known."""
    status = status_pb2.Status(code=status_code(error).value[0], message=cap(error.message))
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    facts = dict(error.metadata)
    if error.limit is not None:
        facts["limit"] = error.limit
    for key in sorted(facts)[:METADATA_ROWS_CAP]:
        info.metadata[cap(key, 64)] = cap(facts[key], DETAIL_CAP)
    status.details.add().Pack(info)
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=cap(error.field, DETAIL_CAP), description=cap(error.message, DETAIL_CAP)
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(max(0, round(error.retry_after_s * 1e9)))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    if request_id is not None:
        status.details.add().Pack(error_details_pb2.RequestInfo(request_id=request_id))
    return status


def to_grpc_status(error: ServiceError, request_id: str | None = None) -> grpc.Status:
    """What `context.abort_with_status` takes."""
    status: grpc.Status = rpc_status.to_status(to_status(error, request_id))
    return status


def from_status(code: grpc.StatusCode, message: str, status: status_pb2.Status | None) -> ServiceError:
    """The domain error of a code, its message and, where the peer sent them, its details."""
    reason = field = limit = retry_after_s = None
    facts: dict[str, str] = {}
    for packed in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        bad_request = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        request = error_details_pb2.RequestInfo()
        try:
            if packed.Unpack(info):
                reason = info.reason
                facts.update(info.metadata)
            elif packed.Unpack(bad_request) and bad_request.field_violations:
                field = bad_request.field_violations[0].field
            elif packed.Unpack(retry):
                retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
            elif packed.Unpack(request):
                facts["request_id"] = request.request_id
        except DecodeError:
            continue
    limit = facts.pop("limit", None)
    kind = _ERROR_OF.get(code, errors.Internal)
    return kind(message, reason=reason, field=field, limit=limit, retry_after_s=retry_after_s, metadata=facts)


def from_rpc_error(error: grpc.aio.AioRpcError) -> ServiceError:
    """The domain error of a failed call. A peer that sends no or broken details still gives the right class."""
    trailers = error.trailing_metadata()
    return from_status(error.code(), error.details() or "", _details(trailers))


def _details(trailers: Iterable[tuple[str, str | bytes]] | None) -> status_pb2.Status | None:
    for key, value in trailers or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None
