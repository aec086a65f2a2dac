"""A small OpenAI-like server for tests of clients, with faults on demand. One word is one token."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Play:
    """How one answer goes.

    status: other than 200 answers an error. per_message: tokens of each. counts: usage with each message. usage: at the
    end. cut_after: messages after which the connection is dropped. held: the first token waits for it. finish: the
    reason; None leaves it out. tokens: of the answer; None: what was asked for. junk: one event is no JSON. error: one
    event says so. prompt_error: added to the count of the prompt."""

    status: int = 200
    per_message: int = 1
    counts: bool = False
    usage: bool = True
    cut_after: int | None = None
    held: asyncio.Event | None = None
    finish: str | None = "length"
    tokens: int | None = None
    junk: bool = False
    error: str | None = None
    prompt_error: int = 0


@dataclass
class OpenAiServer:
    """url: its base. bodies: of the generating requests. owner: what it says of its models."""

    url: str = ""
    owner: str = "somebody"
    play: Callable[[int], Play] = lambda number: Play()
    tokenize: bool = False
    word_tokens: Callable[[str], int] = lambda word: 1
    bodies: list[dict[str, Any]] = field(default_factory=list)
    tokenized: int = 0
    headers: list[str] = field(default_factory=list)

    def count(self, text: str) -> int:
        return sum(self.word_tokens(word) for word in text.split())

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("Content-Length:")), 0)
            body = json.loads(await reader.readexactly(length)) if length else {}
            self.headers.append(head)
            await self._answer(head.split(" ")[1], body, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            return _whole(writer, 200, {"data": [{"id": "toy", "owned_by": self.owner, "max_model_len": 4096}]})
        if path == "/tokenize" and self.tokenize:
            self.tokenized += 1
            text = body.get("prompt") or body.get("content")
            return _whole(writer, 200, {"tokens": list(range(self.count(text)))})
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return _whole(writer, 404, {"error": {"message": f"nothing at {path}"}})
        text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        prompt = self.count(text) + (0 if "prompt" in body else 3)
        if not body["stream"]:
            return _whole(writer, 200, {"usage": {"prompt_tokens": prompt, "completion_tokens": 1}, "choices": []})
        self.bodies.append(body)
        await self._stream(self.play(len(self.bodies) - 1), prompt, body, writer)

    async def _stream(self, play: Play, prompt: int, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if play.status != 200:
            return _whole(writer, play.status, {"error": {"message": "as the script says"}})
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if play.held is not None:
            await play.held.wait()
        chat = "messages" in body

        def usage(done: int) -> dict[str, int]:
            return {"prompt_tokens": prompt + play.prompt_error, "completion_tokens": done}

        def choice(text: str, finish: str | None) -> dict[str, Any]:
            return {**({"delta": {"content": text}} if chat else {"text": text}), "finish_reason": finish}

        total, done, messages = body["max_tokens"] if play.tokens is None else play.tokens, 0, 0
        if chat:
            _event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        while done < total:
            if messages == play.cut_after:
                await writer.drain()
                return writer.transport.abort()
            carried = min(play.per_message, total - done)
            done += carried
            messages += 1
            chunk: dict[str, Any] = {"choices": [choice(" word" * carried, None)], "usage": None}
            if play.counts:
                chunk["usage"] = usage(done)
            _event(writer, chunk)
        if play.junk:
            _chunk(writer, b"data: {no json\n\n")
        if play.error is not None:
            _event(writer, {"error": {"message": play.error}})
        if play.finish is not None:
            _event(writer, {"choices": [choice("", play.finish)]})
        if play.usage:
            _event(writer, {"choices": [], "usage": usage(done)})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def _whole(writer: asyncio.StreamWriter, status: int, body: object) -> None:
    content = json.dumps(body).encode()
    writer.write(b"HTTP/1.1 %d Word\r\nContent-Length: %d\r\n\r\n" % (status, len(content)) + content)


def _event(writer: asyncio.StreamWriter, value: object) -> None:
    _chunk(writer, b"data: " + json.dumps(value).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


@asynccontextmanager
async def openai_server(**options: Any) -> AsyncIterator[OpenAiServer]:
    made = OpenAiServer(**options)
    server = await asyncio.start_server(made.handle, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
        await server.wait_closed()
