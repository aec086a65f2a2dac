"""Messages of `vllm.grpc.engine.VllmEngine` <-> the edge's own. Pure.

Owns what each field of that protocol means here. Its zeros stand for absence where its own servers read them so. What
it has and we do not serve is refused by name. Invariant: all that a field asks for is passed on or refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

from smg_grpc_proto.generated import vllm_engine_pb2

from services.errors import DeadlineExceeded, InvalidArgument, Unimplemented
from services.rpc_server import REQUEST_ID_FORMAT
from tercet.v1 import common_pb2, scheduler_pb2, tokenizer_pb2

Request = tokenizer_pb2.TokenizerServiceGenerateRequest
Event = tokenizer_pb2.TokenizerServiceGenerateResponse

FINISH_REASONS: Final = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}
LIMITS: Final = {
    common_pb2.TIME_LIMIT_KIND_QUEUE: "queue",
    common_pb2.TIME_LIMIT_KIND_FIRST_TOKEN: "first_token",
    common_pb2.TIME_LIMIT_KIND_BETWEEN_TOKENS: "between_tokens",
    common_pb2.TIME_LIMIT_KIND_TOTAL: "total",
}
GRAMMARS: Final = {
    "json_schema": common_pb2.GRAMMAR_KIND_JSON_SCHEMA,
    "regex": common_pb2.GRAMMAR_KIND_REGEX,
    "grammar": common_pb2.GRAMMAR_KIND_EBNF,
}
# Of a GenerateRequest; of its SamplingParams: set to anything, they ask for what is not here.
UNSERVED: Final = (
    "kv_transfer_params",
    "kv_transfer_params_json",
    "mm_inputs",
    "media_refs",
    "extra_mm_inputs",
)
UNSERVED_SAMPLING: Final = ("truncate_prompt_tokens", "structural_tag")


def request_id(given: str) -> str:
    """The id by which a request is known here: `given`, or where that breaks our rule one that is made of it."""
    if REQUEST_ID_FORMAT.fullmatch(given):
        return given
    return f"vllm-{blake2b(given.encode(), digest_size=16).hexdigest()}"


def to_edge(asked: Any, name: str) -> Request:
    """A GenerateRequest as the edge's. name: the request's id here. Raises InvalidArgument and Unimplemented."""
    for one in UNSERVED:
        if len(getattr(asked, one)) if one == "extra_mm_inputs" else asked.HasField(one):
            raise Unimplemented(f"{one} is not served", field=one)
    if asked.data_parallel_rank:
        raise InvalidArgument(
            f"data_parallel_rank is {asked.data_parallel_rank}; there is one rank, 0", field="data_parallel_rank"
        )
    message = Request(context=common_pb2.RequestContext(request_id=name))
    match asked.WhichOneof("input"):
        case "tokenized":
            message.token_ids.ids.extend(asked.tokenized.input_ids)
        case "text":
            message.text = asked.text
        case _:
            raise InvalidArgument("the request has no input", field="input")
    params = asked.sampling_params
    message.sampling.CopyFrom(sampling(params))
    message.stop.extend(params.stop)
    if params.include_stop_str_in_output:
        message.include_stop = True
    if not params.skip_special_tokens:
        message.keep_special_tokens = True
    message.return_prompt_ids = message.sampling.HasField("prompt_logprobs")
    return message


def sampling(params: Any) -> common_pb2.SamplingParams:
    """Ranges are checked where ours are. A field at 0 is absent where 0 can't be meant."""
    for name in UNSERVED_SAMPLING:
        if params.HasField(name):
            raise Unimplemented(f"sampling_params.{name} is not served", field=f"sampling_params.{name}")
    result = common_pb2.SamplingParams(
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        temperature=params.temperature if params.HasField("temperature") else None,
        top_p=params.top_p or None,
        repetition_penalty=params.repetition_penalty or None,
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        n=params.n or None,
        seed=params.seed % 2**64 if params.HasField("seed") else None,
        logprobs=_count(params, "logprobs"),
        prompt_logprobs=_count(params, "prompt_logprobs"),
        grammar=_grammar(params),
    )
    for token_id in sorted(params.logit_bias):
        if token_id < 0:
            raise InvalidArgument(
                f"sampling_params.logit_bias holds {token_id}; token ids are at least 0",
                field="sampling_params.logit_bias",
                limit=0,
            )
        result.logit_bias.add(token_id=token_id, bias=params.logit_bias[token_id])
    return result


def _count(params: Any, name: str) -> int | None:
    if not params.HasField(name):
        return None
    value: int = getattr(params, name)
    if value < 0:
        raise Unimplemented(
            f"sampling_params.{name} is {value}: the whole vocabulary's are not served",
            field=f"sampling_params.{name}",
        )
    return value


def _grammar(params: Any) -> common_pb2.Grammar | None:
    kind = params.WhichOneof("constraint")
    if kind is None:
        return None
    if kind == "json_object":
        if not params.json_object:
            return None
        return common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_JSON_OBJECT)
    if kind == "choice":
        choices = params.choice.choices
        if any("\n" in choice or "\r" in choice for choice in choices):
            raise Unimplemented("a choice with a line break is not served", field="sampling_params.choice")
        return common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_CHOICE, source="\n".join(choices))
    return common_pb2.Grammar(kind=GRAMMARS[kind], source=getattr(params, kind))


@dataclass(slots=True)
class _Answer:
    """One of the n answers so far. Where nothing streams, `ids` and `logprobs` hold all of it."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[tokenizer_pb2.TextLogprobs] = field(default_factory=list)
    last_id: int | None = None
    begun: bool = False


class Replies:
    """The edge's events of one request, as GenerateResponses.

    asked: the GenerateRequest. A stream gets a chunk for each delta with tokens; in any case one complete comes for
    each answer. The ids of all chunks of an answer are its tokens, and those of a complete too where nothing streams.
    """

    def __init__(self, asked: Any) -> None:
        self._stream = asked.stream
        self._with_logprobs = asked.sampling_params.HasField("logprobs")
        self._stops = frozenset(asked.sampling_params.stop)
        self._stop_ids = frozenset(asked.sampling_params.stop_token_ids)
        self._prompt_ids: Sequence[int] = ()
        self._prompt_tokens = 0
        self._prompt_logprobs: Any = None
        self._answers: dict[int, _Answer] = {}

    def of(self, event: Event) -> Iterator[Any]:
        """Raises DeadlineExceeded where a time limit ended an answer."""
        match event.WhichOneof("event"):
            case "accepted":
                self._prompt_tokens = event.accepted.prompt_tokens
                self._prompt_ids = event.accepted.prompt_ids
            case "prompt_logprobs":
                self._prompt_logprobs = input_logprobs(self._prompt_ids, event.prompt_logprobs.logprobs)
            case "delta":
                yield from self._delta(event.delta)
            case "finished":
                yield self._finished(event.finished)

    def _delta(self, delta: tokenizer_pb2.TextDelta) -> Iterator[Any]:
        if not delta.token_ids:
            return  # text alone: whoever speaks this protocol decodes by itself
        answer = self._answers.setdefault(delta.index, _Answer())
        answer.last_id = delta.token_ids[-1]
        if not self._stream:
            answer.ids.extend(delta.token_ids)
            answer.logprobs.extend(delta.logprobs)
            return
        yield vllm_engine_pb2.GenerateResponse(
            chunk=vllm_engine_pb2.GenerateStreamChunk(
                token_ids=delta.token_ids,
                prompt_tokens=self._prompt_tokens,
                completion_tokens=len(delta.token_ids),
                output_logprobs=self._output_logprobs(delta.token_ids, delta.logprobs),
                input_logprobs=None if answer.begun else self._prompt_logprobs,
                index=delta.index,
            )
        )
        answer.begun = True

    def _finished(self, finished: tokenizer_pb2.Finished) -> Any:
        usage = finished.usage
        if finished.reason not in FINISH_REASONS:
            kind = LIMITS.get(finished.limit, "unknown")
            raise DeadlineExceeded(
                f"the time limit {kind} passed after {usage.delivered_tokens} tokens",
                reason="TIME_LIMIT",
                metadata={"limit_kind": kind, "delivered_tokens": str(usage.delivered_tokens)},
            )
        answer = self._answers.setdefault(finished.index, _Answer())
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=answer.ids,
            finish_reason=FINISH_REASONS[finished.reason],
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.delivered_tokens,
            cached_tokens=usage.cached_tokens,
            output_logprobs=self._output_logprobs(answer.ids, answer.logprobs),
            input_logprobs=None if answer.begun else self._prompt_logprobs,
            index=finished.index,
        )
        if finished.reason == common_pb2.FINISH_REASON_STOP:
            if answer.last_id in self._stop_ids:
                complete.matched_token_id = answer.last_id
            elif finished.stop_match in self._stops:
                complete.matched_stop_str = finished.stop_match
        return vllm_engine_pb2.GenerateResponse(complete=complete)

    def _output_logprobs(self, ids: Sequence[int], rows: Sequence[tokenizer_pb2.TextLogprobs]) -> Any:
        if not self._with_logprobs or not ids:
            return None
        return vllm_engine_pb2.OutputLogProbs(
            token_logprobs=[row.drawn.logprob for row in rows],
            token_ids=ids,
            top_logprobs=[_top(row) for row in rows],
        )


def input_logprobs(prompt_ids: Sequence[int], rows: Sequence[tokenizer_pb2.TextLogprobs]) -> Any:
    """rows: from the second token on. The first one has no logprob."""
    result = vllm_engine_pb2.InputLogProbs(token_ids=prompt_ids)
    result.token_logprobs.add()
    result.top_logprobs.add()
    for row in rows:
        result.token_logprobs.add(value=row.drawn.logprob)
        result.top_logprobs.append(_top(row))
    return result


def _top(row: tokenizer_pb2.TextLogprobs) -> Any:
    return vllm_engine_pb2.TopLogProbs(
        values=[one.logprob for one in row.top], token_ids=[one.token_id for one in row.top]
    )


def load(loads: Sequence[scheduler_pb2.SchedulerServiceGetLoadResponse], tokens_per_s: float, cached: float) -> Any:
    """Of several schedulers as one rank. What they don't tell (tokens in the pool, slots) stays 0, which is unknown.
    cached: share of the latest prompts' tokens that came from the cache."""
    lanes = [lane for one in loads for lane in one.lanes]
    total = sum(lane.total_blocks for lane in lanes)
    used = sum(lane.live_blocks + lane.fenced_blocks for lane in lanes) / total if total else 0.0
    running = sum(one.running_requests for one in loads)
    waiting = sum(one.waiting_requests for one in loads)
    return vllm_engine_pb2.SchedulerLoad(
        dp_rank=0,
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_total_reqs=running + waiting,
        token_usage=used,
        utilization=used,
        gen_throughput=tokens_per_s,
        cache_hit_rate=cached,
        num_waiting_uncached_tokens=sum(one.waiting_tokens for one in loads),
    )
