"""One prompt through a running chain, its answer streamed to a terminal. Shared by `tercet run` and `tercet demo`."""

from dataclasses import dataclass
from typing import TextIO

from opentelemetry.trace import TracerProvider

import tercet
from services.rpc import PLAIN, Outgoing


@dataclass(frozen=True, slots=True)
class Question:
    """system: None leaves it to the model's template."""

    prompt: str
    sampling: tercet.SamplingParams
    system: str | None = None
    timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Told:
    """What the stream knew at its end; None where the server didn't say."""

    request_id: str | None
    finish: tercet.FinishReason | None
    usage: tercet.Usage | None
    timings: tercet.Timings | None


async def ask(
    target: str,
    question: Question,
    out: TextIO,
    tracer_provider: TracerProvider | None = None,
    outgoing: Outgoing = PLAIN,
) -> Told:
    """Raises tercet.TercetError."""
    messages = [tercet.Message("user", question.prompt)]
    if question.system is not None:
        messages.insert(0, tercet.Message("system", question.system))
    async with (
        tercet.AsyncClient(
            target,
            timeout=question.timeout_s,
            tracer_provider=tracer_provider,
            tls=outgoing.tls or False,
            api_key=outgoing.key(),
        ) as client,
        client.chat(messages, sampling=question.sampling) as stream,
    ):
        async for delta in stream:
            print(delta.text, end="", flush=True, file=out)
        print(file=out)
        return Told(stream.request_id, stream.finish_reason, stream.usage, stream.timings)
