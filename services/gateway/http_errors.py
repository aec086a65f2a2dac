"""Domain errors to HTTP: the one table between `services.errors` and status codes, and OpenAI's error shape.

Pure. Owns the failures that only HTTP knows (no such path, body too large). Invariant: whatever fails, a client
reads `{"error": {"message", "type", "param", "code"}}`, with a message of at most 1 KiB and no internals in it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from services import errors
from services.errors import ServiceError
from services.gateway.openai import parameter_of
from services.gateway.shapes import ErrorBody
from services.rpc_errors import cap


class RouteNotFound(errors.NotFound):
    default_reason = "UNKNOWN_URL"


class MethodNotAllowed(errors.InvalidArgument):
    """`allowed`: the methods that the path has."""

    default_reason = "METHOD_NOT_ALLOWED"

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class BodyTooLarge(errors.InvalidArgument):
    default_reason = "BODY_TOO_LARGE"


class BodyTimeout(errors.DeadlineExceeded):
    """The body did not arrive in time; the caller's doing, unlike the limits of the work itself."""

    default_reason = "BODY_TIMEOUT"


@dataclass(frozen=True, slots=True)
class Row:
    """status: HTTP. type: OpenAI's word for the kind. code: where the error has no reason of its own."""

    status: int
    type: str
    code: str


ROWS: Final[Mapping[type[ServiceError], Row]] = {
    errors.InvalidArgument: Row(400, "invalid_request_error", "invalid_value"),
    errors.Unimplemented: Row(400, "invalid_request_error", "unsupported_parameter"),
    errors.FailedPrecondition: Row(400, "invalid_request_error", "failed_precondition"),
    errors.Unauthenticated: Row(401, "authentication_error", "invalid_api_key"),
    errors.PermissionDenied: Row(403, "permission_error", "permission_denied"),
    errors.NotFound: Row(404, "invalid_request_error", "model_not_found"),
    RouteNotFound: Row(404, "invalid_request_error", "unknown_url"),
    MethodNotAllowed: Row(405, "invalid_request_error", "method_not_allowed"),
    BodyTimeout: Row(408, "timeout_error", "body_timeout"),
    errors.AlreadyExists: Row(409, "invalid_request_error", "request_id_in_use"),
    BodyTooLarge: Row(413, "invalid_request_error", "body_too_large"),
    errors.ResourceExhausted: Row(429, "rate_limit_error", "rate_limit_exceeded"),
    errors.Cancelled: Row(499, "cancelled_error", "cancelled"),
    errors.Internal: Row(500, "server_error", "internal_error"),
    errors.Aborted: Row(500, "server_error", "aborted"),
    errors.Unavailable: Row(503, "service_unavailable_error", "unavailable"),
    errors.DeadlineExceeded: Row(504, "timeout_error", "deadline_exceeded"),
}


def row_of(error: ServiceError) -> Row:
    """The row of the error's nearest class; Internal's for a bare ServiceError."""
    for kind in type(error).__mro__:
        row = ROWS.get(kind)
        if row is not None:
            return row
    return ROWS[errors.Internal]


def code_of(error: ServiceError) -> str:
    """The error's own reason in lower case, or its row's code."""
    return row_of(error).code if error.reason == type(error).default_reason else error.reason.lower()


def body_of(error: ServiceError, prompt_parameter: str = "prompt", form: str | None = None) -> ErrorBody:
    """prompt_parameter: what the endpoint calls its prompt. form: the parameter that asked for a grammar."""
    return {
        "error": {
            "message": cap(error.message),
            "type": row_of(error).type,
            "param": None if error.field is None else parameter_of(error.field, prompt_parameter, form),
            "code": code_of(error),
        }
    }


def headers_of(error: ServiceError) -> dict[str, str]:
    """Retry-After in whole seconds, rounded up, where the error says when; Allow for a wrong method;
    WWW-Authenticate where a key is missing or wrong."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, errors.Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = error.allowed
    return headers
