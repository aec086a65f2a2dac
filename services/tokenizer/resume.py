"""Going on with an answer that another edge began: what of it the caller has already.

Pure. The new edge takes in the ids that were delivered, which brings detokenizer and stop matcher to where the old
ones were, or a little behind: text held back here may have been let through there, because more was known. So what
comes out is cut by count: characters and ids that the caller has are dropped, the rest is delivered.
"""

from collections.abc import Iterable, Iterator

from services.errors import InvalidArgument
from tercet.v1 import common_pb2, tokenizer_pb2

Request = tokenizer_pb2.TokenizerServiceGenerateRequest


def check_resume(request: Request) -> None:
    """Raises InvalidArgument. Seed, attempt and numerics are the scheduler's to check."""
    resume = request.resume
    if not resume.prompt_ids:
        raise InvalidArgument("resume.prompt_ids is empty; Accepted told them", field="resume.prompt_ids", limit=1)
    given = request.WhichOneof("prompt")
    if given is not None and not (given == "token_ids" and request.token_ids.ids == resume.prompt_ids):
        raise InvalidArgument(
            "a resumed request takes its prompt from resume.prompt_ids; token_ids may only repeat them", field="prompt"
        )


class Rest:
    """What is left of deltas after the first `characters` characters and the first `ids` ids."""

    def __init__(self, characters: int = 0, ids: int = 0) -> None:
        self._characters = characters
        self._ids = ids

    def of(self, deltas: Iterable[tokenizer_pb2.TextDelta]) -> Iterator[tokenizer_pb2.TextDelta]:
        for delta in deltas:
            if not self._characters and not self._ids:
                yield delta
                continue
            text = delta.text[self._characters :]
            self._characters -= len(delta.text) - len(text)
            skipped = min(self._ids, len(delta.token_ids))
            self._ids -= skipped
            if text or skipped < len(delta.token_ids):
                yield tokenizer_pb2.TextDelta(
                    index=delta.index,
                    text=text,
                    token_ids=delta.token_ids[skipped:],
                    logprobs=delta.logprobs[skipped:],
                )


def unknown_logprobs(ids: int, asked_for: bool) -> list[common_pb2.TokenLogprobs]:
    """Stand-ins for the logprobs of ids that were delivered with theirs; they are dropped with the ids."""
    return [common_pb2.TokenLogprobs() for _ in range(ids if asked_for else 0)]
