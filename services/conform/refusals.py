"""Requests with one thing wrong each, and how a scheduler must refuse them."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from services.conform.asking import SHORT, Request, Scheduler, generate, request
from services.conform.kit import require_field, stream_refusal

INVALID: Final = grpc.StatusCode.INVALID_ARGUMENT

Spoil = Callable[[Scheduler, Request], None]


def _sampling(**values: Any) -> Spoil:
    def spoil(scheduler: Scheduler, message: Request) -> None:
        for name, value in values.items():
            setattr(message.sampling, name, value)

    return spoil


def _no_prompt(scheduler: Scheduler, message: Request) -> None:
    message.ClearField("prompt_ids")


def _token_outside(scheduler: Scheduler, message: Request) -> None:
    message.prompt_ids[0] = scheduler.model.vocab_size


def _too_long(scheduler: Scheduler, message: Request) -> None:
    message.prompt_ids[:] = [message.prompt_ids[0]] * scheduler.model.max_model_len


def _too_many(scheduler: Scheduler, message: Request) -> None:
    message.sampling.max_tokens = scheduler.model.max_model_len


def _stop_outside(scheduler: Scheduler, message: Request) -> None:
    message.sampling.stop_token_ids.append(scheduler.model.vocab_size)


def _bias(scheduler: Scheduler, message: Request) -> None:
    message.sampling.logit_bias.add(token_id=1, bias=float("nan"))


def _id(scheduler: Scheduler, message: Request) -> None:
    message.context.request_id = "not an id"


def _priority(scheduler: Scheduler, message: Request) -> None:
    message.context.priority = 101


def _attempt(scheduler: Scheduler, message: Request) -> None:
    message.context.attempt = 0


def _no_time(scheduler: Scheduler, message: Request) -> None:
    message.limits.total_ns = 0


# What is wrong, the field that the refusal must name (a part of its path), how to make it so.
BAD: Final[dict[str, tuple[str, str, Spoil]]] = {
    "prompt-empty": ("an empty prompt", "prompt", _no_prompt),
    "prompt-token": ("a prompt with a token outside the vocabulary", "prompt", _token_outside),
    "prompt-long": ("a prompt as long as the context", "prompt", _too_long),
    "max-tokens-0": ("max_tokens 0", "max_tokens", _sampling(max_tokens=0)),
    "max-tokens-most": ("a prompt and max_tokens beyond the context", "max_tokens", _too_many),
    "temperature": ("temperature -1", "temperature", _sampling(temperature=-1.0)),
    "temperature-nan": ("a temperature that is no number", "temperature", _sampling(temperature=float("nan"))),
    "top-p": ("top_p 0", "top_p", _sampling(top_p=0.0)),
    "min-p": ("min_p 2", "min_p", _sampling(min_p=2.0)),
    "repetition": ("repetition_penalty 0", "repetition_penalty", _sampling(repetition_penalty=0.0)),
    "presence": ("presence_penalty 3", "presence_penalty", _sampling(presence_penalty=3.0)),
    "min-tokens": ("min_tokens above max_tokens", "min_tokens", _sampling(min_tokens=SHORT + 1)),
    "n-0": ("n 0", "n", _sampling(n=0)),
    "logprobs": ("logprobs 21", "logprobs", _sampling(logprobs=21)),
    "bias": ("a logit_bias that is no number", "logit_bias", _bias),
    "stop-token": ("a stop token outside the vocabulary", "stop_token_ids", _stop_outside),
    "request-id": ("a malformed request id", "request_id", _id),
    "priority": ("priority 101", "priority", _priority),
    "attempt": ("attempt 0", "attempt", _attempt),
    "limit-0": ("a time limit of 0", "total", _no_time),
}


def refused_as_bad(what: str, field: str, spoil: Spoil) -> Callable[[Scheduler], Awaitable[None]]:
    async def run(scheduler: Scheduler) -> None:
        message = request(scheduler)
        spoil(scheduler, message)
        found = await stream_refusal(
            generate(scheduler, message), INVALID, grpc.StatusCode.PERMISSION_DENIED, what=what
        )
        require_field(found, field)

    return run
