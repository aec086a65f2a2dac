"""The message that goes on with an answer at another server. Pure. The gateway uses it too."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tercet.v1 import common_pb2, tokenizer_pb2


class Told(Protocol):
    """What is needed of Accepted."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    @property
    def numerics(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Came:
    """What came of one answer. characters: of its text, an echo of the prompt among them."""

    output_ids: Sequence[int]
    characters: int
    finished: bool


def so_far(accepted: Told, answers: Sequence[Came]) -> common_pb2.Resume | None:
    """What another server needs to go on; None where the first one did not tell the prompt's ids and the numerics, or
    where all answers have ended."""
    if not accepted.prompt_ids or not accepted.numerics or all(answer.finished for answer in answers):
        return None
    first, *others = answers
    return common_pb2.Resume(
        prompt_ids=accepted.prompt_ids,
        output_ids=first.output_ids,
        chars_delivered=first.characters,
        numerics=accepted.numerics,
        finished=first.finished,
        others=[
            common_pb2.ResumedAnswer(
                output_ids=answer.output_ids, chars_delivered=answer.characters, finished=answer.finished
            )
            for answer in others
        ],
    )


def resumed(
    message: tokenizer_pb2.TokenizerServiceGenerateRequest, attempt: int, seed: int, delivered: common_pb2.Resume
) -> tokenizer_pb2.TokenizerServiceGenerateRequest:
    """The same request, to go on behind what was delivered. The prompt travels as the ids that were made of it."""
    again = tokenizer_pb2.TokenizerServiceGenerateRequest()
    again.CopyFrom(message)
    again.context.attempt = attempt
    again.ClearField("text")
    again.ClearField("chat")
    again.ClearField("token_ids")
    again.sampling.seed = seed
    if again.sampling.HasField("n"):
        again.sampling.n = 1 + len(delivered.others)  # fewer than asked for, where that is what Accepted told
    again.resume.CopyFrom(delivered)
    return again
