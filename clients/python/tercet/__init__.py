"""The Python SDK of Tercet: `Client` and `AsyncClient`.

import tercet

with tercet.Client("localhost:50051") as client:
    for delta in client.chat([{"role": "user", "content": "Who are you?"}], temperature=0):
        print(delta.text, end="", flush=True)
"""

from tercet._async_client import AsyncClient
from tercet._async_stream import AsyncStream
from tercet._client import Client
from tercet._sync_stream import Stream
from tercet.errors import (
    AbortedError,
    AlreadyExistsError,
    DeadlineExceededError,
    ErrorDetails,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    RequestCancelledError,
    ResourceExhaustedError,
    TercetError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from tercet.options import RetryPolicy
from tercet.types import (
    Accepted,
    Answer,
    Delta,
    FinishReason,
    Grammar,
    GrammarKind,
    Logprobs,
    Message,
    RenderedChat,
    SamplingParams,
    ServerDescription,
    TimeLimitKind,
    TimeLimits,
    Timings,
    TokenLogprob,
    Usage,
)

__all__ = [
    "AbortedError",
    "Accepted",
    "AlreadyExistsError",
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "Client",
    "DeadlineExceededError",
    "Delta",
    "ErrorDetails",
    "FailedPreconditionError",
    "FinishReason",
    "Grammar",
    "GrammarKind",
    "InternalError",
    "InvalidArgumentError",
    "Logprobs",
    "Message",
    "NotFoundError",
    "PermissionDeniedError",
    "RenderedChat",
    "RequestCancelledError",
    "ResourceExhaustedError",
    "RetryPolicy",
    "SamplingParams",
    "ServerDescription",
    "Stream",
    "TercetError",
    "TimeLimitKind",
    "TimeLimits",
    "Timings",
    "TokenLogprob",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "Usage",
]
