"""The message that goes on with an answer at another server. Pure. The gateway uses it too."""

from collections.abc import Sequence
from typing import Protocol

from tercet.v1 import common_pb2, tokenizer_pb2


class Told(Protocol):
    """What is needed of Accepted."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    @property
    def numerics(self) -> str: ...


def so_far(accepted: Told, output_ids: Sequence[int], characters: int) -> common_pb2.Resume | None:
    """What another server needs to go on; None where the first one did not tell the prompt's ids and the numerics."""
    if not accepted.prompt_ids or not accepted.numerics:
        return None
    return common_pb2.Resume(
        prompt_ids=accepted.prompt_ids,
        output_ids=output_ids,
        chars_delivered=characters,
        numerics=accepted.numerics,
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
    again.resume.CopyFrom(delivered)
    return again
