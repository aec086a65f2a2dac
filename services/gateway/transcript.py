"""What an engine said so far about one request, checked: the state behind every reply.

Pure. Owns the protocol of events: Accepted first, deltas only of open answers, one Finished each, nothing missing
at the end. A stream that breaks it is a defect of the engine (Internal), never a success cut short.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from services.errors import Internal
from services.gateway.shapes import FinishReason
from tercet.v1 import common_pb2, tokenizer_pb2

FINISH_REASONS: Final[Mapping[int, FinishReason]] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_TIME_LIMIT: "time_limit",
}

Event = tokenizer_pb2.Accepted | tokenizer_pb2.TextPromptLogprobs | tokenizer_pb2.TextDelta | tokenizer_pb2.Finished


@dataclass(slots=True)
class Answer:
    """One of the n answers."""

    pieces: list[str] = field(default_factory=list)
    deltas: int = 0
    characters: int = 0
    tokens: int = 0
    logprobs: list[tokenizer_pb2.TextLogprobs] = field(default_factory=list)
    finished: tokenizer_pb2.Finished | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Transcript:
    """Events in, answers out. keep_text: False where deltas are passed on and need not be held. prompt_only: of each
    answer only the first delta is wanted, which is the echo of the prompt; the others lose their content here."""

    def __init__(self, choices: int, *, keep_text: bool, prompt_only: bool = False) -> None:
        self.answers = [Answer() for _ in range(choices)]
        self.accepted: tokenizer_pb2.Accepted | None = None
        self.prompt_first: tokenizer_pb2.TextLogprob | None = None  # the prompt's first token
        self.prompt_logprobs: list[tokenizer_pb2.TextLogprobs] = []  # from its second token on
        self.prompt_only = prompt_only
        self._keep_text = keep_text

    def apply(self, response: tokenizer_pb2.TokenizerServiceGenerateResponse) -> Event:
        """The event in `response`, after it was added. Raises Internal when it breaks the protocol."""
        match response.WhichOneof("event"):
            case "accepted":
                if self.accepted is not None:
                    raise _broken("Accepted came twice")
                self.accepted = response.accepted
                if response.accepted.n:
                    del self.answers[response.accepted.n :]  # the scheduler takes away what it can't afford
                return response.accepted
            case "prompt_logprobs":
                if self.streamed_tokens:
                    raise _broken("logprobs of the prompt came behind an answer's token")
                if response.prompt_logprobs.HasField("first"):
                    self.prompt_first = response.prompt_logprobs.first
                self.prompt_logprobs.extend(response.prompt_logprobs.logprobs)
                return response.prompt_logprobs
            case "delta":
                self._add(response.delta)
                return response.delta
            case "finished":
                answer = self._open_answer(response.finished.index)
                if response.finished.reason not in FINISH_REASONS:
                    raise _broken(f"Finished with reason {response.finished.reason}")
                answer.finished = response.finished
                return response.finished
        raise _broken("an event without content")

    def check_complete(self) -> None:
        """Raises Internal unless every answer is finished."""
        missing = sum(answer.finished is None for answer in self.answers)
        if missing:
            raise _broken(f"the stream ended with {missing} of {len(self.answers)} answers unfinished")

    @property
    def prompt_tokens(self) -> int:
        return self.accepted.prompt_tokens if self.accepted is not None else 0

    @property
    def streamed_tokens(self) -> int:
        """Output tokens in the deltas so far, of all answers."""
        return sum(answer.tokens for answer in self.answers)

    def _add(self, delta: tokenizer_pb2.TextDelta) -> None:
        answer = self._open_answer(delta.index)
        if self.prompt_only and answer.deltas:
            delta.ClearField("text")
            delta.ClearField("token_ids")
            delta.ClearField("logprobs")
        answer.deltas += 1
        answer.characters += len(delta.text)
        answer.tokens += len(delta.token_ids)
        if self._keep_text:
            answer.pieces.append(delta.text)
            answer.logprobs.extend(delta.logprobs)

    def _open_answer(self, index: int) -> Answer:
        if self.accepted is None:
            raise _broken("an answer came before Accepted")
        if index >= len(self.answers):
            raise _broken(f"answer {index} of {len(self.answers)}")
        if self.answers[index].finished is not None:
            raise _broken(f"answer {index} went on after its end")
        return self.answers[index]


def _broken(what: str) -> Internal:
    return Internal(f"the engine's stream is broken: {what}", reason="BROKEN_STREAM")
