"""Events to the chunks of one streamed reply, in order.

Pure. Owns what is sent when: an answer's first chunk carries the role, each token's delta is a chunk of its own,
the end is a chunk with the finish reason, and usage comes where and as often as asked for.
"""

import json
from collections.abc import Mapping
from typing import Final

from services.gateway import replies, shapes
from services.gateway.openai import Generation
from services.gateway.transcript import Event, Transcript
from tercet.v1 import tokenizer_pb2

DONE: Final = b"data: [DONE]\n\n"


class ChunkMaker:
    """Chunks of one reply. created: seconds since 1970."""

    def __init__(
        self, style: replies.Style, generation: Generation, transcript: Transcript, request_id: str, created: int
    ) -> None:
        self._style = style
        self._generation = generation
        self._transcript = transcript
        self._request_id = request_id
        self._created = created
        self._opened: set[int] = set()

    def chunk(self, event: Event) -> shapes.Reply | None:
        """The chunk of an event that the transcript has just taken; None for what has nothing to show."""
        frame = replies.frame_of(self._transcript, self._request_id, self._created)
        if isinstance(event, tokenizer_pb2.TextDelta):
            opens_echo = self._generation.echo and event.index not in self._opened  # the prompt's logprobs ride with it
            if not (event.text or event.token_ids or opens_echo):
                return None
            reply = replies.delta_chunk(
                self._style,
                frame,
                self._transcript,
                event,
                first=self._opens(event.index),
                logprobs=self._generation.logprobs,
                echo=self._generation.echo,
            )
        elif isinstance(event, tokenizer_pb2.Finished):
            reply = replies.end_chunk(self._style, frame, self._transcript, event, first=self._opens(event.index))
        else:
            return None
        if self._generation.continuous_usage:
            reply["usage"] = replies.running_usage(self._transcript)
        elif self._generation.include_usage:
            reply["usage"] = None
        return reply

    def last(self) -> shapes.Reply | None:
        """The chunk with the whole usage, for a caller who asked for it."""
        if not self._generation.include_usage:
            return None
        frame = replies.frame_of(self._transcript, self._request_id, self._created)
        return replies.usage_chunk(self._style, frame, self._transcript)

    def _opens(self, index: int) -> bool:
        first = index not in self._opened
        self._opened.add(index)
        return first


def to_json(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def to_event(value: Mapping[str, object]) -> bytes:
    """One server-sent event. JSON holds no line break, so one data line is enough."""
    return b"data: " + to_json(value) + b"\n\n"
