"""A request's prompt, in whatever form it came, to token ids.

Owns the form and the size check, and the rule that long work leaves the event loop. A request's own text never becomes
a control token (see `text` and `templates`).
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from opentelemetry.context import Context
from opentelemetry.trace import Tracer

from services import names
from services.errors import FailedPrecondition, InvalidArgument
from services.tokenizer.invalid import InvalidText, TemplateFailure
from services.tokenizer.renderer import Renderer
from services.tokenizer.templates import RenderedChat
from services.tokenizer.text import TextModel
from tercet.v1 import tokenizer_pb2

INLINE_CHARS: Final = 1024  # about as long as handing it to a thread and back takes under load
LONG_CHARS: Final = 64 * 1024

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class PromptLimits:
    max_bytes: int


class Prompts:
    def __init__(self, model: TextModel, chats: Renderer | None, limits: PromptLimits, tracer: Tracer) -> None:
        """chats: None where the model has no chat template."""
        self._model = model
        self._chats = chats
        self._limits = limits
        self._tracer = tracer
        # Long prompts leave threads and a core to the others.
        self._long = asyncio.Semaphore(max(1, (os.cpu_count() or 1) - 1))

    async def encode(self, request: tokenizer_pb2.TokenizerServiceGenerateRequest, parent: Context) -> list[int]:
        """Raises InvalidArgument naming the field and the limit."""
        span = self._tracer.start_span(names.SPAN_TOKENIZE, context=parent)
        try:
            match request.WhichOneof("prompt"):
                case "text":
                    span.set_attribute(names.TEXT_CHARACTERS, len(request.text))
                    ids = await self.encode_text(request.text, add_special=True)
                case "chat":
                    rendered, ids = await self.encode_chat(request.chat)
                    span.set_attribute(names.TEXT_CHARACTERS, len(rendered.text))
                case "token_ids":
                    self._check_size("token_ids", request.token_ids.ByteSize())
                    ids = list(request.token_ids.ids)
                case _:
                    raise InvalidArgument("one of text, chat and token_ids must be given", field="prompt")
            span.set_attribute(names.PROMPT_TOKENS, len(ids))
            return ids
        finally:
            span.end()

    async def encode_text(self, text: str, *, add_special: bool) -> list[int]:
        self._check_size("text", len(text.encode("utf-8", "surrogatepass")))
        return await self._off_loop(len(text), lambda: self._model.encode(text, add_special=add_special))

    async def encode_chat(self, chat: tokenizer_pb2.ChatPrompt) -> tuple[RenderedChat, list[int]]:
        if self._chats is None:
            raise FailedPrecondition("this model has no chat template; send text", reason="NO_CHAT_TEMPLATE")
        self._check_size("chat", chat.ByteSize())
        try:
            rendered = await self._chats.render(chat)
        except InvalidText as error:
            raise InvalidArgument(str(error), field=error.field) from error
        except TemplateFailure as error:
            raise InvalidArgument(str(error), reason="TEMPLATE_FAILED", field=error.field) from error
        segments = rendered.segments
        ids = await self._off_loop(len(rendered.text), lambda: self._model.encode_segments(segments, add_special=True))
        return rendered, ids

    async def decode(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        """The text of ids, as `TextModel.decode`. Raises InvalidArgument naming the field and the limit."""
        self._check_size("token_ids", len(token_ids))
        try:
            return await self._off_loop(
                len(token_ids), lambda: self._model.decode(token_ids, skip_special=skip_special)
            )
        except InvalidArgument as error:
            raise InvalidArgument(error.message, field=error.field, limit=self._model.vocab_size - 1) from error

    def _check_size(self, field: str, size: int) -> None:
        if size > self._limits.max_bytes:
            raise InvalidArgument(
                f"{field} has {size} bytes; the limit is {self._limits.max_bytes}",
                field=field,
                limit=self._limits.max_bytes,
            )

    async def _off_loop(self, size: int, work: Callable[[], Result]) -> Result:
        try:
            if size <= INLINE_CHARS:
                return work()
            if size <= LONG_CHARS:
                return await asyncio.to_thread(work)
            async with self._long:
                return await asyncio.to_thread(work)
        except InvalidText as error:
            raise InvalidArgument(str(error), field=error.field) from error
