"""Our own API over gRPC. Without the SDK: its retries and resumed streams would hide what is to be counted."""

import asyncio
import time
from typing import TYPE_CHECKING, Final

import grpc

from services.bench.record import Failure, Reply
from services.bench.target import Drawing, ServerFacts, TargetError
from services.rpc import make_channel
from tercet.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc

if TYPE_CHECKING:
    from tercet.v1.tokenizer_pb2_grpc import TokenizerServiceAsyncStub

ASIDE_S: Final = 120.0
MARGIN_S: Final = 1.0  # the server's own limit ends a request first, if it still can
FAILURES: Final = {
    grpc.StatusCode.DEADLINE_EXCEEDED: Failure.TIMEOUT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Failure.REFUSED,
    grpc.StatusCode.INVALID_ARGUMENT: Failure.INVALID,
    grpc.StatusCode.UNIMPLEMENTED: Failure.INVALID,
    grpc.StatusCode.NOT_FOUND: Failure.INVALID,
    grpc.StatusCode.UNAUTHENTICATED: Failure.INVALID,
    grpc.StatusCode.PERMISSION_DENIED: Failure.INVALID,
}


class GrpcTarget:
    """target: host:port or unix:/path. key: a bearer token. chat: the prompt is a user's message."""

    def __init__(self, target: str, drawing: Drawing, *, key: str | None = None, chat: bool = False) -> None:
        self._target = target
        self._drawing = drawing
        self._chat = chat
        self._channel = make_channel(target)
        self._stub: TokenizerServiceAsyncStub = tokenizer_pb2_grpc.TokenizerServiceStub(self._channel)
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)

    async def describe(self) -> ServerFacts:
        asked = tokenizer_pb2.TokenizerServiceDescribeRequest()
        try:
            told = await self._stub.Describe(asked, timeout=ASIDE_S, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._unusable(error) from error
        return ServerFacts("tercet", told.model.name, told.model.max_model_len or None, exact=True)

    async def count(self, text: str) -> int:
        try:
            if self._chat:
                rendered = tokenizer_pb2.TokenizerServiceRenderChatRequest(chat=_chat(text))
                return len((await self._stub.RenderChat(rendered, timeout=ASIDE_S, metadata=self._metadata)).token_ids)
            asked = tokenizer_pb2.TokenizerServiceTokenizeRequest(text=text, add_special_tokens=True)
            return len((await self._stub.Tokenize(asked, timeout=ASIDE_S, metadata=self._metadata)).token_ids)
        except grpc.RpcError as error:
            raise self._unusable(error) from error

    async def ask(self, text: str, output: int, timeout_s: float) -> Reply:
        sampling = common_pb2.SamplingParams(
            temperature=self._drawing.temperature, seed=self._drawing.seed, max_tokens=output, ignore_eos=True
        )
        message = tokenizer_pb2.TokenizerServiceGenerateRequest(sampling=sampling)
        if self._chat:
            message.chat.CopyFrom(_chat(text))
        else:
            message.text = text
        arrivals: list[int] = []
        tokens: list[int] = []
        usage: common_pb2.Usage | None = None
        failure: Failure | None = Failure.CUT
        detail = "the stream ended without its end"
        call = self._stub.Generate(message, timeout=timeout_s + MARGIN_S, metadata=self._metadata)
        try:
            async with asyncio.timeout(timeout_s):
                async for event in call:
                    now = time.perf_counter_ns()
                    count = len(event.delta.token_ids)
                    if count:
                        arrivals.append(now)
                        tokens.append(count)
                    elif event.HasField("finished"):
                        usage = event.finished.usage
                        late = event.finished.reason == common_pb2.FINISH_REASON_TIME_LIMIT
                        failure, detail = (Failure.TIMEOUT, "a time limit of the server's") if late else (None, "")
        except TimeoutError:
            failure, detail = Failure.TIMEOUT, f"no end within {timeout_s:g} s"
        except grpc.RpcError as error:
            failure, detail = _failure_of(error, begun=bool(arrivals))
        finally:
            call.cancel()
        ended = time.perf_counter_ns()
        prompt, delivered = (None, None) if usage is None else (usage.prompt_tokens, usage.delivered_tokens)
        return Reply(ended, tuple(arrivals), tuple(tokens), prompt, delivered, failure, detail[:200])

    async def close(self) -> None:
        await self._channel.close()

    def _unusable(self, error: grpc.RpcError) -> TargetError:
        assert isinstance(error, grpc.aio.AioRpcError)  # of an aio channel
        return TargetError(f"{self._target}: {error.code().name}: {error.details()}")


def _failure_of(error: grpc.RpcError, *, begun: bool) -> tuple[Failure, str]:
    assert isinstance(error, grpc.aio.AioRpcError)  # of an aio channel
    detail = f"{error.code().name}: {error.details()}"
    if error.code() in FAILURES:
        return FAILURES[error.code()], detail
    if begun:
        return Failure.CUT, detail
    return (Failure.REFUSED if error.code() is grpc.StatusCode.UNAVAILABLE else Failure.FAILED), detail


def _chat(text: str) -> tokenizer_pb2.ChatPrompt:
    return tokenizer_pb2.ChatPrompt(messages=[tokenizer_pb2.ChatMessage(role="user", content=text)])
