"""Stop strings in a stream of text.

Owns the text that could still become a stop string. Pure. The rule is a function of the whole text, so that
how it was cut into deltas never matters: the match that begins first wins, among those that begin there the
longest. To be sure of that, a match waits while a longer one with an earlier or equal beginning is possible.
Invariant: what is held back begins at the earliest place where a stop string may begin, never before.

The automaton is that of Aho and Corasick (Communications of the ACM 18(6), 1975), stopped leftmost-longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.tokenizer.invalid import InvalidText, require_scalar_values

MAX_STOPS = 32
MAX_STOP_CHARS = 256

_ROOT = 0


@dataclass(frozen=True, slots=True)
class StopHit:
    """A stop string was found.

    Attributes:
        stop: the string.
        start, end: its place in the whole text, in characters.
    """

    stop: str
    start: int
    end: int


class StopMatcher:
    """Lets text through up to the first stop string.

    Args:
        stops: at most `MAX_STOPS` strings of 1 to `MAX_STOP_CHARS` characters; repeats are harmless.
        include_stop: the text let through ends with the stop string instead of before it.

    Raises:
        InvalidText: names `stop` or `stop[i]` and the limit.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        _validate(stops)
        self._begin_with(_Automaton(stops), include_stop)

    def fresh(self) -> "StopMatcher":
        """One for another text, with the same stop strings; what was built of them is shared."""
        matcher = StopMatcher.__new__(StopMatcher)
        matcher._begin_with(self._automaton, self._include_stop)
        return matcher

    def _begin_with(self, automaton: "_Automaton", include_stop: bool) -> None:
        self._automaton = automaton
        self._include_stop = include_stop
        self._state = _ROOT
        self._held = ""
        self._begin = 0  # place of the first held character
        self._position = 0  # characters matched against
        self._best: StopHit | None = None
        self._is_over = False

    def push(self, text: str, *, is_armed: bool = True) -> tuple[str, StopHit | None]:
        """Take the next text; give what is certain to lie before any stop string.

        Args:
            text: the next characters.
            is_armed: False lets pass every stop string that ends in this text (`min_tokens`).

        Returns:
            The text let through, and the hit that ends it. After a hit nothing more comes through.
        """
        if self._is_over:
            return "", None
        self._held += text
        for char in text:
            self._step(char, is_armed)
            if self._best is not None and not self._can_better(self._best):
                return self._finish(self._best)
        begin = self._position - self._automaton.depth[self._state]
        if self._best is not None:
            begin = min(begin, self._best.start)
        return self._release(begin), None

    def flush(self) -> tuple[str, StopHit | None]:
        """The text is at its end: settle a waiting match, or let through what was held back."""
        if self._is_over:
            return "", None
        if self._best is not None:
            return self._finish(self._best)
        self._is_over = True
        return self._release(self._position), None

    def _step(self, char: str, is_armed: bool) -> None:
        self._state = self._automaton.next(self._state, char)
        self._position += 1
        stop = self._automaton.longest[self._state]
        if stop is None or not is_armed:
            return
        start = self._position - len(stop)
        if self._best is None or start <= self._best.start:
            self._best = StopHit(stop, start, self._position)

    def _can_better(self, best: StopHit) -> bool:
        """Whether some stop string that begins at or before the best one is still being matched."""
        state = self._state
        while self._automaton.depth[state] >= self._position - best.start and state != _ROOT:
            if self._automaton.children[state]:
                return True
            state = self._automaton.fail[state]
        return False

    def _finish(self, hit: StopHit) -> tuple[str, StopHit]:
        self._is_over = True
        text = self._release(hit.end if self._include_stop else hit.start)
        self._held = ""
        return text, hit

    def _release(self, end: int) -> str:
        count = end - self._begin
        text, self._held = self._held[:count], self._held[count:]
        self._begin += count
        return text


class _Automaton:
    """Nodes are the prefixes of the stop strings; node 0 is the empty one.

    Attributes:
        children: per node, character -> longer node.
        depth: per node, its length.
        fail: per node, its longest proper suffix that is a node.
        longest: per node, the longest stop string that it ends with, or None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.fail = [_ROOT]
        self.longest: list[str | None] = [None]
        for stop in stops:
            node = _ROOT
            for char in stop:
                node = self.children[node].get(char) or self._grow(node, char)
            self.longest[node] = stop
        self._link()

    def next(self, node: int, char: str) -> int:
        while node != _ROOT and char not in self.children[node]:
            node = self.fail[node]
        return self.children[node].get(char, _ROOT)

    def _grow(self, parent: int, char: str) -> int:
        node = len(self.depth)
        self.children[parent][char] = node
        self.children.append({})
        self.depth.append(self.depth[parent] + 1)
        self.fail.append(_ROOT)
        self.longest.append(None)
        return node

    def _link(self) -> None:
        # Breadth first, so that a node's shorter suffixes are linked before it.
        level = [_ROOT]
        while level:
            below = []
            for parent in level:
                for char, node in self.children[parent].items():
                    if parent != _ROOT:
                        self.fail[node] = self.next(self.fail[parent], char)
                    if self.longest[node] is None:
                        self.longest[node] = self.longest[self.fail[node]]
                    below.append(node)
            level = below


def _validate(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidText("stop", f"{len(stops)} stop strings; at most {MAX_STOPS} (MAX_STOPS) are accepted")
    for index, stop in enumerate(stops):
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise InvalidText(
                f"stop[{index}]",
                f"has {len(stop)} characters; 1 to {MAX_STOP_CHARS} (MAX_STOP_CHARS) are accepted",
            )
        require_scalar_values(f"stop[{index}]", stop)
