"""Statuses and their details as exceptions."""

import pickle
from collections.abc import AsyncIterator

import grpc
import pytest
from google.rpc import error_details_pb2
from scripted_tokenizer import CLIENTS, Driver, ScriptedTokenizer, accepted, driving, fails, retry_info, serving

import tercet

OF_CODE = {
    "CANCELLED": tercet.RequestCancelledError,
    "UNKNOWN": tercet.InternalError,
    "INVALID_ARGUMENT": tercet.InvalidArgumentError,
    "DEADLINE_EXCEEDED": tercet.DeadlineExceededError,
    "NOT_FOUND": tercet.NotFoundError,
    "ALREADY_EXISTS": tercet.AlreadyExistsError,
    "PERMISSION_DENIED": tercet.PermissionDeniedError,
    "UNAUTHENTICATED": tercet.UnauthenticatedError,
    "RESOURCE_EXHAUSTED": tercet.ResourceExhaustedError,
    "FAILED_PRECONDITION": tercet.FailedPreconditionError,
    "ABORTED": tercet.AbortedError,
    "OUT_OF_RANGE": tercet.InvalidArgumentError,
    "UNIMPLEMENTED": tercet.UnimplementedError,
    "INTERNAL": tercet.InternalError,
    "UNAVAILABLE": tercet.UnavailableError,
    "DATA_LOSS": tercet.InternalError,
}


@pytest.fixture
async def service() -> ScriptedTokenizer:
    return ScriptedTokenizer()


@pytest.fixture(params=sorted(CLIENTS))
async def driver(request: pytest.FixtureRequest, service: ScriptedTokenizer) -> AsyncIterator[Driver]:
    once = tercet.RetryPolicy(attempts=1)
    async with serving(service) as target, driving(request.param, target, retry=once) as driver:
        yield driver


def test_every_code_has_a_class() -> None:
    assert set(OF_CODE) == {code.name for code in grpc.StatusCode} - {"OK"}


@pytest.mark.parametrize("code", OF_CODE)
async def test_code_to_class(driver: Driver, service: ScriptedTokenizer, code: str) -> None:
    service.scripts.append(fails(grpc.StatusCode[code], "why", accepted()))
    stream = await driver.call("generate", "x", request_id="q")
    with pytest.raises(tercet.TercetError) as caught:
        await driver.on(stream, "text")
    error = caught.value
    assert type(error) is OF_CODE[code]
    assert (error.code, error.reason, error.message, error.request_id) == (code, code, "why", "q")
    assert error.retryable is (code == "UNAVAILABLE")
    assert isinstance(error.__cause__, grpc.RpcError)
    assert str(error) == f"{code}: why (request q)"


async def test_details(driver: Driver, service: ScriptedTokenizer) -> None:
    details = (
        error_details_pb2.ErrorInfo(reason="TOP_P_RANGE", domain="tercet", metadata={"limit": "1", "other": "x"}),
        error_details_pb2.BadRequest(
            field_violations=[error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p", description="d")]
        ),
        retry_info(1500),
        error_details_pb2.RequestInfo(request_id="theirs"),
        error_details_pb2.Help(),
    )
    service.scripts.append(fails(grpc.StatusCode.INVALID_ARGUMENT, "top_p ä", details=details))
    stream = await driver.call("generate", "x")
    with pytest.raises(ValueError, match="top_p ä") as caught:
        await driver.on(stream, "text")
    error = caught.value
    assert isinstance(error, tercet.InvalidArgumentError)
    assert error.details == tercet.ErrorDetails(
        code="INVALID_ARGUMENT",
        reason="TOP_P_RANGE",
        field="sampling.top_p",
        limit="1",
        request_id="theirs",
        retry_after=1.5,
        attempts=1,
        metadata={"other": "x"},
    )


async def test_broken_details_keep_the_class(driver: Driver, service: ScriptedTokenizer) -> None:
    async def script(request: object, context: grpc.aio.ServicerContext) -> AsyncIterator[object]:  # type: ignore[type-arg]
        await context.abort(grpc.StatusCode.NOT_FOUND, "m", (("grpc-status-details-bin", b"\xff\xff"),))
        yield

    service.scripts.append(script)  # type: ignore[arg-type]
    stream = await driver.call("generate", "x")
    with pytest.raises(tercet.NotFoundError, match="m"):
        await driver.on(stream, "text")


async def test_nobody_listens(unused_tcp_port: int) -> None:
    for kind in CLIENTS:
        async with driving(kind, f"127.0.0.1:{unused_tcp_port}", retry=tercet.RetryPolicy(attempts=1)) as driver:
            with pytest.raises(tercet.UnavailableError):
                await driver.call("tokenize", "x")
            with pytest.raises(tercet.UnavailableError):
                await driver.on(await driver.call("generate", "x"), "text")


@pytest.mark.parametrize("kind", OF_CODE.values())
def test_errors_cross_processes(kind: type[tercet.TercetError]) -> None:
    error = kind("m", tercet.ErrorDetails(field="f", metadata={"a": "b"}))
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.message, copy.details) == (kind, "m", error.details)
