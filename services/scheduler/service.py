"""SchedulerService on the wire: messages to admissions, endings to statuses and Finished messages.

Thin: the engine decides, `intake` checks. A stream's handler is the only reader of its live request, and cancels the
request when it is closed for whatever reason.
"""

import secrets
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

from services import wire
from services.callers import Caller, read_caller
from services.errors import Cancelled as CancelledByCaller
from services.errors import InvalidArgument, ServiceError
from services.health import Readiness
from services.rpc_server import call_context
from services.scheduler import kv_messages
from services.scheduler.core.calls import Limits, Phase, SequenceView, TimeLimit
from services.scheduler.core.limits import Rung
from services.scheduler.core.policies.policy import POLICIES
from services.scheduler.endings import Completed
from services.scheduler.engine import Engine
from services.scheduler.grammars import Grammars
from services.scheduler.intake import LimitPolicy, read_cache, read_generate, read_prompt
from services.scheduler.lease import SCHEMA_REVISION, Lease
from services.scheduler.live import LiveAnswer, LiveRequest
from services.scheduler.observer import Refusal
from services.scheduler.outbox import Drawn, Ended, Event, Scored, Whole
from tercet.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc

FINISH_REASONS: Final = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
    "time_limit": common_pb2.FINISH_REASON_TIME_LIMIT,
}
LIMIT_KINDS: Final = {
    TimeLimit.QUEUE: common_pb2.TIME_LIMIT_KIND_QUEUE,
    TimeLimit.FIRST_TOKEN: common_pb2.TIME_LIMIT_KIND_FIRST_TOKEN,
    TimeLimit.BETWEEN_TOKENS: common_pb2.TIME_LIMIT_KIND_BETWEEN_TOKENS,
    TimeLimit.TOTAL: common_pb2.TIME_LIMIT_KIND_TOTAL,
}
RUNGS: Final = {
    Rung.PREFILL_SHARE: scheduler_pb2.DEGRADE_RUNG_PREFILL_SHARE,
    Rung.SINGLE_ANSWER: scheduler_pb2.DEGRADE_RUNG_SINGLE_ANSWER,
    Rung.MAX_TOKENS: scheduler_pb2.DEGRADE_RUNG_MAX_TOKENS,
    Rung.ADMISSION: scheduler_pb2.DEGRADE_RUNG_ADMISSION,
}
STATES: Final = {
    Phase.QUEUE: scheduler_pb2.REQUEST_STATE_WAITING,
    Phase.PREFILL: scheduler_pb2.REQUEST_STATE_PREFILL,
    Phase.DECODE: scheduler_pb2.REQUEST_STATE_DECODE,
}
LIST_DEFAULT: Final = 100
LIST_MAX: Final = 1000
SCORED_MOST: Final = 512  # tokens of the prompt whose logprobs come in one event

Context = Any  # grpc.aio.ServicerContext is generic in ways that the generated servicers don't name


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    def __init__(
        self,
        engine: Engine,
        leases: tuple[Lease, ...],
        policy: LimitPolicy,
        drain_s: float,
        config_hash: str,
        readiness: Readiness,
        grammars: Grammars,
    ) -> None:
        self._engine = engine
        self._leases = leases
        self._policy = policy
        self._drain_s = drain_s
        self._config_hash = config_hash
        self._readiness = readiness
        self._grammars = grammars

    async def Generate(
        self, request: scheduler_pb2.SchedulerServiceGenerateRequest, context: Context
    ) -> AsyncIterator[scheduler_pb2.SchedulerServiceGenerateResponse]:
        live = await self._admit(request, context)
        try:
            yield scheduler_pb2.SchedulerServiceGenerateResponse(accepted=_accepted(live))
            while not isinstance(event := await live.next_event(), Whole | ServiceError):
                for message in _messages(event, live):
                    yield message
            if isinstance(event, ServiceError):
                raise event
        finally:
            self._engine.cancel(live, CancelledByCaller("the caller is gone"))

    async def _admit(self, request: scheduler_pb2.SchedulerServiceGenerateRequest, context: Context) -> LiveRequest:
        """Queues the request, or tells and raises why not. Waits for its grammar alone."""
        call = call_context(context)
        caller = Caller("", call.request_id, 1, 0)
        try:
            caller = read_caller(request.context, call.metadata, call.request_id, call.principal)
            admission = read_generate(
                request,
                caller=caller,
                model=self._engine.served_model(),
                policy=self._policy,
                deadline_left_ns=_deadline_left_ns(context),
                draw_seed=lambda: secrets.randbits(64),
            )
            if admission.sampling.grammar is not None:
                admission = await self._grammars.ready(admission, call.context)
            return self._engine.submit(admission, call.span, call.context)
        except ServiceError as error:
            elapsed_ns = time.monotonic_ns() - call.started_ns
            self._engine.refused(
                Refusal(error, call.span, caller.request_id, caller.tenant, len(request.prompt_ids), elapsed_ns)
            )
            raise

    async def Stop(
        self, request: scheduler_pb2.SchedulerServiceStopRequest, context: Context
    ) -> scheduler_pb2.SchedulerServiceStopResponse:
        if request.reason != scheduler_pb2.STOP_REASON_STOP_STRING:
            raise InvalidArgument("reason must be STOP_REASON_STOP_STRING", field="reason")
        tenant, request_id, attempt = _named(request.context, context)
        return scheduler_pb2.SchedulerServiceStopResponse(
            was_live=self._engine.stop(tenant, request_id, request.kept_tokens, attempt, request.index)
        )

    async def Abort(
        self, request: scheduler_pb2.SchedulerServiceAbortRequest, context: Context
    ) -> scheduler_pb2.SchedulerServiceAbortResponse:
        return scheduler_pb2.SchedulerServiceAbortResponse(
            was_live=self._engine.abort(*_named(request.context, context))
        )

    async def GetLoad(
        self, request: scheduler_pb2.SchedulerServiceGetLoadRequest, context: Context
    ) -> scheduler_pb2.SchedulerServiceGetLoadResponse:
        load = self._engine.load()
        lanes = []
        for lease in self._leases:
            lane = load.lanes.get(lease.lane)
            if lane is not None:
                lanes.append(
                    scheduler_pb2.LaneLoad(
                        executor=lease.state.target,
                        instance_id=lease.state.instance_id,
                        epoch=lease.state.epoch,
                        running_requests=lane.running,
                        steps_in_flight=lane.steps_in_flight,
                        total_blocks=lane.blocks_total,
                        live_blocks=lane.blocks_live,
                        cached_blocks=lane.blocks_cached,
                        fenced_blocks=lane.blocks_fenced,
                        free_blocks=lane.blocks_free,
                    )
                )
        return scheduler_pb2.SchedulerServiceGetLoadResponse(
            waiting_requests=load.waiting,
            waiting_tokens=load.waiting_tokens,
            running_requests=sum(lane.running_requests for lane in lanes),
            lanes=lanes,
            draining=self._engine.draining,
        )

    async def WatchKvEvents(
        self, request: scheduler_pb2.SchedulerServiceWatchKvEventsRequest, context: Context
    ) -> AsyncIterator[scheduler_pb2.SchedulerServiceWatchKvEventsResponse]:
        first = request.from_sequence if request.HasField("from_sequence") else None
        async for numbered in self._engine.prefixes.log.watch(first):
            yield kv_messages.event(numbered)

    async def ListRequests(
        self, request: scheduler_pb2.SchedulerServiceListRequestsRequest, context: Context
    ) -> scheduler_pb2.SchedulerServiceListRequestsResponse:
        size = request.page_size if request.HasField("page_size") else LIST_DEFAULT
        if not 1 <= size <= LIST_MAX:
            raise InvalidArgument(f"page_size is {size}; it must be 1 to {LIST_MAX}", field="page_size", limit=LIST_MAX)
        views = self._engine.views()
        start = _serial(request.page_token) if request.page_token else 0
        first = next((at for at, (answer, _) in enumerate(views) if _serial(answer.key) >= start), len(views))
        page, after = views[first : first + size], views[first + size : first + size + 1]
        return scheduler_pb2.SchedulerServiceListRequestsResponse(
            requests=[*(self._snapshot(answer, view) for answer, view in page), *(() if after else self._in_grammar())],
            next_page_token=after[0][0].key if after else "",
        )

    def _in_grammar(self) -> Iterator[scheduler_pb2.RequestSnapshot]:
        """Behind all others: those that are not in the queue yet."""
        now = time.monotonic_ns()
        for waiting in self._grammars.waiting():
            admission = waiting.admission
            yield scheduler_pb2.RequestSnapshot(
                request_id=admission.caller.request_id,
                tenant=admission.caller.tenant,
                state=scheduler_pb2.REQUEST_STATE_GRAMMAR,
                age_ns=now - waiting.since,
                prompt_tokens=len(admission.prompt_ids),
                output_tokens=admission.resumed_tokens,
                priority=admission.caller.priority,
                waits_for="grammar",
                waited_ns=now - waiting.since,
            )

    def _snapshot(self, answer: LiveAnswer, view: SequenceView) -> scheduler_pb2.RequestSnapshot:
        caller = answer.request.admission.caller
        wait, now = self._engine.wait(view), self._engine.now()
        executors = {lease.lane: lease.state.target for lease in self._leases}
        return scheduler_pb2.RequestSnapshot(
            request_id=caller.request_id,
            tenant=caller.tenant,
            index=answer.index,
            state=scheduler_pb2.REQUEST_STATE_PREEMPTED
            if view.phase is Phase.QUEUE and view.preemptions
            else STATES[view.phase],
            age_ns=now - view.submitted_ns,
            prompt_tokens=view.prompt_len,
            output_tokens=answer.output_tokens,
            computed_tokens=view.computed,
            blocks=view.blocks,
            preemptions=view.preemptions,
            priority=view.priority,
            waits_for="" if wait is None else wait.reason,
            waited_ns=0 if wait is None else now - wait.since,
            position=0 if wait is None else wait.position,
            executor="" if view.lane is None else executors.get(view.lane, ""),
        )

    async def Drain(
        self, request: scheduler_pb2.SchedulerServiceDrainRequest, context: Context
    ) -> scheduler_pb2.SchedulerServiceDrainResponse:
        self._readiness.close("draining")
        limit_s = request.limit_ns / 1e9 if request.HasField("limit_ns") else self._drain_s
        return scheduler_pb2.SchedulerServiceDrainResponse(cancelled_requests=await self._engine.drain(limit_s))

    async def PinPrefix(
        self, request: scheduler_pb2.SchedulerServicePinPrefixRequest, context: Context
    ) -> scheduler_pb2.SchedulerServicePinPrefixResponse:
        call = call_context(context)
        caller = read_caller(request.context, call.metadata, "", call.principal)
        prompt_ids = read_prompt(request.prompt_ids, self._engine.served_model())
        pinned = self._engine.pin(caller.tenant, read_cache(request.cache), prompt_ids, request.ttl_ns)
        return scheduler_pb2.SchedulerServicePinPrefixResponse(pinned_tokens=pinned.tokens, ttl_ns=pinned.ttl_ns)

    async def FlushCache(
        self, request: scheduler_pb2.SchedulerServiceFlushCacheRequest, context: Context
    ) -> scheduler_pb2.SchedulerServiceFlushCacheResponse:
        removed, held = self._engine.flush()
        return scheduler_pb2.SchedulerServiceFlushCacheResponse(removed_blocks=removed, held_blocks=held)

    async def SetPolicy(
        self, request: scheduler_pb2.SchedulerServiceSetPolicyRequest, context: Context
    ) -> scheduler_pb2.SchedulerServiceSetPolicyResponse:
        if request.policy not in POLICIES:
            raise InvalidArgument(
                f"policy is {request.policy!r}; it must be one of {', '.join(POLICIES)}", field="policy"
            )
        return scheduler_pb2.SchedulerServiceSetPolicyResponse(previous=self._engine.set_policy(request.policy))

    def _policies(self) -> tuple[str, ...]:
        """The one in use first."""
        used = self._engine.load().policy
        return (used, *(name for name in POLICIES if name != used))

    async def Describe(
        self, request: scheduler_pb2.SchedulerServiceDescribeRequest, context: Context
    ) -> scheduler_pb2.SchedulerServiceDescribeResponse:
        answer = scheduler_pb2.SchedulerServiceDescribeResponse(
            schema_revision=SCHEMA_REVISION, policies=self._policies(), config_hash=self._config_hash
        )
        serving = [lease for lease in self._leases if not lease.state.reason]
        known = [lease.state.description for lease in serving or self._leases if lease.state.description is not None]
        if known:
            answer.model.CopyFrom(known[0].model)
            answer.numerics = known[0].numerics
            common = set(known[0].capabilities).intersection(*(set(one.capabilities) for one in known))
            answer.capabilities.extend(sorted(common))
        return answer


def _serial(key: str) -> int:
    """The number that a key or page token ends with. It grows, so a page begins rightly where its first has left."""
    number = key.rpartition("#")[2]
    if not number.isascii() or not number.isdecimal():
        raise InvalidArgument("page_token is none that this scheduler gave", field="page_token")
    return int(number)


def _deadline_left_ns(context: Context) -> int | None:
    left: float | None = context.time_remaining()
    return None if left is None else int(left * 1e9)


def _named(message: common_pb2.RequestContext, context: Context) -> tuple[str, str, int | None]:
    """Which request a Stop or Abort means: tenant, id, and the attempt if it is named."""
    call = call_context(context)
    caller = read_caller(message, call.metadata, "", call.principal)
    if not caller.request_id:
        raise InvalidArgument("context.request_id is missing", field="context.request_id")
    return caller.tenant, caller.request_id, caller.attempt if message.HasField("attempt") else None


def _limits_to_proto(limits: Limits) -> common_pb2.TimeLimits:
    return common_pb2.TimeLimits(
        queue_ns=limits.queue_ns,
        first_token_ns=limits.first_token_ns,
        between_tokens_ns=limits.between_tokens_ns,
        total_ns=limits.total_ns,
    )


def _accepted(live: LiveRequest) -> scheduler_pb2.SchedulerAccepted:
    return scheduler_pb2.SchedulerAccepted(
        queue_position=live.position,
        seed=live.admission.sampling.seed,
        limits=_limits_to_proto(live.admission.effective),
        max_tokens=live.max_tokens,
        request_id=live.admission.caller.request_id,
        numerics=live.numerics,
        degraded=[RUNGS[rung] for rung in live.degraded],
        n=len(live.answers),
    )


def _messages(event: Event, live: LiveRequest) -> Iterator[scheduler_pb2.SchedulerServiceGenerateResponse]:
    match event:
        case Drawn():
            yield scheduler_pb2.SchedulerServiceGenerateResponse(delta=_delta(event))
        case Scored():
            for start in range(0, len(event.logprobs), SCORED_MOST):
                rows = [wire.logprobs_to_proto(row) for row in event.logprobs[start : start + SCORED_MOST]]
                yield scheduler_pb2.SchedulerServiceGenerateResponse(
                    prompt_logprobs=scheduler_pb2.PromptLogprobs(logprobs=rows)
                )
        case Ended():
            finished = _finished(event.completed, event.index, live.answers[event.index].resumed)
            yield scheduler_pb2.SchedulerServiceGenerateResponse(finished=finished)


def _delta(drawn: Drawn) -> scheduler_pb2.TokenDelta:
    return scheduler_pb2.TokenDelta(
        index=drawn.index,
        token_ids=drawn.token_ids,
        logprobs=[wire.logprobs_to_proto(row) for row in drawn.logprobs],
    )


def _finished(completed: Completed, index: int, resumed: int) -> scheduler_pb2.SchedulerFinished:
    """Its usage is the whole answer's: the `resumed` tokens that another scheduler drew count too."""
    finished, times = completed.finished, completed.times
    usage = finished.usage
    return scheduler_pb2.SchedulerFinished(
        index=index,
        reason=FINISH_REASONS[finished.reason.value],
        usage=common_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            delivered_tokens=resumed + usage.delivered,
            sampled_tokens=resumed + usage.delivered + usage.discarded,
            discarded_tokens=usage.discarded,
            preemptions=usage.preemptions,
            recomputed_tokens=usage.recomputed_tokens,
        ),
        times=common_pb2.PhaseTimes(
            queue_ns=times.queue_ns,
            prefill_ns=times.prefill_ns,
            decode_ns=times.decode_ns,
            first_token_ns=times.first_token_ns or 0,
            total_ns=times.total_ns,
        ),
        limit=common_pb2.TIME_LIMIT_KIND_UNSPECIFIED if finished.limit is None else LIMIT_KINDS[finished.limit],
    )
