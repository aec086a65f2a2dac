"""The events of a generation, folded into its answers. Pure.

Owns what is known of a stream so far. Must not know calls, retries or time. Invariant: an answer's text is its deltas
joined; nothing of an answer follows its end; a stream that ends early is an error, not a short answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tercet import _resume
from tercet.errors import ErrorDetails, InternalError
from tercet.types import (
    Accepted,
    Answer,
    Delta,
    FinishReason,
    Logprobs,
    TimeLimitKind,
    TimeLimits,
    Timings,
    TokenLogprob,
    Usage,
)
from tercet.v1 import common_pb2, tokenizer_pb2

_REASONS: Final[Mapping[int, FinishReason]] = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common_pb2.FINISH_REASON_TIME_LIMIT: FinishReason.TIME_LIMIT,
}
_LIMITS: Final[Mapping[int, TimeLimitKind]] = {
    common_pb2.TIME_LIMIT_KIND_QUEUE: TimeLimitKind.QUEUE,
    common_pb2.TIME_LIMIT_KIND_FIRST_TOKEN: TimeLimitKind.FIRST_TOKEN,
    common_pb2.TIME_LIMIT_KIND_BETWEEN_TOKENS: TimeLimitKind.BETWEEN_TOKENS,
    common_pb2.TIME_LIMIT_KIND_TOTAL: TimeLimitKind.TOTAL,
}


@dataclass(slots=True)
class _Growing:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finished: tokenizer_pb2.Finished | None = None


class Fold:
    """What a stream of `n` answers has told so far."""

    def __init__(self, n: int) -> None:
        self._answers = [_Growing() for _ in range(n)]
        self.accepted: Accepted | None = None
        self.prompt_logprobs: list[Logprobs] = []
        # True once something was delivered: from then on, sending the request again from the start would repeat it.
        self.delivered = False

    def apply(self, event: tokenizer_pb2.TokenizerServiceGenerateResponse) -> Delta | None:
        """Take in one event; the delta, if it is one. An event of a newer contract is skipped, as protobuf has it.

        Raises InternalError where the peer breaks the contract.
        """
        match event.WhichOneof("event"):
            case "accepted":
                self.accepted = _accepted(event.accepted)
                if self.accepted.n:
                    del self._answers[self.accepted.n :]  # the server takes away what it can't afford
                if not self.delivered:
                    self.prompt_logprobs.clear()  # of a try that is over: they come from the start
            case "prompt_logprobs":
                self.prompt_logprobs.extend(map(_logprobs, event.prompt_logprobs.logprobs))
            case "delta":
                delta = _delta(event.delta)
                growing = self._open(delta.index)
                growing.texts.append(delta.text)
                growing.token_ids.extend(delta.token_ids)
                growing.logprobs.extend(delta.logprobs)
                self.delivered = True
                return delta
            case "finished":
                if event.finished.reason not in _REASONS:
                    raise _broken(f"finish reason {event.finished.reason} is unknown")
                self._open(event.finished.index).finished = event.finished
                self.delivered = True
        return None

    @property
    def is_complete(self) -> bool:
        """Whether every answer has ended."""
        return all(growing.finished is not None for growing in self._answers)

    def complete(self) -> None:
        """The stream ended with status OK. Raises InternalError unless every answer has ended."""
        for index, growing in enumerate(self._answers):
            if growing.finished is None:
                raise _broken(f"the stream ended before answer {index} did")

    def so_far(self) -> common_pb2.Resume | None:
        """What another server needs to go on; None where it can't: all has ended, or the server did not tell the
        prompt's ids and the numerics."""
        if self.accepted is None:
            return None
        came = [
            _resume.Came(growing.token_ids, sum(map(len, growing.texts)), growing.finished is not None)
            for growing in self._answers
        ]
        return _resume.so_far(self.accepted, came)

    def answers(self) -> tuple[Answer, ...]:
        """All answers, as far as they came."""
        return tuple(_answer(index, growing) for index, growing in enumerate(self._answers))

    @property
    def usage(self) -> Usage | None:
        """Of all answers that have ended: the prompt counts once, the rest is summed. None before the first ends."""
        ended = [_usage(growing.finished.usage) for growing in self._answers if growing.finished is not None]
        if not ended:
            return None
        return Usage(
            prompt_tokens=max(usage.prompt_tokens for usage in ended),
            cached_tokens=min(usage.cached_tokens for usage in ended),
            delivered_tokens=sum(usage.delivered_tokens for usage in ended),
            sampled_tokens=sum(usage.sampled_tokens for usage in ended),
            discarded_tokens=sum(usage.discarded_tokens for usage in ended),
            preemptions=sum(usage.preemptions for usage in ended),
            recomputed_tokens=sum(usage.recomputed_tokens for usage in ended),
        )

    def _open(self, index: int) -> _Growing:
        if not 0 <= index < len(self._answers):
            raise _broken(f"there is no answer {index} of {len(self._answers)}")
        growing = self._answers[index]
        if growing.finished is not None:
            raise _broken(f"answer {index} goes on after its end")
        return growing


def _broken(what: str) -> InternalError:
    return InternalError(f"the server broke the contract: {what}", ErrorDetails(reason="CONTRACT_BROKEN"))


def _answer(index: int, growing: _Growing) -> Answer:
    end = growing.finished
    return Answer(
        index=index,
        text="".join(growing.texts),
        token_ids=tuple(growing.token_ids),
        logprobs=tuple(growing.logprobs),
        finish_reason=None if end is None else _REASONS[end.reason],
        stop_match=end.stop_match if end is not None and end.HasField("stop_match") else None,
        limit=None if end is None else _LIMITS.get(end.limit),
        usage=None if end is None else _usage(end.usage),
        timings=None if end is None else _timings(end.times),
    )


def _accepted(accepted: tokenizer_pb2.Accepted) -> Accepted:
    return Accepted(
        request_id=accepted.request_id,
        queue_position=accepted.queue_position,
        seed=accepted.seed,
        limits=_limits(accepted.limits),
        max_tokens=accepted.max_tokens,
        prompt_tokens=accepted.prompt_tokens,
        prompt_ids=tuple(accepted.prompt_ids),
        numerics=accepted.numerics,
        model=accepted.model,
        n=accepted.n,
    )


def _limits(limits: common_pb2.TimeLimits) -> TimeLimits:
    return TimeLimits(
        queue=limits.queue_ns / 1e9 if limits.HasField("queue_ns") else None,
        first_token=limits.first_token_ns / 1e9 if limits.HasField("first_token_ns") else None,
        between_tokens=limits.between_tokens_ns / 1e9 if limits.HasField("between_tokens_ns") else None,
        total=limits.total_ns / 1e9 if limits.HasField("total_ns") else None,
    )


def _delta(delta: tokenizer_pb2.TextDelta) -> Delta:
    return Delta(
        text=delta.text,
        token_ids=tuple(delta.token_ids),
        index=delta.index,
        logprobs=tuple(map(_logprobs, delta.logprobs)),
    )


def _logprobs(row: tokenizer_pb2.TextLogprobs) -> Logprobs:
    return Logprobs(drawn=_logprob(row.drawn), top=tuple(map(_logprob, row.top)))


def _logprob(row: tokenizer_pb2.TextLogprob) -> TokenLogprob:
    return TokenLogprob(token_id=row.token_id, logprob=row.logprob, text=row.text, bytes=row.bytes)


def _usage(usage: common_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        delivered_tokens=usage.delivered_tokens,
        sampled_tokens=usage.sampled_tokens,
        discarded_tokens=usage.discarded_tokens,
        preemptions=usage.preemptions,
        recomputed_tokens=usage.recomputed_tokens,
    )


def _timings(times: common_pb2.PhaseTimes) -> Timings:
    return Timings(
        tokenize=times.tokenize_ns / 1e9,
        queue=times.queue_ns / 1e9,
        prefill=times.prefill_ns / 1e9,
        decode=times.decode_ns / 1e9,
        first_token=times.first_token_ns / 1e9,
        total=times.total_ns / 1e9,
    )
