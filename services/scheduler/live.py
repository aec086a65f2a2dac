"""One request while it lives: the authoritative state that the core doesn't see (ids, sampling, stream, spans)."""

import asyncio
from dataclasses import dataclass, field

from opentelemetry.trace import Span

from executor.step import NewSequence, Step
from services.errors import ServiceError
from services.scheduler.core.calls import BlockKey, SequenceKey
from services.scheduler.core.limits import Rung
from services.scheduler.endings import Ending
from services.scheduler.intake import Admission
from services.scheduler.outbox import Drawn, Outbox
from services.scheduler.prefix_keys import KeyChain
from services.scheduler.request_trace import RequestTrace


@dataclass(slots=True)
class LiveRequest:
    """Owned by the engine; the stream's handler only reads from it."""

    key: SequenceKey
    admission: Admission
    position: int  # sequences ahead of it when it came
    max_tokens: int  # effective
    numerics: str
    outbox: Outbox
    trace: RequestTrace
    span: Span  # the call's own
    ids: list[int]  # prompt, then output
    keys: KeyChain | None = None  # of the blocks that `ids` fill; None: it takes no part in the prefix cache
    degraded: tuple[Rung, ...] = ()  # what it goes without
    losses: int = 0  # of its executor, since the last token
    verdict: ServiceError | None = None  # why the engine cancels it, if it does
    readable: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def output_tokens(self) -> int:
        return len(self.ids) - len(self.admission.prompt_ids)

    def as_new_sequence(self, start: int) -> NewSequence:
        """Of which [0, start) was found in the prefix cache."""
        return NewSequence(self.admission.sampling, len(self.admission.prompt_ids), tuple(self.ids[:start]))

    def new_block_keys(self) -> tuple[BlockKey, ...]:
        """Keys of the blocks that became full since the last call."""
        return () if self.keys is None else self.keys.grow(self.ids)

    def ids_for(self, start: int, count: int) -> tuple[int, ...]:
        """The known ids of these positions; none where the last one is still being drawn on the device."""
        return tuple(self.ids[start : start + count]) if start + count <= len(self.ids) else ()

    def deliver(self, drawn: Drawn, now: int) -> None:
        self.ids.extend(drawn.token_ids)
        self.outbox.put(drawn, now)
        self.readable.set()

    def end(self, ending: Ending) -> None:
        self.outbox.end(ending)
        self.readable.set()

    async def next_event(self) -> Drawn | Ending:
        """The next thing for the reader; an ending is the last."""
        while (event := self.outbox.take()) is None:
            self.readable.clear()
            await self.readable.wait()
        return event


@dataclass(frozen=True, slots=True)
class FilledStep:
    """A step to send, and for each of its new sequences the live request that it belongs to."""

    step: Step
    new: dict[int, LiveRequest]  # by slot
    tokens: int
