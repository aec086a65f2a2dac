"""A transcript to the JSON that OpenAI's clients read: whole answers and chunks.

Pure. Owns how an event looks on the two endpoints, a Style each. Invariant: the chunks' texts joined are the text of
the whole answer, and the last usage is the same in both.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from services.gateway import shapes
from services.gateway.transcript import FINISH_REASONS, Transcript
from tercet.v1 import tokenizer_pb2

LOWEST_LOGPROB: Final = -9999.0  # stands for minus infinity, which JSON cannot write


@dataclass(frozen=True, slots=True)
class Frame:
    """What all chunks of one reply share. created: seconds since 1970."""

    request_id: str
    created: int
    model: str
    fingerprint: str | None


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of an answer's tokens. first: the prompt's first token, which has none, where the prompt is echoed."""

    rows: Sequence[tokenizer_pb2.TextLogprobs]
    first: tokenizer_pb2.TextLogprob | None = None


@dataclass(frozen=True, slots=True)
class Style:
    """How one endpoint writes.

    prompt_parameter: what its requests call the prompt. whole: (index, text, logprobs, reason). piece: (index, text,
    logprobs, whether it is the answer's first, characters before it). end: (index, reason, whether nothing came
    before).
    """

    prompt_parameter: Literal["messages", "prompt"]
    id_prefix: str
    whole_object: Literal["chat.completion", "text_completion"]
    chunk_object: Literal["chat.completion.chunk", "text_completion"]
    whole: Callable[[int, str, Logprobs | None, shapes.FinishReason], shapes.Choice]
    piece: Callable[[int, str, Logprobs | None, bool, int], shapes.Choice]
    end: Callable[[int, shapes.FinishReason, bool], shapes.Choice]


def frame_of(transcript: Transcript, request_id: str, created: int) -> Frame:
    accepted = transcript.accepted or tokenizer_pb2.Accepted()
    return Frame(request_id, created, accepted.model, accepted.numerics or None)


def whole(style: Style, frame: Frame, transcript: Transcript, *, logprobs: bool, echo: bool = False) -> shapes.Reply:
    """The reply of a request that does not stream. The transcript is complete."""
    choices = [
        style.whole(
            index,
            answer.text,
            _with_prompt(transcript, answer.logprobs, echo=echo) if logprobs else None,
            _reason(transcript, answer.finished),
        )
        for index, answer in enumerate(transcript.answers)
        if answer.finished is not None
    ]
    reply = _reply(style.id_prefix, style.whole_object, frame, choices)
    reply["usage"] = final_usage(transcript)
    return reply


def delta_chunk(
    style: Style,
    frame: Frame,
    transcript: Transcript,
    delta: tokenizer_pb2.TextDelta,
    *,
    first: bool,
    logprobs: bool,
    echo: bool = False,
) -> shapes.Reply:
    """The chunk of one delta that was applied. first: no chunk of this answer was sent before; an echoed prompt's
    logprobs ride with it."""
    offset = transcript.answers[delta.index].characters - len(delta.text)
    rows = _with_prompt(transcript, delta.logprobs, echo=echo and first) if logprobs else None
    choice = style.piece(delta.index, delta.text, rows, first, offset)
    return _reply(style.id_prefix, style.chunk_object, frame, [choice])


def end_chunk(
    style: Style, frame: Frame, transcript: Transcript, finished: tokenizer_pb2.Finished, *, first: bool
) -> shapes.Reply:
    choice = style.end(finished.index, _reason(transcript, finished), first)
    return _reply(style.id_prefix, style.chunk_object, frame, [choice])


def usage_chunk(style: Style, frame: Frame, transcript: Transcript) -> shapes.Reply:
    """The last chunk of a stream whose caller asked for usage: no choices."""
    reply = _reply(style.id_prefix, style.chunk_object, frame, [])
    reply["usage"] = final_usage(transcript)
    return reply


def running_usage(transcript: Transcript) -> shapes.Usage:
    """Tokens so far; what came from the prefix cache is known at the end only."""
    streamed = transcript.streamed_tokens
    return {
        "prompt_tokens": transcript.prompt_tokens,
        "completion_tokens": streamed,
        "total_tokens": transcript.prompt_tokens + streamed,
    }


def final_usage(transcript: Transcript) -> shapes.Usage:
    """Of all answers: the prompt once, the delivered tokens added up. Cached is what every answer found so: what the
    others took from the first one was computed for this request."""
    usages = [answer.finished.usage for answer in transcript.answers if answer.finished is not None]
    prompt = max((usage.prompt_tokens for usage in usages), default=transcript.prompt_tokens)
    delivered = 0 if transcript.prompt_only else sum(usage.delivered_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": delivered,
        "total_tokens": prompt + delivered,
        "prompt_tokens_details": {"cached_tokens": min((usage.cached_tokens for usage in usages), default=0)},
    }


def finish_reason(finished: tokenizer_pb2.Finished) -> shapes.FinishReason:
    return FINISH_REASONS[finished.reason]


def _reason(transcript: Transcript, finished: tokenizer_pb2.Finished) -> shapes.FinishReason:
    """Where only the prompt was wanted, max_tokens was 0: whatever the dropped token is, the length was reached."""
    reason = finish_reason(finished)
    return "length" if transcript.prompt_only and reason == "stop" else reason


def _with_prompt(transcript: Transcript, rows: Sequence[tokenizer_pb2.TextLogprobs], *, echo: bool) -> Logprobs:
    if not echo:
        return Logprobs(rows)
    return Logprobs((*transcript.prompt_logprobs, *rows), transcript.prompt_first)


def model_card(description: tokenizer_pb2.TokenizerServiceDescribeResponse, created: int) -> shapes.Model:
    card: shapes.Model = {
        "id": description.model.name,
        "object": "model",
        "created": created,
        "owned_by": "tercet",
    }
    if description.model.max_model_len:
        card["max_model_len"] = description.model.max_model_len
    return card


def _reply(
    prefix: str,
    kind: Literal["chat.completion", "chat.completion.chunk", "text_completion"],
    frame: Frame,
    choices: list[shapes.Choice],
) -> shapes.Reply:
    return {
        "id": f"{prefix}-{frame.request_id}",
        "object": kind,
        "created": frame.created,
        "model": frame.model,
        "system_fingerprint": frame.fingerprint,
        "choices": choices,
    }


def _chat_whole(index: int, text: str, logprobs: Logprobs | None, reason: shapes.FinishReason) -> shapes.ChatChoice:
    return {
        "index": index,
        "message": {"role": "assistant", "content": text, "refusal": None},
        "logprobs": _chat_logprobs(logprobs),
        "finish_reason": reason,
    }


def _chat_piece(index: int, text: str, logprobs: Logprobs | None, first: bool, offset: int) -> shapes.ChatChunkChoice:
    delta: shapes.Delta = {"role": "assistant", "content": text} if first else {"content": text}
    return {"index": index, "delta": delta, "logprobs": _chat_logprobs(logprobs), "finish_reason": None}


def _chat_end(index: int, reason: shapes.FinishReason, first: bool) -> shapes.ChatChunkChoice:
    delta: shapes.Delta = {"role": "assistant", "content": ""} if first else {}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _completion_whole(
    index: int, text: str, logprobs: Logprobs | None, reason: shapes.FinishReason
) -> shapes.CompletionChoice:
    return {
        "index": index,
        "text": text,
        "logprobs": _completion_logprobs(logprobs, 0),
        "finish_reason": reason,
    }


def _completion_piece(
    index: int, text: str, logprobs: Logprobs | None, first: bool, offset: int
) -> shapes.CompletionChoice:
    return {
        "index": index,
        "text": text,
        "logprobs": _completion_logprobs(logprobs, offset),
        "finish_reason": None,
    }


def _completion_end(index: int, reason: shapes.FinishReason, first: bool) -> shapes.CompletionChoice:
    return {"index": index, "text": "", "logprobs": None, "finish_reason": reason}


def _chat_logprobs(logprobs: Logprobs | None) -> shapes.ChatLogprobs | None:
    if logprobs is None:
        return None
    content: list[shapes.TokenLogprob] = [
        {**_top_logprob(entry.drawn), "top_logprobs": [_top_logprob(top) for top in entry.top]}
        for entry in logprobs.rows
    ]
    return {"content": content, "refusal": None}


def _top_logprob(entry: tokenizer_pb2.TextLogprob) -> shapes.TopLogprob:
    return {"token": entry.text, "logprob": _finite(entry.logprob), "bytes": list(entry.bytes)}


def _completion_logprobs(logprobs: Logprobs | None, offset: int) -> shapes.CompletionLogprobs | None:
    """text_offset: characters of the tokens' own texts, which at a split character differ from the deltas'. The first
    token of an echoed prompt has null for its logprobs, as OpenAI had it."""
    if logprobs is None:
        return None
    rows, first = logprobs.rows, logprobs.first
    tokens = [*([] if first is None else [first.text]), *(entry.drawn.text for entry in rows)]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    nothing: list[None] = [] if first is None else [None]
    return {
        "tokens": tokens,
        "token_logprobs": [*nothing, *(_finite(entry.drawn.logprob) for entry in rows)],
        "top_logprobs": [
            *nothing,
            *({top.text: _finite(top.logprob) for top in reversed(entry.top)} for entry in rows),
        ],
        "text_offset": offsets,
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


CHAT: Final = Style(
    "messages", "chatcmpl", "chat.completion", "chat.completion.chunk", _chat_whole, _chat_piece, _chat_end
)
COMPLETION: Final = Style(
    "prompt", "cmpl", "text_completion", "text_completion", _completion_whole, _completion_piece, _completion_end
)
