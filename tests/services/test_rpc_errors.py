"""Domain errors survive the trip through a gRPC status, and any status gives a domain error."""

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from services import errors
from services.errors import Internal, InvalidArgument, ResourceExhausted, ServiceError
from services.rpc_errors import (
    DETAILS_KEY,
    MESSAGE_CAP,
    STATUS_OF,
    cap,
    from_rpc_error,
    status_code,
    to_grpc_status,
    to_status,
)


def as_rpc_error(status: Any, details: bytes | None = None) -> grpc.aio.AioRpcError:
    """What a client sees of a status."""
    trailers = grpc.aio.Metadata()
    raw = dict(status.trailing_metadata)[DETAILS_KEY] if details is None else details
    trailers.add(DETAILS_KEY, raw)
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailers, details=status.details)


def concrete_errors() -> list[type[ServiceError]]:
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and kind in STATUS_OF]


def test_the_table_is_complete_and_one_to_one() -> None:
    declared = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, ServiceError) and kind is not ServiceError
    }
    assert set(STATUS_OF) == declared
    assert len(set(STATUS_OF.values())) == len(STATUS_OF)


@pytest.mark.parametrize("kind", concrete_errors())
def test_round_trip(kind: type[ServiceError]) -> None:
    sent = kind(
        "what happened", reason="QUEUE_FULL", field="max_tokens", limit=8, retry_after_s=1.25, metadata={"a": "b"}
    )
    got = from_rpc_error(as_rpc_error(to_grpc_status(sent, "req-1")))
    assert type(got) is kind
    assert (got.message, got.reason, got.field, got.limit) == ("what happened", "QUEUE_FULL", "max_tokens", "8")
    assert got.retry_after_s == 1.25
    assert dict(got.metadata) == {"a": "b", "request_id": "req-1"}


def test_an_error_without_extras_has_only_error_info() -> None:
    status = to_status(InvalidArgument("no"))
    assert [packed.TypeName() for packed in status.details] == ["google.rpc.ErrorInfo"]
    info = error_details_pb2.ErrorInfo()
    status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("INVALID_ARGUMENT", "tercet")


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
@pytest.mark.parametrize("details", [b"", b"\xff\xff not a status", status_pb2.Status().SerializeToString()])
def test_any_peers_status_gives_a_domain_error(code: grpc.StatusCode, details: bytes) -> None:
    error = grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata((DETAILS_KEY, details)), details="from a proxy"
    )
    got = from_rpc_error(error)
    assert got.message == "from a proxy"
    assert got.reason == got.default_reason
    assert got.field is None
    assert got.retry_after_s is None
    if code in STATUS_OF.values():
        assert status_code(got) is code


def test_missing_trailers_and_broken_details_inside_a_status() -> None:
    bare = grpc.aio.AioRpcError(grpc.StatusCode.UNKNOWN, grpc.aio.Metadata(), grpc.aio.Metadata())
    assert isinstance(from_rpc_error(bare), Internal)
    status = status_pb2.Status(code=8, message="full")
    broken = status.details.add()
    broken.type_url = "type.googleapis.com/google.rpc.ErrorInfo"
    broken.value = b"\xff\xff"
    status.details.add(type_url="type.googleapis.com/of.another.Product", value=b"x")
    status.details.add().Pack(error_details_pb2.BadRequest())
    trailers = grpc.aio.Metadata((DETAILS_KEY, status.SerializeToString()))
    error = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), trailers, details="full")
    assert isinstance(from_rpc_error(error), ResourceExhausted)


@given(st.text(alphabet=st.characters(exclude_categories=[]), max_size=2000), st.integers(16, 1024))
def test_cap_is_short_valid_and_a_prefix(text: str, limit: int) -> None:
    """Also for lone surrogates, which have no UTF-8."""
    short = cap(text, limit)
    assert len(short.encode()) <= limit
    clean = text.encode("utf-8", "replace").decode()
    assert short == clean or (short.endswith(" [cut]") and clean.startswith(short[: -len(" [cut]")]))


def test_the_largest_status_fits_into_trailers() -> None:
    worst = "\N{PILE OF POO}" * 5000
    error = InvalidArgument(
        worst, field=worst, limit=worst, retry_after_s=1e9, metadata={worst + str(n): worst for n in range(50)}
    )
    status = to_status(error, "r" * 128)
    assert len(status.message.encode()) <= MESSAGE_CAP
    # grpc-message is percent-encoded (3 bytes each), the details are base64 in the worst case
    assert 3 * MESSAGE_CAP + len(status.SerializeToString()) * 4 / 3 < 8192 - 512


def test_negative_retry_is_zero_and_a_bare_base_error_is_internal() -> None:
    got = from_rpc_error(as_rpc_error(to_grpc_status(ResourceExhausted("x", retry_after_s=-1))))
    assert got.retry_after_s == 0
    assert status_code(ServiceError("x")) is grpc.StatusCode.INTERNAL

    class QueueFull(ResourceExhausted):
        default_reason = "QUEUE_FULL"

    assert status_code(QueueFull("x")) is grpc.StatusCode.RESOURCE_EXHAUSTED
