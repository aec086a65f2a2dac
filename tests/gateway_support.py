"""A scripted engine and the clients that gateway tests share."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from services.config import HttpLimits
from services.errors import ServiceError
from services.gate import OPEN_GATE, Gate
from services.gateway.app import make_app
from services.gateway.engine import EngineCall
from tercet.v1 import common_pb2, tokenizer_pb2

Response = tokenizer_pb2.TokenizerServiceGenerateResponse
Item = Response | BaseException | asyncio.Event
CREATED = 1_700_000_000


def accepted(prompt_tokens: int = 7) -> Response:
    return Response(
        accepted=tokenizer_pb2.Accepted(
            request_id="r", prompt_tokens=prompt_tokens, model="toy", numerics="abc123", max_tokens=16
        )
    )


def delta(text: str, ids: Sequence[int] = (1,), index: int = 0, logprobs: Sequence[Any] = ()) -> Response:
    return Response(delta=tokenizer_pb2.TextDelta(index=index, text=text, token_ids=ids, logprobs=logprobs))


def finished(
    reason: int = common_pb2.FINISH_REASON_STOP, tokens: int = 2, cached: int = 0, index: int = 0, prompt: int = 7
) -> Response:
    usage = common_pb2.Usage(
        prompt_tokens=prompt, cached_tokens=cached, delivered_tokens=tokens, sampled_tokens=tokens + 1
    )
    return Response(finished=tokenizer_pb2.Finished(index=index, reason=reason, usage=usage))


def answer(*texts: str, **end: Any) -> list[Item]:
    return [accepted(), *(delta(text) for text in texts), finished(tokens=len(texts), **end)]


class ScriptedEngine:
    """Plays a script: responses are yielded, exceptions raised, events waited for.

    per_answer: instead of a script, these for each of the n answers asked for, after Accepted.
    """

    def __init__(self, script: Sequence[Item] = (), *, per_answer: Sequence[Response] = ()) -> None:
        self.script: list[Item] = list(script)
        self.per_answer = list(per_answer)
        self.requests: list[tokenizer_pb2.TokenizerServiceGenerateRequest] = []
        self.calls: list[EngineCall] = []
        self.live = 0
        self.yielded = 0
        self.begun = asyncio.Event()
        self.released = asyncio.Event()
        self.unready: str | None = None
        self.describe_error: ServiceError | None = None
        self.tool_format = ""
        self.reasoning_format = ""

    async def generate(
        self, request: tokenizer_pb2.TokenizerServiceGenerateRequest, call: EngineCall
    ) -> AsyncGenerator[Response, None]:
        self.requests.append(request)
        self.calls.append(call)
        self.live += 1
        self.begun.set()
        try:
            for item in self.script or self._play_answers(max(request.sampling.n, 1)):
                if isinstance(item, asyncio.Event):
                    await item.wait()
                elif isinstance(item, BaseException):
                    raise item
                else:
                    self.yielded += 1
                    yield item
                    await asyncio.sleep(0)
        finally:
            self.live -= 1
            self.released.set()

    def _play_answers(self, count: int) -> list[Item]:
        script: list[Item] = [accepted()] if self.per_answer else []
        for index in range(count):
            for template in self.per_answer:
                response = Response()
                response.CopyFrom(template)
                response.finished.index = index
                script.append(response)
        return script

    async def describe(self) -> tokenizer_pb2.TokenizerServiceDescribeResponse:
        if self.describe_error is not None:
            raise self.describe_error
        return tokenizer_pb2.TokenizerServiceDescribeResponse(
            model=common_pb2.ModelDescription(name="toy", max_model_len=64, vocab_size=100),
            numerics="abc123",
            tool_format=self.tool_format,
            reasoning_format=self.reasoning_format,
        )

    async def tokenize(
        self, request: tokenizer_pb2.TokenizerServiceTokenizeRequest, call: EngineCall
    ) -> tokenizer_pb2.TokenizerServiceTokenizeResponse:
        """A token is a byte."""
        raw = request.text.encode()
        ids = [*([0] if request.add_special_tokens else []), *raw]
        pieces = [bytes([one]) for one in ids] if request.return_pieces else []
        return tokenizer_pb2.TokenizerServiceTokenizeResponse(token_ids=ids, pieces=pieces)

    async def detokenize(
        self, request: tokenizer_pb2.TokenizerServiceDetokenizeRequest, call: EngineCall
    ) -> tokenizer_pb2.TokenizerServiceDetokenizeResponse:
        kept = [one for one in request.token_ids if one or request.keep_special_tokens]
        return tokenizer_pb2.TokenizerServiceDetokenizeResponse(text=bytes(kept).decode())

    async def render_chat(
        self, request: tokenizer_pb2.TokenizerServiceRenderChatRequest, call: EngineCall
    ) -> tokenizer_pb2.TokenizerServiceRenderChatResponse:
        text = "".join(f"{message.role}:{message.content};" for message in request.chat.messages)
        text += "assistant:" if request.chat.add_generation_prompt else ""
        return tokenizer_pb2.TokenizerServiceRenderChatResponse(text=text, token_ids=list(text.encode()))

    async def why_not_ready(self) -> str | None:
        return self.unready


class Gateway:
    """An app over a scripted engine, its spans and its series."""

    def __init__(
        self,
        engine: ScriptedEngine,
        limits: HttpLimits = HttpLimits(),
        gate: Gate = OPEN_GATE,
        cors_origins: Sequence[str] = (),
    ) -> None:
        self.engine = engine
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.registry = CollectorRegistry()
        self.app: ASGIApp = make_app(
            engine,
            limits,
            tracer=provider.get_tracer("test"),
            registry=self.registry,
            clock=lambda: float(CREATED),
            gate=gate,
            cors_origins=cors_origins,
        )

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.app, raise_app_exceptions=True), base_url="http://gateway"
        )

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client() as client:
            return await client.post(path, content=content, headers=headers or {})

    def observed(self) -> dict[tuple[str, str], float]:
        return {
            (sample.labels["route"], sample.labels["status"]): sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == "tercet_http_requests_total" and sample.value
        }


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def chat_body(**extra: Any) -> dict[str, Any]:
    return {"model": "toy", "messages": [{"role": "user", "content": "hi"}], **extra}


def prompt_body(**extra: Any) -> dict[str, Any]:
    return {"model": "toy", "prompt": "hi", **extra}


def sse(text: str) -> list[Any]:
    """The data of each event; "[DONE]" stays text."""
    assert text.endswith("\n\n")
    lines = [block.removeprefix("data: ") for block in text.split("\n\n")[:-1]]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
