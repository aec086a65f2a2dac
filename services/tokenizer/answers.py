"""All answers of a request on their way out: each with its own text, stop strings and place, and what comes before
them of the prompt.

Owns the order that a caller sees: logprobs of the prompt, then of each answer the prompt's text where it is echoed, its
deltas, its end. Pure. Invariant: what a caller has already (it was resumed here, or a scheduler was lost) does not come
a second time.
"""

from collections.abc import Iterator, Sequence

from services.errors import InvalidArgument
from services.tokenizer.answer import Answer, with_text
from services.tokenizer.resume import Rest, unknown_logprobs
from services.tokenizer.text import TextModel
from services.wire_sampling import answers_from_proto
from tercet.v1 import common_pb2, scheduler_pb2, tokenizer_pb2

Request = tokenizer_pb2.TokenizerServiceGenerateRequest
TextDelta = tokenizer_pb2.TextDelta
TextPromptLogprobs = tokenizer_pb2.TextPromptLogprobs


class _Outgoing:
    """One answer, and what of it is told already."""

    def __init__(self, answer: Answer, begun: common_pb2.Resume | common_pb2.ResumedAnswer) -> None:
        self.answer = answer
        self.begun = begun
        self.rest = Rest(begun.chars_delivered, len(begun.output_ids))
        self.opened = False  # its echo is told
        self.ended = begun.finished


class Answers:
    """first: made of the request's rules, see `Answer`; the others are made like it.

    Raises InvalidArgument where n or the resume is none that a scheduler would take.
    """

    def __init__(self, model: TextModel, request: Request, first: Answer) -> None:
        n, resume = answers_from_proto(request.sampling), request.resume
        resumed = request.HasField("resume")
        if resumed and len(resume.others) != n - 1:
            raise InvalidArgument(
                f"resume.others has {len(resume.others)} answers; with sampling.n {n} it must have {n - 1}",
                field="resume.others",
                limit=n - 1,
            )
        begun: list[common_pb2.Resume | common_pb2.ResumedAnswer]
        begun = [resume, *resume.others] if resumed else [common_pb2.Resume()] * n
        each = [first, *(first.sibling(index) for index in range(1, n))]
        self._model = model
        self._outgoing = [_Outgoing(answer, one) for answer, one in zip(each, begun, strict=True)]
        self._wants_logprobs = request.sampling.HasField("logprobs")
        self._prompt: list[int] = []
        self._echo: str | None = None
        self._told_first = False  # of the prompt's logprobs
        self._scored = 0  # of them, told
        self._passed = 0  # of them, come from this try's scheduler
        is_begun = any(one.begun.output_ids or one.begun.chars_delivered or one.ended for one in self._outgoing)
        self.wants_prompt = request.sampling.HasField("prompt_logprobs") and not is_begun

    def __len__(self) -> int:
        return len(self._outgoing)

    @property
    def characters(self) -> int:
        return sum(one.answer.characters for one in self._outgoing)

    def begin(self, prompt_ids: Sequence[int], echo: str | None) -> None:
        """echo: the prompt's text, where it comes first."""
        self._prompt = list(prompt_ids)
        self._echo = echo

    def keep(self, count: int) -> None:
        """So many come, the scheduler says; 0: it says nothing."""
        if count:
            del self._outgoing[count:]

    def replay(self) -> list[TextDelta]:
        """What comes of the ids that another edge delivered and has not let through."""
        return [
            delta
            for index, one in enumerate(self._outgoing)
            if (one.begun.output_ids or one.begun.chars_delivered) and not one.ended
            for delta in self.push(
                index, one.begun.output_ids, unknown_logprobs(len(one.begun.output_ids), self._wants_logprobs)
            )
        ]

    def score(self, rows: Sequence[common_pb2.TokenLogprobs]) -> TextPromptLogprobs | None:
        """Logprobs of the prompt's next tokens, with text; None for those that were told."""
        start = self._passed
        self._passed += len(rows)
        if not self.wants_prompt or self._passed <= self._scored:
            return None
        told = TextPromptLogprobs(
            logprobs=[
                with_text(self._model, token_id, row)
                for token_id, row in zip(
                    self._prompt[1 + self._scored : 1 + self._passed], rows[self._scored - start :], strict=True
                )
            ]
        )
        self._scored = self._passed
        self._name_first(told)
        return told

    def score_end(self) -> TextPromptLogprobs | None:
        """What is left to say of the prompt before the first delta: of a prompt of one token, that token."""
        if not self.wants_prompt or self._told_first:
            return None
        told = TextPromptLogprobs()
        self._name_first(told)
        return told

    def retried(self) -> None:
        """Another scheduler has it, and tells the prompt's logprobs from the start if no token was drawn."""
        self._passed = 0

    def push(self, index: int, ids: Sequence[int], logprobs: Sequence[common_pb2.TokenLogprobs]) -> list[TextDelta]:
        one = self._outgoing[index]
        deltas = self._open(index)
        deltas += one.answer.push(ids, logprobs)
        return list(one.rest.of(deltas))

    def finish(self, index: int) -> list[TextDelta]:
        one = self._outgoing[index]
        one.ended = True
        deltas = self._open(index)
        deltas += one.answer.finish()
        return list(one.rest.of(deltas))

    def stopped(self) -> Iterator[tuple[int, int]]:
        """Of answers that a stop string ended and no scheduler has: index, and tokens that count."""
        for index, one in enumerate(self._outgoing):
            if one.answer.stop_string is not None and not one.ended:
                yield index, one.answer.kept_tokens

    def is_stopped(self, index: int) -> bool:
        return self._outgoing[index].answer.stop_string is not None

    @property
    def all_ended(self) -> bool:
        return all(one.ended for one in self._outgoing)

    def end(self, finished: scheduler_pb2.SchedulerFinished) -> tokenizer_pb2.Finished:
        """The scheduler's end, in the words of the text. A stop string that was completed by the very last token is
        known only here: then the reason and the usage are corrected."""
        answer = self._outgoing[finished.index].answer
        result = tokenizer_pb2.Finished(
            index=finished.index,
            reason=finished.reason,
            stop_match=answer.stop_match,
            usage=finished.usage,
            times=finished.times,
            limit=finished.limit,
        )
        if answer.stop_string is not None:
            result.reason = common_pb2.FINISH_REASON_STOP
            result.limit = common_pb2.TIME_LIMIT_KIND_UNSPECIFIED
            dropped = result.usage.delivered_tokens - answer.kept_tokens
            result.usage.delivered_tokens -= dropped
            result.usage.discarded_tokens += dropped
        return result

    def _open(self, index: int) -> list[TextDelta]:
        one = self._outgoing[index]
        first, one.opened = not one.opened, True
        return [TextDelta(index=index, text=self._echo)] if first and self._echo is not None else []

    def _name_first(self, told: TextPromptLogprobs) -> None:
        if not self._told_first:
            self._told_first = True
            raw = self._model.drawn_bytes(self._prompt[0])
            told.first.token_id, told.first.text, told.first.bytes = (
                self._prompt[0],
                raw.decode("utf-8", "replace"),
                raw,
            )
