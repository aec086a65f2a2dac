"""A Generate message to an admission, or the error that names the field and the limit.

Pure: the caller passes what it knows of the model, the clock's leftovers and a seed. Nothing is allocated in proportion
to a bad number, and nothing that this build does not serve is ignored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from executor.step import SamplingParams
from services import wire_sampling
from services.callers import Caller
from services.errors import Aborted, DeadlineExceeded, InvalidArgument, Unimplemented
from services.hops import keep_margin
from services.scheduler.core.calls import Limits
from tercet.v1 import common_pb2, scheduler_pb2

MAX_SALT_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a request is checked against."""

    vocab_size: int
    max_model_len: int  # tokens
    eos_token_ids: tuple[int, ...]
    numerics: str
    grammars: bool = False  # whether sequences may have one
    scores_prompts: bool = False  # every executor gives logprobs of prompts


@dataclass(frozen=True, slots=True)
class LimitPolicy:
    """What holds where a request says nothing, and what it can have at most."""

    default: Limits
    maximum: Limits
    default_max_tokens: int | None = None  # None: what the context leaves


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What a request makes of the prefix cache."""

    salt: str | None = None  # None: shares with all of its tenant that name none
    bypass: bool = False  # neither finds nor leaves anything


@dataclass(frozen=True, slots=True)
class Begun:
    """What was drawn elsewhere of one answer; it goes on behind that."""

    output_ids: tuple[int, ...] = ()
    told: bool = False  # the caller knows its end: nothing more comes of it


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that is well-formed for the model served."""

    caller: Caller
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams  # stop_token_ids holds the model's own end ids too; `choice` is the answer's place
    max_tokens: int | None
    limits: Limits  # durations from now
    effective: Limits  # as told to the caller: durations from the request's own start
    answers: tuple[Begun, ...] = (Begun(),)  # one for each of n
    resumed: bool = False
    cache: CacheUse = CacheUse()
    size_bytes: int = 0  # of the message

    @property
    def resumed_tokens(self) -> int:
        """Tokens of all answers that were drawn elsewhere."""
        return sum(len(answer.output_ids) for answer in self.answers)

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's logprobs are still to be told: they come before any token."""
        return self.sampling.prompt_logprobs is not None and not self.resumed_tokens

    def is_whole(self, index: int) -> bool:
        """Whether nothing is left to draw of an answer: who drew its last token could not say so any more."""
        output_ids = self.answers[index].output_ids
        return bool(output_ids) and (self.ended_by_stop_id(index) or len(output_ids) == self.max_tokens)

    def ended_by_stop_id(self, index: int) -> bool:
        output_ids = self.answers[index].output_ids
        return bool(output_ids) and output_ids[-1] in self.sampling.stop_token_ids


def read_generate(
    request: scheduler_pb2.SchedulerServiceGenerateRequest,
    *,
    caller: Caller,
    model: ServedModel,
    policy: LimitPolicy,
    deadline_left_ns: int | None,
    draw_seed: Callable[[], int],
) -> Admission:
    """The admission that a message asks for.

    Raises InvalidArgument or Unimplemented naming the field; DeadlineExceeded where the time is already up; Aborted
    where an answer is to go on that was begun with other numerics.
    """
    cache = read_cache(request.cache)
    prompt = read_prompt(_prompt_ids(request), model)
    n = wire_sampling.answers_from_proto(request.sampling)
    resumed = request.HasField("resume")
    answers = _resumed(request, caller, len(prompt), model, n) if resumed else (Begun(),) * n
    max_tokens = _max_tokens(request.sampling, len(prompt), model, policy.default_max_tokens)
    longest = max(len(answer.output_ids) for answer in answers)
    if max_tokens is not None and longest > max_tokens:
        raise InvalidArgument(
            f"resume.output_ids has {longest} tokens, more than max_tokens, {max_tokens}",
            field="resume.output_ids",
            limit=max_tokens,
        )
    if len(prompt) + longest == model.max_model_len:
        max_tokens = longest  # the context is full
    sampling = _sampling(request.sampling, model, max_tokens, draw_seed)
    if sampling.prompt_logprobs is not None and not model.scores_prompts:
        raise Unimplemented("sampling.prompt_logprobs: the executors here give none", field="sampling.prompt_logprobs")
    effective = _effective(request.limits, policy)
    limits = _remaining(effective, request.elapsed_ns, deadline_left_ns)
    return Admission(
        *(caller, prompt, sampling, max_tokens, limits, effective, answers, resumed, cache), request.ByteSize()
    )


def read_cache(cache: common_pb2.CacheControl) -> CacheUse:
    """Raises InvalidArgument naming the field."""
    if len(cache.salt.encode()) > MAX_SALT_BYTES:
        raise InvalidArgument(
            f"cache.salt has {len(cache.salt.encode())} bytes; at most {MAX_SALT_BYTES} are allowed",
            field="cache.salt",
            limit=MAX_SALT_BYTES,
        )
    return CacheUse(cache.salt if cache.HasField("salt") else None, cache.bypass)


def _prompt_ids(request: scheduler_pb2.SchedulerServiceGenerateRequest) -> Sequence[int]:
    """A resumed request may carry its prompt in `resume` alone."""
    if not request.resume.prompt_ids:
        return request.prompt_ids
    if request.prompt_ids and request.prompt_ids != request.resume.prompt_ids:
        raise InvalidArgument("resume.prompt_ids differs from prompt_ids", field="resume.prompt_ids")
    return request.resume.prompt_ids


def _resumed(
    request: scheduler_pb2.SchedulerServiceGenerateRequest, caller: Caller, prompt_len: int, model: ServedModel, n: int
) -> tuple[Begun, ...]:
    """What another server drew, once all is there that makes going on exact."""
    resume = request.resume
    if not request.sampling.HasField("seed"):
        raise InvalidArgument("resume needs sampling.seed, as told by Accepted", field="sampling.seed")
    if caller.attempt < 2:
        raise InvalidArgument(
            f"context.attempt is {caller.attempt}; to resume is a further attempt, so it must be at least 2",
            field="context.attempt",
            limit=2,
        )
    if resume.numerics != model.numerics:
        raise Aborted(
            f"the answer was begun with numerics {resume.numerics or 'unnamed'}, and {model.numerics} are served here",
            reason="NUMERICS_CHANGED",
            field="resume.numerics",
        )
    if len(resume.others) != n - 1:
        raise InvalidArgument(
            f"resume.others has {len(resume.others)} answers; with sampling.n {n} it must have {n - 1}",
            field="resume.others",
            limit=n - 1,
        )
    first = _begun("resume", resume, prompt_len, model)
    others = (_begun(f"resume.others[{at}]", one, prompt_len, model) for at, one in enumerate(resume.others))
    answers = (first, *others)
    if all(answer.told for answer in answers):
        raise InvalidArgument("resume: every answer has ended, so nothing is left to come", field="resume.finished")
    return answers


def _begun(
    path: str, answer: common_pb2.Resume | common_pb2.ResumedAnswer, prompt_len: int, model: ServedModel
) -> Begun:
    field, room = f"{path}.output_ids", model.max_model_len - prompt_len
    if len(answer.output_ids) > room:
        raise InvalidArgument(
            f"{field} has {len(answer.output_ids)} tokens; behind a prompt of {prompt_len} tokens a context "
            f"of {model.max_model_len} holds {room}",
            field=field,
            limit=room,
        )
    output = tuple(answer.output_ids)
    _check_ids(field, output, model)
    return Begun(output, answer.finished)


def read_prompt(prompt_ids: Sequence[int], model: ServedModel) -> tuple[int, ...]:
    if not prompt_ids:
        raise InvalidArgument("prompt_ids is empty; at least 1 token is needed", field="prompt_ids", limit=1)
    if len(prompt_ids) >= model.max_model_len:
        raise InvalidArgument(
            f"prompt_ids has {len(prompt_ids)} tokens; the context holds {model.max_model_len}, "
            "prompt and output together",
            reason="CONTEXT_LENGTH_EXCEEDED",
            field="prompt_ids",
            limit=model.max_model_len - 1,
        )
    prompt = tuple(prompt_ids)
    _check_ids("prompt_ids", prompt, model)
    return prompt


def _check_ids(field: str, token_ids: Sequence[int], model: ServedModel) -> None:
    for index, token_id in enumerate(token_ids):
        if token_id >= model.vocab_size:
            raise InvalidArgument(
                f"{field}[{index}] is {token_id}; the vocabulary has {model.vocab_size} tokens",
                field=field,
                limit=model.vocab_size - 1,
            )


def _max_tokens(
    sampling: common_pb2.SamplingParams, prompt_len: int, model: ServedModel, default: int | None
) -> int | None:
    room = model.max_model_len - prompt_len
    if not sampling.HasField("max_tokens"):
        return None if default is None else min(default, room)
    if not 1 <= sampling.max_tokens <= room:
        raise InvalidArgument(
            f"sampling.max_tokens is {sampling.max_tokens}; with a prompt of {prompt_len} tokens in a context of "
            f"{model.max_model_len} it must be 1 to {room}",
            field="sampling.max_tokens",
            limit=room,
        )
    return sampling.max_tokens


def _sampling(
    sampling: common_pb2.SamplingParams, model: ServedModel, max_tokens: int | None, draw_seed: Callable[[], int]
) -> SamplingParams:
    params = wire_sampling.sampling_from_proto(sampling, vocab_size=model.vocab_size)
    if params.grammar is not None and not model.grammars:
        raise Unimplemented("sampling.grammar is not served by the executors here", field="sampling.grammar")
    if max_tokens is not None and params.min_tokens > max_tokens:
        raise InvalidArgument(
            f"sampling.min_tokens is {params.min_tokens}; it can be at most max_tokens, {max_tokens}",
            field="sampling.min_tokens",
            limit=max_tokens,
        )
    own_ends = () if sampling.ignore_eos else model.eos_token_ids
    return replace(
        params,
        stop_token_ids=tuple(dict.fromkeys((*own_ends, *params.stop_token_ids))),
        top_k=min(params.top_k, model.vocab_size),
        seed=params.seed if sampling.HasField("seed") else draw_seed(),
    )


def _effective(asked: common_pb2.TimeLimits, policy: LimitPolicy) -> Limits:
    def choose(field: str) -> int | None:
        default, maximum = getattr(policy.default, field), getattr(policy.maximum, field)
        if not asked.HasField(field):  # type: ignore[arg-type]
            return _smaller(default, maximum)
        value = int(getattr(asked, field))
        if value == 0:
            raise InvalidArgument(f"limits.{field} must be at least 1 ns", field=f"limits.{field}", limit=1)
        return _smaller(value, maximum)

    return Limits(
        queue_ns=choose("queue_ns"),
        first_token_ns=choose("first_token_ns"),
        between_tokens_ns=choose("between_tokens_ns"),
        total_ns=choose("total_ns"),
    )


def _remaining(effective: Limits, elapsed_ns: int, deadline_left_ns: int | None) -> Limits:
    """What is left of the limits: time spent before counts, and so does the call's own deadline, less a margin that
    lets the answer still arrive."""
    if deadline_left_ns is not None:
        deadline_left_ns = keep_margin(deadline_left_ns)
    first_token = None if effective.first_token_ns is None else effective.first_token_ns - elapsed_ns
    total = None if effective.total_ns is None else effective.total_ns - elapsed_ns
    total = _smaller(total, deadline_left_ns)
    for kind, left in (("total", total), ("first_token", first_token)):
        if left is not None and left <= 0:
            raise DeadlineExceeded(
                f"the {kind} time limit had passed when the request came",
                reason="TIME_LIMIT",
                metadata={"limit_kind": kind, "phase": "queue"},
            )
    return Limits(effective.queue_ns, first_token, effective.between_tokens_ns, total)


def _smaller(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return one if other is None else other
    return min(one, other)
