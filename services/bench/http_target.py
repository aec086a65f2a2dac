"""An OpenAI-compatible server over HTTP, streaming.

Owns what differs between servers: one table. A server is recognised by what it says of its models.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from services.bench.http1 import EventReader, ProtocolError
from services.bench.http_client import Site, request
from services.bench.record import Failure, Piece, Reply, reply_of
from services.bench.target import Drawing, ServerFacts, TargetError

ASIDE_S: Final = 120.0  # for what is not measured


@dataclass(frozen=True, slots=True)
class Dialect:
    """owner: what `owned_by` of its models says. extra: added to every request. counts_each: with `stream_options` it
    tells the tokens so far with each message. tokenizes: the field that `/tokenize` takes a text in; None: a probe
    tells. exact: `extra` makes it give as many tokens as are asked for."""

    owner: str | None
    extra: Mapping[str, object] = field(default_factory=dict)
    counts_each: bool = False
    tokenizes: str | None = None
    exact: bool = False


_ENDLESS: Final = {"ignore_eos": True}
DIALECTS: Final[Mapping[str, Dialect]] = {
    "tercet": Dialect("tercet", _ENDLESS, counts_each=True, exact=True),
    "vllm": Dialect("vllm", _ENDLESS, counts_each=True, tokenizes="prompt", exact=True),
    "llama": Dialect("llamacpp", _ENDLESS, tokenizes="content", exact=True),
    "openai": Dialect(None),
}
STATUS_FAILURES: Final = {
    408: Failure.TIMEOUT,
    504: Failure.TIMEOUT,
    429: Failure.REFUSED,
    502: Failure.REFUSED,
    503: Failure.REFUSED,
}


class HttpTarget:
    """model: None takes the server's first. server: a name of DIALECTS; None: found out. extra: more fields of every
    request. chat: /v1/chat/completions instead of /v1/completions."""

    def __init__(
        self,
        site: Site,
        drawing: Drawing,
        *,
        model: str | None = None,
        server: str | None = None,
        extra: Mapping[str, object] | None = None,
        chat: bool = False,
    ) -> None:
        self._site = site
        self._drawing = drawing
        self._model = model
        self._server = server
        self._extra = extra or {}
        self._chat = chat
        self._path = "/v1/chat/completions" if chat else "/v1/completions"

    async def describe(self) -> ServerFacts:
        if self._model is None or self._server is None:
            listed = (await self._json("/v1/models")).get("data")
            first = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], dict) else {}
            if not first and self._model is None:
                raise TargetError(f"{self._site.authority} lists no models; name one by --model")
            self._model = self._model or str(first.get("id"))
            owner = first.get("owned_by")
            self._server = self._server or next(
                (name for name, dialect in DIALECTS.items() if dialect.owner == owner and owner is not None), "openai"
            )
            length = first.get("max_model_len")
            longest = length if isinstance(length, int) else None
        else:
            longest = None
        return ServerFacts(self._server, self._model, longest, self._dialect.exact or "ignore_eos" in self._extra)

    async def count(self, text: str) -> int:
        named = self._dialect.tokenizes
        if named is not None and not self._chat:
            body = {named: text, "add_special": True, "add_special_tokens": True, "model": self._model}
            tokens = (await self._json("/tokenize", body)).get("tokens")
            if isinstance(tokens, list):
                return len(tokens)
        usage = (await self._json(self._path, {**self._body(text, 1), "stream": False, "stream_options": None})).get(
            "usage"
        )
        found = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if not isinstance(found, int):
            raise TargetError(f"{self._site.authority} doesn't tell how many tokens a prompt has")
        return found

    async def ask(self, text: str, output: int, timeout_s: float) -> Reply:
        stream = _Stream()
        try:
            async with asyncio.timeout(timeout_s):
                response = await request(self._site, self._path, self._body(text, output), stream.take)
        except TimeoutError:
            return stream.reply(Failure.TIMEOUT, f"no end within {timeout_s:g} s")
        except OSError as error:
            return stream.reply(Failure.REFUSED, str(error))
        except (ProtocolError, ValueError) as error:
            return stream.reply(stream.broken, str(error))
        if not 200 <= response.status < 300:
            failure = STATUS_FAILURES.get(response.status) or (
                Failure.INVALID if 400 <= response.status < 500 else stream.broken
            )
            return stream.reply(failure, f"HTTP {response.status}: {_message_of(response.body)}")
        return stream.settled()

    async def close(self) -> None:
        """Nothing is kept open."""

    @property
    def _dialect(self) -> Dialect:
        return DIALECTS[self._server or "openai"]

    def _body(self, text: str, output: int) -> dict[str, object]:
        prompt: dict[str, object] = (
            {"messages": [{"role": "user", "content": text}]} if self._chat else {"prompt": text}
        )
        options = {"include_usage": True, **({"continuous_usage_stats": True} if self._dialect.counts_each else {})}
        return {
            "model": self._model,
            **prompt,
            "max_tokens": output,
            "temperature": self._drawing.temperature,
            "seed": self._drawing.seed,
            "stream": True,
            "stream_options": options,
            **self._dialect.extra,
            **self._extra,
        }

    async def _json(self, path: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
        given = None if body is None else {name: value for name, value in body.items() if value is not None}
        try:
            async with asyncio.timeout(ASIDE_S):
                response = await request(self._site, path, given)
            found = json.loads(response.body) if response.status == 200 else None
        except TimeoutError as error:
            raise TargetError(f"{self._site.authority}{path} gave no answer within {ASIDE_S:g} s") from error
        except (OSError, ProtocolError, ValueError) as error:
            raise TargetError(f"{self._site.authority}{path}: {error}") from error
        if not isinstance(found, dict):
            raise TargetError(f"{self._site.authority}{path}: HTTP {response.status}: {_message_of(response.body)}")
        return found


class _Stream:
    """One answer as it comes."""

    def __init__(self) -> None:
        self._events = EventReader()
        self._pieces: list[Piece] = []
        self._usage: dict[str, Any] = {}
        self._finish: str | None = None
        self._error: str | None = None

    def take(self, data: bytes, now: int) -> None:
        """Raises ValueError where an event is no JSON object."""
        for event in self._events.feed(data):
            if event == b"[DONE]":
                continue
            try:
                self._take_chunk(json.loads(event), now)
            except (ValueError, TypeError, AttributeError, LookupError) as error:
                raise ProtocolError(f"an event is no chunk of an answer: {event[:80]!r}") from error

    def settled(self) -> Reply:
        """What came, judged by how it ended."""
        if self._error is not None:
            return self.reply(self.broken, self._error)
        if self._finish is None:
            return self.reply(Failure.CUT, "the stream ended without a finish reason")
        if self._finish not in ("stop", "length"):
            kind = Failure.TIMEOUT if self._finish == "time_limit" else Failure.FAILED
            return self.reply(kind, f"finish reason {self._finish}")
        return self.reply(None, "")

    @property
    def broken(self) -> Failure:
        """What an error is called: before the first token the request failed, later its stream was cut."""
        return Failure.CUT if self._pieces else Failure.FAILED

    def reply(self, failure: Failure | None, detail: str) -> Reply:
        found = reply_of(
            self._pieces,
            time.perf_counter_ns(),
            self._usage.get("prompt_tokens"),
            self._usage.get("completion_tokens"),
        )
        if failure is None and not found.arrivals:
            failure, detail = Failure.WRONG_COUNT, "no token came"
        return Reply(
            found.ended_ns,
            found.arrivals,
            found.tokens,
            found.prompt_tokens,
            found.output_tokens,
            failure,
            detail[:200],
        )

    def _take_chunk(self, chunk: dict[str, Any], now: int) -> None:
        if "error" in chunk:
            self._error = str(chunk["error"])
            return
        usage = chunk.get("usage")
        if usage:
            self._usage = usage
        choices = chunk.get("choices")
        if not choices:
            return
        choice = choices[0]
        delta = choice.get("delta")
        text = choice.get("text") if delta is None else delta.get("content") or delta.get("reasoning_content")
        counted = usage["completion_tokens"] if usage else None
        if text or counted:
            self._pieces.append(Piece(now, bool(text), counted))
        self._finish = choice.get("finish_reason") or self._finish


def _message_of(body: bytes) -> str:
    """The message of an error in OpenAI's form, or the beginning of what came."""
    try:
        found = json.loads(body)
        message = found["error"]["message"]
    except (ValueError, TypeError, LookupError):
        message = body[:200].decode(errors="replace")
    return str(message)
