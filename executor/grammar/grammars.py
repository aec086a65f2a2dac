"""The grammars of an executor: compiled once, in a thread of their own, and kept for a while.

Owns that thread and the cache. Must not know slots, steps, the wire. Invariant: a step never waits for a grammar that
was asked for, and answered, before the step came, unless so many others came in between that it was dropped.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from executor.grammar.engine import Compiled, GrammarEngine, GrammarVocabulary
from executor.grammar.source import GrammarError
from executor.step import Grammar

KEPT: Final = 64
WAITING: Final = 256


class GrammarsBusy(RuntimeError):
    """So many grammars wait to be compiled that one more is not taken."""


class Grammars:
    """vocabulary: called once, in the thread. kept: compiled grammars, those used last. Any thread may call."""

    def __init__(self, vocabulary: Callable[[], GrammarVocabulary], kept: int = KEPT, waiting: int = WAITING) -> None:
        self._kept, self._most_waiting = kept, waiting
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._engine = self._thread.submit(lambda: GrammarEngine(vocabulary()))

    def get(self, grammar: Grammar) -> "Future[Compiled]":
        """The grammar, or GrammarError, as soon as it is compiled."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                found = self._compiled[grammar] = self._thread.submit(self._compile, grammar)
                while len(self._compiled) > self._kept:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return found

    def prepare(self, grammar: Grammar, done: Callable[[str | None], None]) -> None:
        """`done` is told None once the grammar is ready, or what is wrong with it; in whichever thread.

        Raises GrammarsBusy.
        """
        if self.waiting >= self._most_waiting:
            raise GrammarsBusy(f"{self._most_waiting} grammars wait to be compiled")
        self.get(grammar).add_done_callback(lambda future: done(_problem(future)))

    @property
    def waiting(self) -> int:
        with self._lock:
            return sum(not future.done() for future in self._compiled.values())

    def close(self) -> None:
        """Takes nothing more; what waits is given up."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> Compiled:
        try:
            return self._engine.result().compile(grammar)
        except GrammarError:
            raise
        except Exception as error:  # the engine's or the vocabulary's defect: of this grammar's requests alone
            raise GrammarError(f"it cannot be compiled here: {type(error).__name__}: {error}") from error


def _problem(future: "Future[Compiled]") -> str | None:
    if future.cancelled():
        return "the executor is about to end"
    error = future.exception()
    return None if error is None else str(error)
