"""Chats to prompts, by the model's own template, in processes that may be killed.

Owns what a chat is to the worker, and what its failures are called. A request never brings a template: the one that
the workers have comes with the model. Invariant: whatever the template does, nothing here takes longer than the limits
say, and the next chat is served.
"""

from typing import Final

from services.errors import ResourceExhausted
from services.tokenizer.invalid import InvalidField, TemplateFailure
from services.tokenizer.template_worker import chat_message, read_rendered, template_message
from services.tokenizer.templates import ChatTemplate, RenderedChat
from services.tokenizer.workers import (
    WorkerDied,
    WorkerLimits,
    WorkerNotStarted,
    Workers,
    WorkersBusy,
    WorkerTooSlow,
    module,
)
from tercet.v1 import tokenizer_pb2

COMMAND: Final = module("services.tokenizer.template_worker")
# Two, so that the others have one while one is being killed and started again.
LIMITS: Final = WorkerLimits(answer_s=5.0, processes=2, warm=2, waiting=256)
_FIELD: Final = "tokenizer.chat_template"


class Renderer:
    """One event loop's; `close` it."""

    def __init__(
        self, template: ChatTemplate, limits: WorkerLimits = LIMITS, command: tuple[str, ...] = COMMAND
    ) -> None:
        self._limits = limits
        self.workers = Workers(command, lambda: template_message(template), limits)

    def warm(self) -> None:
        """Starts the workers; returns at once."""
        self.workers.warm()

    async def close(self) -> None:
        """Ends the workers."""
        await self.workers.close()

    async def sample(self) -> str | None:
        """What it writes for one short message; None where it takes no such chat. Raises ResourceExhausted."""
        message = tokenizer_pb2.ChatMessage(role="user", content="x")
        try:
            return (await self.render(tokenizer_pb2.ChatPrompt(messages=[message]))).text
        except InvalidField:
            return None

    async def render(self, chat: tokenizer_pb2.ChatPrompt) -> RenderedChat:
        """Raises InvalidText, TemplateFailure, ResourceExhausted."""
        asked = chat_message(
            [_texts(message) for message in chat.messages],
            chat.tools_json,
            add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
        )
        try:
            answer = await self.workers.ask(asked)
        except WorkerTooSlow:
            raise TemplateFailure(_FIELD, f"takes longer than {self._limits.answer_s:g} s") from None
        except WorkerDied:
            raise TemplateFailure(_FIELD, "ended the process that it ran in") from None
        except WorkersBusy:
            raise ResourceExhausted(
                f"{self._limits.waiting} chats wait for the chat template here",
                reason="TEMPLATES_BUSY",
                field="chat",
                limit=self._limits.waiting,
                retry_after_s=1.0,
            ) from None
        except WorkerNotStarted as error:
            raise ResourceExhausted(
                "the process that runs the chat template does not start", reason="NO_TEMPLATE_WORKER", field="chat"
            ) from error
        return read_rendered(answer)


def _texts(message: tokenizer_pb2.ChatMessage) -> tuple[str | None, ...]:
    return (
        message.role,
        message.content,
        message.name if message.HasField("name") else None,
        message.tool_call_id if message.HasField("tool_call_id") else None,
        message.tool_calls_json if message.HasField("tool_calls_json") else None,
    )
