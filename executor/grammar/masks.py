"""Which tokens each sequence of a step may draw, found while the step computes.

Owns a sequence's place in its grammar. Must not know slots' other state, the wire.
Invariant: a mask follows from the grammar and the output ids that the sequence has now; so preemption, a restart and an
answer that goes on elsewhere give the same masks, without anything being kept for it.
"""

from array import array
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from executor.grammar.engine import Compiled, Matcher, mask_words
from executor.grammar.source import GrammarError


class Matching:
    """One sequence and its grammar. The mask's words stay where they are."""

    def __init__(self, compiled: "Future[Compiled]", vocab_size: int) -> None:
        self.mask = array("I", bytes(4 * mask_words(vocab_size)))
        self._compiled = compiled
        self._matcher: Matcher | None = None
        self._matched = 0  # output tokens

    def fill(self, output_ids: Sequence[int]) -> str | None:
        """Writes the mask of what may follow these ids, of which those of the call before are the beginning.

        Returns why there is none: the grammar is not one, or it does not allow these ids; then nothing is allowed.
        Waits where the grammar is still being compiled.
        """
        try:
            if self._matcher is None:
                self._matcher = self._compiled.result().matcher()
            if self._matched < len(output_ids):
                self._matcher.advance(output_ids[self._matched :])
                self._matched = len(output_ids)
            self._matcher.fill(self.mask)
        except GrammarError as error:
            self.mask[:] = array("I", bytes(4 * len(self.mask)))
            return str(error)
        return None


Wanted = Sequence[tuple[Matching, Sequence[int]]]


class Masks:
    """A thread beside the one that computes."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "masks")

    def begin(self, wanted: Wanted) -> "Future[list[str | None]]":
        """Fills the masks of (sequence, its output ids); the result has the problem of each, mostly None."""
        return self._thread.submit(_fill_all, wanted)


def _fill_all(wanted: Wanted) -> list[str | None]:
    return [matching.fill(output_ids) for matching, output_ids in wanted]
