"""Prompts of an exact number of tokens, each different, always the same for a seed.

A prompt is an opener and words that the server's tokenizer takes as one token each; which they are is found with
nothing but a count of a text's tokens. Owns the randomness of prompts. Knows no server.
"""

import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from services.bench.words import OPENER, WORDS
from services.simulate.load import Request
from services.simulate.traces import MOONCAKE_BLOCK

Count = Callable[[str], Awaitable[int]]
"""Tokens of a text as a prompt, with all that the server puts around it."""

FEWEST_WORDS: Final = 32


class PromptError(ValueError):
    """Prompts of this length can't be made for this server."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """overhead: tokens of a prompt besides its words: the opener, and what the server puts around. shared: tokens that
    all prompts begin with."""

    words: tuple[str, ...]
    overhead: int
    seed: int
    shared: int = 0

    def check(self, length: int) -> None:
        if length < max(self.overhead, self.shared):
            raise PromptError(
                f"a prompt of {length} tokens can't be made: {self.overhead} go to what each begins with, "
                f"{self.shared} are to be shared"
            )

    def text(self, key: str, request: Request) -> str:
        """key: names the request, so that no two have the same words. A trace's equal blocks get equal words.

        Raises PromptError where the length is too small.
        """
        self.check(request.prompt_len)
        count = request.prompt_len - self.overhead
        common = max(0, self.shared - self.overhead)
        sources = [islice(self._words("shared"), common), self._words(key)]
        if request.block_ids:
            sources = [self._block(number, block) for number, block in enumerate(request.block_ids)]
        words = islice((word for source in sources for word in source), count)
        return " ".join([OPENER, *words])

    def _words(self, key: str) -> Iterator[str]:
        source = random.Random(f"{self.seed}/{key}")
        while True:
            yield source.choice(self.words)

    def _block(self, number: int, block: int) -> Iterator[str]:
        """The opener and what is around count as the first block's."""
        return islice(self._words(f"block/{block}"), max(0, MOONCAKE_BLOCK - (0 if number else self.overhead)))


async def make_prompts(count: Count, seed: int, shared: int = 0, words: Sequence[str] = WORDS) -> Prompts:
    """Raises PromptError where too few words are single tokens, or where counts don't add up."""
    overhead = await count(OPENER)
    usable = await _single(count, overhead, words)
    if len(usable) < FEWEST_WORDS:
        raise PromptError(
            f"the server's tokenizer takes {len(usable)} of {len(words)} words as one token each; "
            f"{FEWEST_WORDS} are needed to make prompts of an exact length"
        )
    made = Prompts(tuple(usable), overhead, seed, shared)
    wanted = overhead + 2 * FEWEST_WORDS
    found = await count(made.text("probe", Request(0, wanted, 1)))
    if found != wanted:
        raise PromptError(f"a prompt made for {wanted} tokens has {found} by the server's count")
    return made


async def _single(count: Count, overhead: int, words: Sequence[str]) -> list[str]:
    """Those that add one token each: asked together, and by halves where they don't."""
    if not words or await count(" ".join([OPENER, *words])) == overhead + len(words):
        return list(words)
    if len(words) == 1:
        return []
    half = len(words) // 2
    return [*await _single(count, overhead, words[:half]), *await _single(count, overhead, words[half:])]
