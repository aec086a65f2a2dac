"""The text edge: a prompt's text to ids, the scheduler's ids to text. The gRPC front door and the gateway stand on it.

Owns a request's life at the edge: encode, call the scheduler, detokenize, find stop strings, stop the scheduler there.
All its state is local to one generator, so closing the generator ends everything. What a scheduler's death costs the
caller is time: detokenizer and stop matcher stay here, and `upstream` goes on with the ids at a scheduler that is able.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import grpc
from opentelemetry.trace import Span, Tracer

from services import names, trace_context
from services.callers import Caller, read_caller
from services.errors import InvalidArgument, NotFound, Unavailable
from services.gateway.engine import EngineCall
from services.hops import keep_margin
from services.peers import Route, State
from services.rpc_errors import from_rpc_error
from services.tokenizer import placement, upstream, verbs
from services.tokenizer.aborts import Aborts, UnderWay
from services.tokenizer.answer import Answer, AnswerRules
from services.tokenizer.answers import Answers
from services.tokenizer.chain import ChainState
from services.tokenizer.grammar_check import GrammarCheck
from services.tokenizer.house import House
from services.tokenizer.invalid import InvalidText
from services.tokenizer.prompts import Prompts
from services.tokenizer.report import EdgeReport, Told
from services.tokenizer.resume import check_resume
from services.tokenizer.schedulers import Scheduler, Schedulers
from services.tokenizer.text import TextModel
from services.tokenizer.upstream import AtScheduler, Upstream
from tercet.v1 import common_pb2, scheduler_pb2, tokenizer_pb2

Request = tokenizer_pb2.TokenizerServiceGenerateRequest
Response = tokenizer_pb2.TokenizerServiceGenerateResponse
SchedulerRequest = scheduler_pb2.SchedulerServiceGenerateRequest
SchedulerResponse = scheduler_pb2.SchedulerServiceGenerateResponse

STOP_CALL_S: Final = 5.0
RESUME_GRACE_S: Final = 60.0
MAX_REQUESTS: Final = 4096
CUT_S: Final = 1.0  # for telling the callers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EdgeIdentity:
    """What Describe tells of this edge."""

    model_name: str
    has_chat_template: bool
    config_hash: str
    tool_format: str = ""
    reasoning_format: str = ""


class TextEdge:
    """Satisfies `services.gateway.engine.TextEngine`."""

    def __init__(
        self,
        model: TextModel,
        prompts: Prompts,
        schedulers: Schedulers,
        identity: EdgeIdentity,
        tracer: Tracer,
        report: EdgeReport,
        resume_grace_s: float = RESUME_GRACE_S,
        max_requests: int = MAX_REQUESTS,
        grammars: GrammarCheck | None = None,
    ) -> None:
        """grammars: None serves none."""
        self._model = model
        self._prompts = prompts
        self._schedulers = schedulers
        self._identity = identity
        self._tracer = tracer
        self._report = report
        self._resume_grace_s = resume_grace_s
        self._house = House(max_requests)
        self._grammars = grammars or GrammarCheck(None)
        self._draining = False
        self._cut = False
        self._streams: set[grpc.aio.UnaryStreamCall[SchedulerRequest, SchedulerResponse]] = set()
        self._aborts = Aborts()

    def drain(self) -> None:
        """Refuses new requests from now on."""
        self._draining = True

    async def drained(self, limit_s: float) -> None:
        """Returns when no request is left, or at the limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._house.empty()

    async def cut(self) -> None:
        """Ends what is left, as UNAVAILABLE."""
        self._draining = self._cut = True
        for stream in tuple(self._streams):
            stream.cancel()
        await self.drained(CUT_S)

    def abort(self, tenant: str, request_id: str) -> bool:
        """Ends a request with Cancelled, as if its caller had gone. False: it is not here; should it come yet, it ends
        at once."""
        return self._aborts.abort(tenant, request_id)

    async def generate(
        self, request: Request, call: EngineCall, metadata: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Response, None]:
        """Accepted, then deltas, then Finished. Raises ServiceError; see `TextEngine.generate`.

        metadata: of the gRPC call, where the message came over one; it says who asks, and not `call`.
        """
        with self._report.request(request, call) as told, self._house.guest():
            given = call.metadata if metadata is None else metadata
            caller = read_caller(request.context, given, call.request_id, call.principal)
            told.identify(caller)
            with self._aborts.request(caller) as under_way:
                async with aclosing(self._answer(request, call, caller, told, under_way)) as events:
                    async for event in events:
                        yield event

    async def _answer(
        self, request: Request, call: EngineCall, caller: Caller, told: Told, under_way: UnderWay
    ) -> AsyncGenerator[Response, None]:
        if self._draining:
            raise Unavailable("the tokenizer is draining and takes no new requests", reason="DRAINING")
        self._refuse(request)
        chain = self._schedulers.require()
        try:
            answers = Answers(self._model, request, Answer(self._model, self._rules(request, chain)))
        except InvalidText as error:
            raise InvalidArgument(str(error), field=error.field) from error
        began = time.monotonic_ns()
        prompt_ids = await self._prompt_ids(request, call)
        told.tokenized(len(prompt_ids), time.monotonic_ns() - began)
        grammar = await self._grammars.checked(request.sampling)
        keep_special = request.keep_special_tokens
        echo = await self._prompts.decode(prompt_ids, skip_special=not keep_special) if request.echo else None
        answers.begin(prompt_ids, echo)
        replayed = answers.replay()
        message = self._message(request, caller, prompt_ids, call)
        if grammar is not None:
            message.sampling.grammar.CopyFrom(grammar)
        if not answers.wants_prompt:
            message.sampling.ClearField("prompt_logprobs")
        route = self._schedulers.route(_key(message), request.resume.numerics or None)
        source = Upstream(
            message,
            AtScheduler(message, lambda: time.monotonic_ns() - call.started_ns),
            route,
            lambda message: self._open(message, route, call, told, under_way),
            time.monotonic() + _left_s(call),
            self._resume_grace_s,
            caller.request_id,
        )
        span: Span | None = None
        is_accepted = False
        try:
            async with aclosing(source.events()) as events:
                async for event in events:
                    match event.WhichOneof("event"):
                        case "accepted":
                            if not is_accepted:
                                is_accepted = True
                                _check_same(event.accepted, route.seen)
                                route.numerics = event.accepted.numerics
                                answers.keep(event.accepted.n)
                                yield Response(
                                    accepted=self._accepted(event.accepted, request, prompt_ids, len(answers))
                                )
                                for delta in replayed:
                                    yield Response(delta=delta)
                            else:
                                told.span.add_event(names.EVENT_SCHEDULER_LOST)
                                answers.retried()
                            for index, kept in answers.stopped():  # what was told before the loss is not known there
                                await self._stop(route, caller, source.attempt, index, kept, told)
                        case "prompt_logprobs":
                            if (scored := answers.score(event.prompt_logprobs.logprobs)) is not None:
                                yield Response(prompt_logprobs=scored)
                        case "delta":
                            span = span or self._tracer.start_span(names.SPAN_DETOKENIZE, context=call.context)
                            if (scored := answers.score_end()) is not None:
                                yield Response(prompt_logprobs=scored)
                            drawn = event.delta
                            was_stopped = answers.is_stopped(drawn.index)
                            for delta in told.decoding(answers.push, drawn.index, drawn.token_ids, drawn.logprobs):
                                yield Response(delta=delta)
                            if answers.is_stopped(drawn.index) and not was_stopped:
                                kept = dict(answers.stopped())[drawn.index]
                                await self._stop(route, caller, source.attempt, drawn.index, kept, told)
                        case "finished":
                            if (scored := answers.score_end()) is not None:
                                yield Response(prompt_logprobs=scored)
                            index = event.finished.index
                            for delta in told.decoding(answers.finish, index):
                                yield Response(delta=delta)
                            yield Response(
                                finished=told.finished(
                                    answers.end(event.finished),
                                    by_stop_string=answers.is_stopped(index),
                                    last=answers.all_ended,
                                )
                            )
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # by whoever cancelled the stream
                under_way.check()
                if self._cut:
                    raise _drained() from None
            raise
        finally:
            route.leave()
            if span is not None:
                span.set_attribute(names.TEXT_CHARACTERS, answers.characters)
                span.end()

    async def _prompt_ids(self, request: Request, call: EngineCall) -> list[int]:
        if not request.HasField("resume"):
            return await self._prompts.encode(request, call.context)
        check_resume(request)
        return list(request.resume.prompt_ids)

    def _open(
        self, message: SchedulerRequest, route: Route[Scheduler], call: EngineCall, told: Told, under_way: UnderWay
    ) -> "grpc.aio.UnaryStreamCall[SchedulerRequest, SchedulerResponse]":
        under_way.check()
        if self._cut:
            raise _drained()
        scheduler = route.take()
        told.placed(scheduler.target)
        stream = scheduler.calls.Generate(message, timeout=_left_s(call), metadata=trace_context.inject(told.span))
        self._streams.add(stream)
        stream.add_done_callback(self._streams.discard)
        under_way.call = stream
        return stream

    async def tokenize(
        self, request: tokenizer_pb2.TokenizerServiceTokenizeRequest, call: EngineCall
    ) -> tokenizer_pb2.TokenizerServiceTokenizeResponse:
        return await verbs.tokenize(self._model, self._prompts, request)

    async def detokenize(
        self, request: tokenizer_pb2.TokenizerServiceDetokenizeRequest, call: EngineCall
    ) -> tokenizer_pb2.TokenizerServiceDetokenizeResponse:
        return await verbs.detokenize(self._prompts, request)

    async def render_chat(
        self, request: tokenizer_pb2.TokenizerServiceRenderChatRequest, call: EngineCall
    ) -> tokenizer_pb2.TokenizerServiceRenderChatResponse:
        return await verbs.render_chat(self._prompts, request)

    async def describe(self) -> tokenizer_pb2.TokenizerServiceDescribeResponse:
        """This edge's own model; what only the chain knows (context length, weights, numerics) once it is complete."""
        state = self._schedulers.foremost()
        model = common_pb2.ModelDescription(
            name=self._identity.model_name,
            tokenizer_hash=self._model.hash,
            vocab_size=self._model.vocab_size,
            eos_token_ids=sorted(self._model.eos_ids),
        )
        if state.problem is None and state.model is not None:
            model.model_hash = state.model.model_hash
            model.max_model_len = state.model.max_model_len
        return tokenizer_pb2.TokenizerServiceDescribeResponse(
            model=model,
            schema_revision=common_pb2.SCHEMA_REVISION_ONE,
            numerics=state.numerics if state.problem is None else "",
            has_chat_template=self._identity.has_chat_template,
            config_hash=self._identity.config_hash,
            tool_format=self._identity.tool_format,
            reasoning_format=self._identity.reasoning_format,
        )

    async def why_not_ready(self) -> str | None:
        if self._draining:
            return "draining"
        problem = self._schedulers.problem()
        return None if problem is None else problem.message

    def _refuse(self, request: Request) -> None:
        if request.HasField("model") and request.model != self._identity.model_name:
            raise NotFound(
                f"the model {request.model!r} is not served here; {self._identity.model_name!r} is",
                reason="MODEL_NOT_FOUND",
                field="model",
            )

    def _rules(self, request: Request, chain: ChainState) -> AnswerRules:
        own_ends: tuple[int, ...] = ()
        if not request.sampling.ignore_eos and chain.model is not None:
            own_ends = tuple(chain.model.eos_token_ids)
        return AnswerRules(
            stops=tuple(request.stop),
            include_stop=request.include_stop,
            keep_special=request.keep_special_tokens,
            min_tokens=request.sampling.min_tokens,
            stop_ids=frozenset((*own_ends, *request.sampling.stop_token_ids)),
        )

    def _message(self, request: Request, caller: Caller, prompt_ids: list[int], call: EngineCall) -> SchedulerRequest:
        return SchedulerRequest(
            context=_context(caller, upstream.first_try(caller.attempt)),
            prompt_ids=prompt_ids,
            sampling=request.sampling,
            limits=request.limits,
            elapsed_ns=time.monotonic_ns() - call.started_ns,
            cache=request.cache if request.HasField("cache") else None,
            resume=request.resume if request.HasField("resume") else None,
        )

    def _accepted(
        self, accepted: scheduler_pb2.SchedulerAccepted, request: Request, prompt_ids: list[int], n: int
    ) -> tokenizer_pb2.Accepted:
        return tokenizer_pb2.Accepted(
            request_id=accepted.request_id,
            queue_position=accepted.queue_position,
            seed=accepted.seed,
            limits=accepted.limits,
            max_tokens=accepted.max_tokens,
            prompt_tokens=len(prompt_ids),
            prompt_ids=prompt_ids if request.return_prompt_ids else (),
            numerics=accepted.numerics,
            model=self._identity.model_name,
            n=n,
        )

    async def _stop(
        self, route: Route[Scheduler], caller: Caller, attempt: int, index: int, kept_tokens: int, told: Told
    ) -> None:
        """Tells the scheduler that has it. If that fails the text is complete all the same, so only the end is late."""
        if route.current is None:
            return
        try:
            await route.current.calls.Stop(
                scheduler_pb2.SchedulerServiceStopRequest(
                    context=_context(caller, attempt),
                    index=index,
                    kept_tokens=kept_tokens,
                    reason=scheduler_pb2.STOP_REASON_STOP_STRING,
                ),
                timeout=STOP_CALL_S,
                metadata=trace_context.inject(told.span),
            )
        except grpc.aio.AioRpcError as error:
            log.warning(
                "the scheduler did not take a stop",
                extra={"request_id": caller.request_id, "reason": from_rpc_error(error).message},
            )


def _left_s(call: EngineCall) -> float:
    """Seconds for the scheduler's call: what the caller's leaves, less this hop's margin."""
    left_ns = int(call.timeout_s * 1e9) - (time.monotonic_ns() - call.started_ns)
    return max(0.0, keep_margin(left_ns) / 1e9)


def _key(message: SchedulerRequest) -> bytes:
    salt = message.cache.salt if message.cache.HasField("salt") else None
    return placement.key_of(message.context.tenant, salt, message.resume.prompt_ids or message.prompt_ids)


def _check_same(accepted: scheduler_pb2.SchedulerAccepted, seen: State) -> None:
    """The prompt was encoded for the model that the scheduler had when last asked."""
    if not seen.takes or accepted.numerics != seen.numerics:
        raise Unavailable("the model behind this tokenizer has just changed", reason="MODEL_CHANGED")


def _drained() -> Unavailable:
    return Unavailable("the tokenizer was drained", reason="DRAINING")


def _context(caller: Caller, attempt: int) -> common_pb2.RequestContext:
    """attempt: the scheduler's count, see `upstream.first_try`."""
    return common_pb2.RequestContext(
        request_id=caller.request_id, tenant=caller.tenant, priority=caller.priority, attempt=attempt
    )
