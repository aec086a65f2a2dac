"""What a client sees of one request, as values. Pure: the times are arguments, in ns of one clock."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise


class Failure(StrEnum):
    """Why a request is not counted as served."""

    TIMEOUT = "timeout"  # the client's limit, or one of the server's
    REFUSED = "refused"  # not taken: nobody there, busy, draining
    INVALID = "invalid"  # the server doesn't take such a request
    FAILED = "failed"  # an error of the server, before the first token
    CUT = "cut"  # the stream ended without its end
    WRONG_COUNT = "wrong count"  # other than the asked number of tokens, in or out


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back.

    arrivals: of each message that carried tokens. tokens: how many each carried; empty where the server doesn't tell.
    prompt_tokens, output_tokens: as the server counts; None: it does not. detail: the failure's own words.
    """

    ended_ns: int
    arrivals: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    failure: Failure | None = None
    detail: str = ""

    @property
    def output(self) -> int:
        """Tokens received; where nobody counts, messages with text are taken for tokens."""
        if self.output_tokens is not None:
            return self.output_tokens
        return sum(self.tokens) if self.tokens else len(self.arrivals)


@dataclass(frozen=True, slots=True)
class Outcome:
    """due_ns: when the request was to be sent: in a closed loop, when its client was free. started_ns: when the client
    came to it. prompt_len: tokens asked for."""

    due_ns: int
    started_ns: int
    prompt_len: int
    reply: Reply

    @property
    def served(self) -> bool:
        return self.reply.failure is None

    @property
    def ttft_ns(self) -> int | None:
        """Time to first token: from due to the first message that carries a token."""
        return self.reply.arrivals[0] - self.due_ns if self.reply.arrivals else None

    @property
    def tpot_ns(self) -> float | None:
        """Time per output token after the first: (last - first) / (tokens - 1), however many a message carries."""
        if self.reply.output < 2 or not self.reply.arrivals:
            return None
        return (self.reply.arrivals[-1] - self.reply.arrivals[0]) / (self.reply.output - 1)

    @property
    def gaps_ns(self) -> list[int]:
        """Inter-token latency as a reader sees it: between one message with tokens and the next."""
        return [after - before for before, after in pairwise(self.reply.arrivals)]

    @property
    def e2e_ns(self) -> int:
        """End to end: from due to the stream's end."""
        return self.reply.ended_ns - self.due_ns


@dataclass(frozen=True, slots=True)
class Piece:
    """A message of a stream as it is read. counted: output tokens so far, where the server tells with each message."""

    at_ns: int
    has_text: bool
    counted: int | None = None


def reply_of(pieces: Sequence[Piece], ended_ns: int, prompt_tokens: int | None, output_tokens: int | None) -> Reply:
    """Which messages carried tokens, and how many.

    Where the server counts with each message, the count decides: text that was held back is no new token, and a token
    may have no text yet. Elsewhere a message with text carries tokens: one each, if their total says so too.
    """
    counting = [piece for piece in pieces if piece.counted is not None]
    arrivals: list[int] = []
    tokens: list[int] = []
    if counting:
        before = 0
        for piece in counting:
            if piece.counted is not None and piece.counted > before:
                arrivals.append(piece.at_ns)
                tokens.append(piece.counted - before)
                before = piece.counted
    else:
        arrivals = [piece.at_ns for piece in pieces if piece.has_text]
        if output_tokens == len(arrivals):
            tokens = [1] * len(arrivals)
    return Reply(ended_ns, tuple(arrivals), tuple(tokens), prompt_tokens, output_tokens)


def checked(reply: Reply, prompt_len: int, output_len: int | None) -> Reply:
    """A whole answer to another prompt, or of another length, is no answer. output_len: None: any is good."""
    if reply.failure is not None:
        return reply
    if reply.prompt_tokens is not None and reply.prompt_tokens != prompt_len:
        detail = f"{reply.prompt_tokens} tokens in, {prompt_len} were sent"
        return replace(reply, failure=Failure.WRONG_COUNT, detail=detail)
    if output_len is not None and reply.output != output_len:
        detail = f"{reply.output} tokens out, {output_len} were asked for"
        return replace(reply, failure=Failure.WRONG_COUNT, detail=detail)
    return reply
