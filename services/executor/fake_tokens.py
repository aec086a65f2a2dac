"""What a fake executor draws: three pure functions of the visible history, and what tests may expect of them.

Must not know the store that the history was read from. Invariant: equal histories give equal tokens.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from executor.step import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Draw:
    """What a mode draws from. history: the ids of positions 0 .. position - 1; `position` is the drawn token's."""

    history: Sequence[int]
    prompt_len: int
    position: int
    sampling: SamplingParams
    vocab_size: int
    eos_every: int | None
    scripts: Mapping[tuple[int, ...], Sequence[int]]


Mode = Callable[[Draw], int]


def draw_hash(draw: Draw) -> int:
    """A token from a hash of the whole history and the choice. An end id comes only with `eos_every`, once in so many
    draws."""
    choice = draw.sampling.choice
    salt = choice.to_bytes(4, "little") if choice else b""
    digest = hashlib.blake2b(array("I", draw.history).tobytes(), digest_size=16, salt=salt).digest()
    stops = draw.sampling.stop_token_ids
    may_stop = draw.position - draw.prompt_len >= draw.sampling.min_tokens
    if stops and may_stop and draw.eos_every and int.from_bytes(digest[8:], "little") % draw.eos_every == 0:
        return stops[0]
    return _not_a_stop(int.from_bytes(digest[:8], "little"), draw)


def draw_position(draw: Draw) -> int:
    """The position of the last input, modulo the vocabulary. Never skips: stop ids are played as they come."""
    return (draw.position - 1) % draw.vocab_size


def draw_script(draw: Draw) -> int:
    """The next id of the prompt's script (or of the script of the empty prompt), then the first stop id for ever."""
    prompt = tuple(draw.history[: draw.prompt_len])
    script = draw.scripts.get(prompt, draw.scripts.get(()))
    if script is None:
        raise LookupError(f"no script for a prompt of {draw.prompt_len} tokens")
    index = draw.position - draw.prompt_len
    if index < len(script):
        return script[index]
    if not draw.sampling.stop_token_ids:
        raise LookupError(f"the script ends after {len(script)} tokens and the sequence has no stop id")
    return draw.sampling.stop_token_ids[0]


def fake_prompt_logprobs(history: Sequence[int], token_id: int, top: int) -> TokenLogprobs:
    """Of a prompt's token behind `history`: a hash of both. The likeliest are the ids from 0 on."""
    digest = hashlib.blake2b(array("I", (*history, token_id)).tobytes(), digest_size=2).digest()
    drawn = -1.0 - int.from_bytes(digest, "little") / 1024  # exact in 32 bits
    return TokenLogprobs(drawn, tuple((rank, -0.5 * (rank + 1)) for rank in range(top)))


MODES: Final[Mapping[str, Mode]] = MappingProxyType(
    {"script": draw_script, "hash": draw_hash, "positions": draw_position}
)


def _not_a_stop(value: int, draw: Draw) -> int:
    stops = set(draw.sampling.stop_token_ids)
    for step in range(draw.vocab_size):
        token_id = (value + step) % draw.vocab_size
        if token_id not in stops:
            return token_id
    raise LookupError("every id of the vocabulary is a stop id")


def expected_tokens(
    mode: Mode,
    prompt_ids: Iterable[int],
    n: int,
    vocab_size: int,
    *,
    sampling: SamplingParams = SamplingParams(),
    eos_every: int | None = None,
) -> tuple[int, ...]:
    """What a sequence gives if nothing is lost: `n` tokens, or fewer, ended by a stop id."""
    history = list(prompt_ids)
    prompt_len = len(history)
    while len(history) < prompt_len + n:
        token_id = mode(Draw(history, prompt_len, len(history), sampling, vocab_size, eos_every, {}))
        history.append(token_id)
        if token_id in sampling.stop_token_ids:
            break
    return tuple(history[prompt_len:])


def expected_hash_tokens(
    prompt_ids: Iterable[int],
    n: int,
    vocab_size: int,
    *,
    sampling: SamplingParams = SamplingParams(),
    eos_every: int | None = None,
) -> tuple[int, ...]:
    """The continuation in mode "hash"; pass the sampling's stop ids, the model's own among them."""
    return expected_tokens(draw_hash, prompt_ids, n, vocab_size, sampling=sampling, eos_every=eos_every)


def expected_position_tokens(prompt_len: int, n: int, vocab_size: int) -> tuple[int, ...]:
    """The continuation in mode "positions"."""
    return expected_tokens(draw_position, [0] * prompt_len, n, vocab_size)
