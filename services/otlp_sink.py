"""A small OTLP/gRPC receiver that keeps spans in memory: for tests and for the demo's waterfall.

Owns the wire format's reading. Must not be mistaken for a store: it keeps the last `limit` spans of this
process's lifetime. Invariant: what it accepts it can show; `wait_for` wakes on arrival, it does not poll.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from services.rpc import bind
from services.spans import EventRecord, LinkRecord, Node, SpanRecord, Value, tree


class OtlpSink(trace_service_pb2_grpc.TraceServiceServicer):
    """Use as an async context manager: inside it `endpoint` takes spans.

    limit: how many spans are kept, oldest dropped first.
    """

    def __init__(self, listen: str = "127.0.0.1:0", limit: int = 100_000) -> None:
        self._listen = listen
        self._spans: deque[SpanRecord] = deque(maxlen=limit)
        self._arrived = asyncio.Event()
        self._server = grpc.aio.server(
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20)]
        )
        self.endpoint = ""

    @property
    def spans(self) -> Sequence[SpanRecord]:
        """All spans so far, in order of arrival."""
        return tuple(self._spans)

    def trace(self, trace_id: str) -> list[Node]:
        """The tree of one trace; the id in hexadecimal."""
        return tree(span for span in self._spans if span.trace_id == trace_id)

    async def wait_for(
        self, predicate: Callable[[Sequence[SpanRecord]], bool], timeout: float = 5.0
    ) -> Sequence[SpanRecord]:
        """The spans as soon as `predicate` of them holds; TimeoutError after `timeout` seconds, naming what is
        there."""
        try:
            async with asyncio.timeout(timeout):
                while not predicate(self.spans):
                    await self._arrived.wait()
        except TimeoutError:
            names = ", ".join(f"{span.service}:{span.name}" for span in self._spans) or "none"
            raise TimeoutError(f"not in {timeout:g} s; spans so far: {names}") from None
        return self.spans

    async def Export(self, request: Any, context: Any) -> Any:
        self._spans.extend(_records(request))
        self._arrived.set()
        self._arrived = asyncio.Event()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def __aenter__(self) -> Self:
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"http://{bind(self._server, self._listen)}"
        await self._server.start()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._server.stop(None)


def _records(request: trace_service_pb2.ExportTraceServiceRequest) -> Iterable[SpanRecord]:
    for resource in request.resource_spans:
        about = _attributes(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield _record(span, str(about.get("service.name", "")), str(about.get("service.instance.id", "")))


def _record(span: trace_pb2.Span, service: str, instance: str) -> SpanRecord:
    return SpanRecord(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        service=service,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        events=tuple(
            EventRecord(event.name, event.time_unix_nano, _attributes(event.attributes)) for event in span.events
        ),
        links=tuple(
            LinkRecord(link.trace_id.hex(), link.span_id.hex(), _attributes(link.attributes)) for link in span.links
        ),
        instance=instance,
    )


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Value]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Value:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return tuple(_value(item) for item in value.array_value.values)
    if kind == "kvlist_value":
        return tuple((pair.key, _value(pair.value)) for pair in value.kvlist_value.values)
    plain: Value = getattr(value, kind)
    return plain
