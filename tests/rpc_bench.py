"""A server with one handler per arity and a traced channel to it, on a real socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Span, SpanKind

from services.rpc import ServerOptions, bind, make_channel, make_server

SERVICE = "test.v1.Service"


@dataclass
class Bench:
    """A server with one handler per arity, set by the test, and a traced channel to it."""

    exporter: InMemorySpanExporter
    provider: TracerProvider
    channel: grpc.aio.Channel
    observed: list[tuple[str, str]]
    handlers: dict[str, Any] = field(default_factory=dict)

    def call(self, arity: str) -> Any:
        return getattr(self.channel, arity)(f"/{SERVICE}/{arity}", lambda m: m, lambda m: m)

    async def spans(self, arity: str, count: int = 2) -> dict[SpanKind, ReadableSpan]:
        """The finished spans of a method by kind; waits, since the two sides end independently."""
        async with asyncio.timeout(5):
            while True:
                found = [span for span in self.exporter.get_finished_spans() if span.name == f"{SERVICE}/{arity}"]
                if len(found) >= count:
                    break
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)  # a second end of the same span would come now
        again = [span for span in self.exporter.get_finished_spans() if span.name == f"{SERVICE}/{arity}"]
        assert len(again) == count
        return {span.kind: span for span in again}


@asynccontextmanager
async def start(listen: str = "127.0.0.1:0", options: ServerOptions = ServerOptions()) -> AsyncIterator[Bench]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    observed: list[tuple[str, str]] = []

    def observe(method: str, code: str, seconds: float, span: Span) -> None:
        assert 0 <= seconds < 60
        observed.append((method, code))

    server = make_server(tracer, observer=observe, options=options)
    handlers: dict[str, Any] = {}

    class Lookup(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            name = details.method.rpartition("/")[2]
            if name not in handlers:
                return None
            return getattr(grpc, f"{name}_rpc_method_handler")(handlers[name], lambda m: m, lambda m: m)

    server.add_generic_rpc_handlers([Lookup()])
    target = bind(server, listen)
    await server.start()
    channel = make_channel(target, tracer)
    try:
        yield Bench(exporter, provider, channel, observed, handlers)
    finally:
        await channel.close()
        await server.stop(None)


async def count_forever(request: bytes, context: Any) -> AsyncIterator[bytes]:
    number = 0
    while True:
        yield b"%d" % number
        number += 1
        await asyncio.sleep(0.001)
