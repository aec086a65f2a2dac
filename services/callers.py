"""Who asks: the message's context and the call's metadata, agreed. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from services import names
from services.errors import InvalidArgument, PermissionDenied
from services.keys import Principal
from services.rpc_server import REQUEST_ID_FORMAT
from services.scheduler.core.limits import TOP_PRIORITY
from tercet.v1 import common_pb2

DEFAULT_TENANT: Final = "default"
PRIORITY_BOUND: Final = TOP_PRIORITY


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: str
    request_id: str
    attempt: int
    priority: int


def read_caller(
    context: common_pb2.RequestContext,
    metadata: Mapping[str, str],
    fallback_id: str,
    principal: Principal | None = None,
) -> Caller:
    """Joins the message's context with the call's metadata; values that differ are refused.

    principal: whose key came with the call. Its tenant is the caller's: another one that was named, or a priority above
    the key's, is PermissionDenied. Where no priority was named it is 0, or the key's highest if that is below.
    """
    tenant = _agreed("tenant", context.tenant, context.HasField("tenant"), metadata.get(names.MD_TENANT))
    request_id = _agreed(
        "request_id", context.request_id, context.HasField("request_id"), metadata.get(names.MD_REQUEST_ID)
    )
    priority_text = metadata.get(names.MD_PRIORITY)
    priority = _agreed(
        "priority",
        str(context.priority),
        context.HasField("priority"),
        None if priority_text is None else str(_integer("priority", priority_text)),
    )
    attempt = context.attempt if context.HasField("attempt") else 1
    if attempt < 1:
        raise InvalidArgument("context.attempt must be at least 1", field="context.attempt", limit=1)
    level = int(priority or 0)
    if abs(level) > PRIORITY_BOUND:
        raise InvalidArgument(
            f"context.priority is {level}; it must be -{PRIORITY_BOUND} to {PRIORITY_BOUND}",
            field="context.priority",
            limit=PRIORITY_BOUND,
        )
    if principal is not None:
        tenant = _own_tenant(principal, tenant)
        level = _allowed_priority(principal, None if priority is None else level)
    return Caller(tenant or DEFAULT_TENANT, request_id or fallback_id, attempt, level)


def _own_tenant(principal: Principal, named: str | None) -> str | None:
    if principal.tenant is None:
        return named
    if named is not None and named != principal.tenant:
        raise PermissionDenied(
            f"this key is of another tenant than {named!r}", reason="OTHER_TENANT", field="context.tenant"
        )
    return principal.tenant


def _allowed_priority(principal: Principal, named: int | None) -> int:
    if named is None:
        return min(0, principal.max_priority)
    if named > principal.max_priority:
        raise PermissionDenied(
            f"context.priority is {named}; this key allows at most {principal.max_priority}",
            reason="PRIORITY_TOO_HIGH",
            field="context.priority",
            limit=principal.max_priority,
        )
    return named


def _agreed(field: str, value: str, present: bool, from_metadata: str | None) -> str | None:
    """The value of message and metadata; None if neither has one."""
    if present and from_metadata is not None and value != from_metadata:
        raise InvalidArgument(
            f"context.{field} is {value!r} and the metadata says {from_metadata!r}; they must be equal",
            field=f"context.{field}",
        )
    chosen = value if present else from_metadata
    if chosen is not None and field != "priority" and not REQUEST_ID_FORMAT.fullmatch(chosen):
        raise InvalidArgument(
            f"context.{field} must be 1 to 128 characters of A-Z a-z 0-9 . _ : -",
            field=f"context.{field}",
            limit=128,
        )
    return chosen


def _integer(field: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(f"context.{field} must be an integer", field=f"context.{field}") from None
