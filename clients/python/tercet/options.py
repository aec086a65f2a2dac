"""The keyword arguments of the clients and their calls, typed once for both clients.

Owns the names and the checks that need no request; must not know the wire. Invariant: a `Settings` is whole and valid,
and every call has a finite time limit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Required, TypedDict

import grpc

from tercet._target import check_target, is_local
from tercet.errors import ErrorDetails, InvalidArgumentError
from tercet.types import Grammar, SamplingParams, TimeLimits

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

DEFAULT_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a failed call is sent again: on UNAVAILABLE, within the call's `timeout`. After the first delta that takes
    `resume`, see `ClientOptions`.

    attempts: sends at most with nothing delivered in between, 1 for no retry. initial_backoff, max_backoff: seconds; it
    doubles between them, with 20 % jitter, and is never below what the server asks for. resource_exhausted: also retry
    RESOURCE_EXHAUSTED where the server says when to.
    """

    attempts: int = 5
    initial_backoff: float = 0.1
    max_backoff: float = 5.0
    resource_exhausted: bool = False

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise invalid("retry.attempts", f"must be at least 1, not {self.attempts}")
        if not 0 < self.initial_backoff <= self.max_backoff < math.inf:
            raise invalid("retry.initial_backoff", "must be above 0, at most max_backoff, and finite")


class ClientOptions(TypedDict, total=False):
    """Keyword arguments of `Client` and `AsyncClient`.

    timeout: seconds for a call, where the call names none [120]. retry: see `RetryPolicy`. tls: True for gRPC's
    roots, or credentials of your own [False]. api_key: sent as `authorization: Bearer`; refused without TLS unless the
    server is on this machine. plaintext_api_key: True lifts that, for networks that encrypt by themselves [False].
    tenant: of every call, where the call names none. metadata: further headers of every call. resume: a generation
    whose server dies goes on where it was, without loss or repetition; for that the server sends the
    prompt's ids along [True]. tracer_provider: OpenTelemetry's [the global one; without the package nothing is traced].
    """

    timeout: float
    retry: RetryPolicy
    tls: bool | grpc.ChannelCredentials
    api_key: str | None
    plaintext_api_key: bool
    tenant: str | None
    metadata: Mapping[str, str]
    resume: bool
    tracer_provider: "TracerProvider | None"


class CallOptions(TypedDict, total=False):
    """Keyword arguments of every call.

    timeout: seconds for everything, retries included [the client's]. request_id: 1 to 128 of `[A-Za-z0-9._:-]` [drawn].
    tenant: whose quota counts [the client's].
    """

    timeout: float
    request_id: str | None
    tenant: str | None


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as keyword arguments."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    max_tokens: int | None
    min_tokens: int | None
    seed: int | None
    n: int | None
    stop: str | Sequence[str] | None
    include_stop: bool | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    grammar: Grammar | None


class GenerateOptions(SamplingOptions, CallOptions, total=False):
    """Keyword arguments of `generate`.

    sampling: all sampling parameters in one value; keywords beside it win. limits: seconds per phase. priority: -100 to
    100, higher is sooner [0]. cache_salt: the prefix cache is shared only among requests with the same salt, at most
    256 bytes [the tenant]. cache_bypass: use no cached prefix and leave none [False]. model: refuse if another model is
    served [any]. keep_special_tokens: deliver control tokens as text [False]. echo: the prompt's text comes first
    [False]. return_prompt_ids: `Stream.accepted` carries the prompt's ids [where the client's `resume` needs them].
    """

    sampling: SamplingParams
    limits: TimeLimits | None
    priority: int | None
    cache_salt: str | None
    cache_bypass: bool | None
    model: str | None
    keep_special_tokens: bool | None
    echo: bool | None
    return_prompt_ids: bool | None


class RenderOptions(TypedDict, total=False):
    """How messages become a prompt.

    tools: functions that the model may call, in OpenAI's form. add_generation_prompt: False adds no header of the
    answer [True].
    """

    tools: Sequence[Mapping[str, object]] | None
    add_generation_prompt: bool | None


class ChatOptions(GenerateOptions, RenderOptions, total=False):
    """Keyword arguments of `chat`."""


class RenderChatOptions(RenderOptions, CallOptions, total=False):
    """Keyword arguments of `render_chat`."""


class MessageDict(TypedDict, total=False):
    """A message as a dictionary, as the OpenAI clients take it."""

    role: Required[str]
    content: Required[str]
    name: str
    tool_calls: Sequence[Mapping[str, object]]
    tool_call_id: str


@dataclass(frozen=True, slots=True)
class Settings:
    """A client's options, whole and checked; see `ClientOptions`."""

    target: str
    timeout: float = DEFAULT_TIMEOUT_S
    retry: RetryPolicy = RetryPolicy()
    tls: bool | grpc.ChannelCredentials = False
    api_key: str | None = field(default=None, repr=False)
    plaintext_api_key: bool = False
    tenant: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict, repr=False)
    resume: bool = True
    tracer_provider: "TracerProvider | None" = None

    def __post_init__(self) -> None:
        check_target(self.target)
        check_timeout(self.timeout)
        if not isinstance(self.resume, bool):
            raise invalid("resume", f"must be True or False, not {self.resume!r}")
        if self.api_key is not None:
            if not self.api_key or not self.api_key.isascii() or not self.api_key.isprintable():
                raise invalid("api_key", "must be printable ASCII and not empty")
            if self.tls is False and not self.plaintext_api_key and not is_local(self.target):
                raise invalid(
                    "api_key",
                    "would cross the network unencrypted: set tls=True, or plaintext_api_key=True if it does not",
                )
        for key, value in self.metadata.items():
            if key != key.lower() or key.startswith(("grpc-", ":")) or key in RESERVED_METADATA:
                raise invalid("metadata", f"{key!r} is in upper case or reserved")
            if not value.isascii() or not value.isprintable():
                raise invalid("metadata", f"the value of {key!r} is not printable ASCII")


# Set from arguments of their own.
RESERVED_METADATA: Final = frozenset(
    {"authorization", "traceparent", "tracestate", "tercet-request-id", "tercet-tenant", "tercet-priority"}
)


def check_timeout(seconds: object) -> float:
    """`seconds` as a finite float above 0; every call has a deadline, so None is refused too."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise invalid("timeout", f"must be a number of seconds, not {seconds!r}: every call has a deadline")
    if not 0 < seconds < math.inf:
        raise invalid("timeout", f"must be above 0 and finite, not {seconds!r}")
    return float(seconds)


def invalid(name: str, problem: str, limit: object | None = None) -> InvalidArgumentError:
    """The refusal of argument `name`, before anything is sent."""
    details = ErrorDetails(field=name, limit=None if limit is None else str(limit))
    return InvalidArgumentError(f"{name} {problem}", details)
