"""What the core decides, carried to the streams: the live requests, and what each emission means to them.

Owns who is live, by the core's key and by name, and how answers make up a request: it ends well once all of them have,
and where one fails, all do: a stream has no place for the error of one. Changes the core only to end the others then.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from services.scheduler import endings
from services.scheduler.core.calls import Admitted, Displaced, Emission, Finished, Preempted, SequenceKey, Tokens
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.cost import DrainRate
from services.scheduler.live import LiveAnswer, LiveRequest
from services.scheduler.named import Named
from services.scheduler.observer import Observer
from services.scheduler.outbox import Drawn, Ended, Whole

NOTHING: Mapping[SequenceKey, Drawn] = MappingProxyType({})


class Delivery:
    def __init__(self, core: SchedulerCore, observer: Observer) -> None:
        self._core = core
        self._observer = observer
        self._requests: dict[int, LiveRequest] = {}  # by serial
        self.answers: dict[SequenceKey, LiveAnswer] = {}  # that the core knows of
        self.named = Named()
        self.drain_rate = DrainRate()
        self.idle = asyncio.Event()
        self.idle.set()

    def requests(self) -> Sequence[LiveRequest]:
        """Oldest first."""
        return tuple(self._requests.values())

    def enter(self, request: LiveRequest, drawing: Iterable[LiveAnswer]) -> None:
        """A request is live from here on. drawing: its answers that the core was given."""
        self._requests[request.serial] = request
        self.named.put(request)
        self.answers |= {answer.key: answer for answer in drawing}
        self.idle.clear()
        self._observer.accepted(request)

    def carry_out(
        self,
        emissions: Iterable[Emission],
        now: int,
        step_id: int = 0,
        drawn: Mapping[SequenceKey, Drawn] = NOTHING,
    ) -> None:
        failed: list[LiveRequest] = []
        for emission in emissions:
            answer = self.answers[emission.key]
            match emission:
                case Admitted():
                    answer.trace.admitted(emission.cached_tokens, step_id, now)
                case Tokens():
                    answer.deliver(drawn[emission.key].first(emission.count), now)
                    answer.losses = 0
                    if keys := answer.new_block_keys():
                        self._core.extend(answer.key, keys)
                    answer.trace.token(step_id, now)
                    self._observer.tokens(answer)
                case Preempted() | Displaced():
                    why = "preempted" if isinstance(emission, Preempted) else "executor_lost"
                    answer.losses += isinstance(emission, Displaced)
                    answer.trace.queued(why, now)
                    self._observer.preempted(answer, why)
                case Finished():
                    if not self.finish(answer, emission, now):
                        failed.append(answer.request)
        for request in failed:
            self.cancel(request, now)

    def cancel(self, request: LiveRequest, now: int) -> None:
        """Ends what is left of a request."""
        for answer in request.answers:
            if answer.key in self.answers:
                self.carry_out(self._core.cancel(answer.key, now), now)

    def finish(self, answer: LiveAnswer, finished: Finished, now: int) -> bool:
        """Whether the request may still end well."""
        request, phase = answer.request, answer.trace.phase
        self.answers.pop(answer.key, None)
        request.left -= 1
        self.drain_rate.observe(now)
        answer.usage = finished.usage
        answer.times = answer.trace.finished(finished.usage.delivered, now)
        ending = endings.of(finished, request.verdict, answer.times, begun=request.output_tokens > 0)
        answer.outcome = endings.outcome(ending, phase)
        if isinstance(ending, endings.Completed):
            if request.failure is None:
                request.put(Ended(answer.index, ending), now)
        elif request.failure is None:
            request.failure, request.failed_as = ending, answer.outcome
        if not request.left:
            self._end(request)
        return request.failure is None

    def _end(self, request: LiveRequest) -> None:
        del self._requests[request.serial]
        self.named.drop(request)
        usage, failure = request.usage, request.failure
        if failure is None:
            request.end(Whole.WHOLE)
        elif request.verdict is None:
            request.end(failure)
        else:
            request.end(endings.with_usage(failure, usage, request.admission.resumed_tokens))
        if not self._requests:
            self.idle.set()
        self._observer.ended(request, usage, request.times, request.outcome)
