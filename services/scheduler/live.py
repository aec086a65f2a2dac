"""One request while it lives: the authoritative state that the core doesn't see (ids, sampling, stream, spans).

A request is one stream to its caller, and one or several answers; each answer is a sequence of the core.
"""

import asyncio
from dataclasses import dataclass, field, replace

from opentelemetry.trace import Span

from executor.step import NewSequence, Step
from services.errors import ServiceError
from services.scheduler.core.calls import BlockKey, SequenceKey, Usage
from services.scheduler.core.limits import Rung
from services.scheduler.endings import summed
from services.scheduler.intake import Admission
from services.scheduler.outbox import Drawn, End, Event, Outbox, Scored
from services.scheduler.prefix_keys import KeyChain
from services.scheduler.request_trace import RequestTrace, Times, joined


@dataclass(slots=True, eq=False)
class LiveAnswer:
    """One answer: what is drawn of it, and what became of it."""

    request: "LiveRequest"
    index: int
    key: SequenceKey
    trace: RequestTrace
    ids: list[int]  # prompt, then output
    keys: KeyChain | None = None  # of the blocks that `ids` fill; None: it takes no part in the prefix cache
    losses: int = 0  # of its executor, since the last token
    scores: bool = False  # the prompt's logprobs come with it
    usage: Usage | None = None  # at its end
    times: Times | None = None  # likewise
    outcome: str = ""  # likewise

    @property
    def resumed(self) -> int:
        """Tokens drawn elsewhere."""
        return len(self.request.admission.answers[self.index].output_ids)

    @property
    def output_tokens(self) -> int:
        return len(self.ids) - len(self.request.admission.prompt_ids)

    def as_new_sequence(self, start: int) -> NewSequence:
        """Of which [0, start) was found in the prefix cache. The first token comes with the last of the prompt's
        logprobs, so behind it they are not asked for again."""
        admission = self.request.admission
        wanted = admission.sampling.prompt_logprobs if self.scores and not self.output_tokens else None
        sampling = admission.sampling
        if self.index or wanted != sampling.prompt_logprobs:
            sampling = replace(sampling, choice=self.index, prompt_logprobs=wanted)
        return NewSequence(sampling, len(admission.prompt_ids), tuple(self.ids[:start]))

    def new_block_keys(self) -> tuple[BlockKey, ...]:
        """Keys of the blocks that became full since the last call."""
        return () if self.keys is None else self.keys.grow(self.ids)

    def ids_for(self, start: int, count: int) -> tuple[int, ...]:
        """The known ids of these positions; none where the last one is still being drawn on the device."""
        return tuple(self.ids[start : start + count]) if start + count <= len(self.ids) else ()

    def deliver(self, drawn: Drawn, now: int) -> None:
        self.ids.extend(drawn.token_ids)
        self.request.put(replace(drawn, index=self.index), now)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """Owned by the engine; the stream's handler only reads from it."""

    admission: Admission
    position: int  # sequences ahead of it when it came
    max_tokens: int  # effective, of each answer
    numerics: str
    outbox: Outbox
    span: Span  # the call's own
    serial: int  # grows from one answer to the next, over all requests
    answers: list[LiveAnswer] = field(default_factory=list)  # by index; those that another server ended too
    left: int = 0  # answers that have not ended
    degraded: tuple[Rung, ...] = ()  # what it goes without
    scored: int = 0  # logprobs of the prompt that were handed on
    verdict: ServiceError | None = None  # why the engine cancels it, if it does
    failure: ServiceError | None = None  # what it ends with, once all its answers have
    failed_as: str = ""  # the outcome that goes with it
    readable: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def output_tokens(self) -> int:
        """Of all answers."""
        return sum(answer.output_tokens for answer in self.answers)

    @property
    def scores_prompt(self) -> bool:
        """Whether logprobs of the prompt are still to come."""
        return any(answer.scores and not answer.output_tokens for answer in self.answers)

    @property
    def losses(self) -> int:
        return max(answer.losses for answer in self.answers)

    @property
    def usage(self) -> Usage:
        """Of all answers that have ended: what was computed and drawn here."""
        return summed([answer.usage for answer in self.answers if answer.usage is not None])

    @property
    def outcome(self) -> str:
        """At its end: of its failure, or of its first answer that ended here."""
        return self.failed_as or next(answer.outcome for answer in self.answers if answer.outcome)

    @property
    def times(self) -> Times:
        return joined([answer.times for answer in self.answers if answer.times is not None])

    def put(self, event: Event, now: int) -> None:
        self.outbox.put(event, now)
        self.readable.set()

    def score(self, scored: Scored, now: int) -> None:
        """Logprobs of the prompt that no earlier stay on an executor has given already."""
        new = scored.behind(self.scored)
        self.scored += len(new.logprobs)
        if new.logprobs:
            self.put(new, now)

    def end(self, end: End) -> None:
        self.outbox.end(end)
        self.readable.set()

    async def next_event(self) -> Event | End:
        """The next thing for the reader; an end is the last."""
        while (event := self.outbox.take()) is None:
            self.readable.clear()
            await self.readable.wait()
        return event


@dataclass(frozen=True, slots=True)
class FilledStep:
    """A step to send, for each of its new sequences the answer that it is, and which slots give prompt logprobs."""

    step: Step
    new: dict[int, LiveAnswer]  # by slot
    scoring: frozenset[int]
    tokens: int
