"""A TokenizerService that plays scripts, and one driver for both clients of the SDK.

The server runs on the session's event loop. The sync client runs in worker threads against it, so a test is written
once and holds for both.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

import tercet
from tercet.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc

Event = tokenizer_pb2.TokenizerServiceGenerateResponse
Script = Callable[[Any, Any], AsyncIterator[Event]]


def accepted(**values: Any) -> Event:
    return Event(accepted=tokenizer_pb2.Accepted(**{"request_id": "r", "seed": 7, "prompt_tokens": 3, **values}))


def delta(text: str, *token_ids: int, index: int = 0) -> Event:
    return Event(delta=tokenizer_pb2.TextDelta(index=index, text=text, token_ids=token_ids))


def finished(index: int = 0, reason: int = common_pb2.FINISH_REASON_STOP, delivered: int = 2) -> Event:
    usage = common_pb2.Usage(
        prompt_tokens=3, delivered_tokens=delivered, sampled_tokens=delivered + 1, discarded_tokens=1
    )
    times = common_pb2.PhaseTimes(first_token_ns=1_500_000_000, total_ns=2_000_000_000)
    return Event(finished=tokenizer_pb2.Finished(index=index, reason=reason, usage=usage, times=times))


def plays(*events: Event) -> Script:
    """Sends the events and ends with OK."""

    async def script(request: Any, context: Any) -> AsyncIterator[Event]:
        for event in events:
            yield event

    return script


def fails(code: grpc.StatusCode, message: str = "scripted", *events: Event, details: tuple[Any, ...] = ()) -> Script:
    """Sends the events and ends with a status that carries the details."""

    async def script(request: Any, context: Any) -> AsyncIterator[Event]:
        for event in events:
            yield event
        await abort(context, code, message, details)

    return script


async def abort(context: Any, code: grpc.StatusCode, message: str, details: tuple[Any, ...] = ()) -> None:
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    await context.abort_with_status(rpc_status.to_status(status))


def retry_info(milliseconds: int) -> Any:
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromMilliseconds(milliseconds)
    return info


@dataclass
class ScriptedTokenizer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Plays `scripts` in turn, and remembers what came: requests, metadata, seconds to the deadline, cancellations."""

    scripts: deque[Script] = field(default_factory=deque)
    requests: list[Any] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    time_left: list[float | None] = field(default_factory=list)
    arrived: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    cancelled: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    unary_failures: deque[grpc.StatusCode] = field(default_factory=deque)
    unary_hangs: bool = False

    async def Generate(self, request: Any, context: Any) -> None:
        """Writes by itself: grpc.aio tells no generator of a call that ends while a message of it is written."""
        self._remember(request, context)
        try:
            async for event in self.scripts.popleft()(request, context):
                await context.write(event)
        except (asyncio.CancelledError, grpc.aio.InternalError):
            self.cancelled.release()
            raise

    async def Tokenize(self, request: Any, context: Any) -> Any:
        await self._unary(request, context)
        return tokenizer_pb2.TokenizerServiceTokenizeResponse(token_ids=list(request.text.encode()))

    async def Detokenize(self, request: Any, context: Any) -> Any:
        await self._unary(request, context)
        return tokenizer_pb2.TokenizerServiceDetokenizeResponse(text=bytes(request.token_ids).decode())

    async def RenderChat(self, request: Any, context: Any) -> Any:
        await self._unary(request, context)
        text = "".join(f"<{message.role}>{message.content}" for message in request.chat.messages)
        return tokenizer_pb2.TokenizerServiceRenderChatResponse(text=text, token_ids=[1, 2])

    async def Describe(self, request: Any, context: Any) -> Any:
        await self._unary(request, context)
        model = common_pb2.ModelDescription(name="m", max_model_len=2048, vocab_size=9, eos_token_ids=[2])
        return tokenizer_pb2.TokenizerServiceDescribeResponse(model=model, schema_revision=1, has_chat_template=True)

    async def _unary(self, request: Any, context: Any) -> None:
        self._remember(request, context)
        if self.unary_hangs:
            await asyncio.Event().wait()
        if self.unary_failures:
            await abort(context, self.unary_failures.popleft(), "scripted")

    def _remember(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.time_left.append(context.time_remaining())
        self.arrived.release()


@asynccontextmanager
async def serving(service: ScriptedTokenizer, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """Serves until the block ends; gives the target."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(service, server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield address if address.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@dataclass
class Driver:
    """One of the two clients behind one set of awaitables."""

    client: tercet.Client | tercet.AsyncClient

    async def call(self, name: str, *args: Any, **options: Any) -> Any:
        method = getattr(self.client, name)
        if isinstance(self.client, tercet.AsyncClient):
            result = method(*args, **options)
            return await result if isinstance(result, Awaitable) else result
        return await asyncio.to_thread(method, *args, **options)

    async def on(self, stream: Any, name: str, *args: Any) -> Any:
        """Calls a method of a stream."""
        if isinstance(self.client, tercet.AsyncClient):
            result = getattr(stream, name)(*args)
            return await result if isinstance(result, Awaitable) else result
        return await asyncio.to_thread(getattr(stream, name), *args)

    async def next(self, stream: Any) -> tercet.Delta | None:
        """The next delta; None at the end."""
        if isinstance(self.client, tercet.AsyncClient):
            return await anext(stream, None)
        return await asyncio.to_thread(next, stream, None)

    async def close(self) -> None:
        if isinstance(self.client, tercet.AsyncClient):
            await self.client.close()
        else:
            await asyncio.to_thread(self.client.close)


CLIENTS = {"sync": tercet.Client, "async": tercet.AsyncClient}


@asynccontextmanager
async def driving(kind: str, target: str, **options: Any) -> AsyncIterator[Driver]:
    driver = Driver(CLIENTS[kind](target, **options))
    try:
        yield driver
    finally:
        await driver.close()
