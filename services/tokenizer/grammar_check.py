"""Whether a request's grammar is one, found by compiling it once in a process that may be killed.

Owns the answers that are kept, and the limits; the process is `workers`'. Must not know what a grammar means.
Invariants: nothing here takes longer than the limit for one grammar, whatever it says; a worker that is killed or dies
refuses the one grammar that it worked on.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from executor.grammar.engine import GrammarVocabulary
from executor.step import Grammar
from services.errors import InvalidArgument, ResourceExhausted, Unimplemented
from services.grammar_wire import grammar_to_proto, sampling_grammar
from services.tokenizer.grammar_worker import grammar_message, vocabulary_message
from services.tokenizer.workers import WorkerDied, WorkerLimits, WorkerNotStarted, Workers, WorkerTooSlow, module
from tercet.v1 import common_pb2

FIELD: Final = "sampling.grammar"
COMMAND: Final = module("services.tokenizer.grammar_worker")


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """compile_s: seconds that one may take. start_s: a worker, with its vocabulary. kept, kept_bytes: answers that are
    remembered. waiting: requests that wait for the worker."""

    compile_s: float = 2.0
    start_s: float = 30.0
    kept: int = 1024
    kept_bytes: int = 16 << 20
    waiting: int = 64


@dataclass(frozen=True, slots=True)
class _Verdict:
    """One of the two."""

    grammar: Grammar | None = None
    problem: str = ""


@dataclass(slots=True)
class GrammarCheck:
    """vocabulary: called when the first grammar comes; None: grammars are not served. One event loop's; `close` it."""

    vocabulary: Callable[[], GrammarVocabulary] | None
    limits: GrammarLimits = GrammarLimits()
    command: tuple[str, ...] = COMMAND
    _kept: "OrderedDict[Grammar, _Verdict]" = field(default_factory=OrderedDict)
    _kept_bytes: int = 0
    _workers: Workers | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _waiting: int = 0

    async def checked(self, sampling: common_pb2.SamplingParams) -> common_pb2.Grammar | None:
        """The grammar as the scheduler takes it; None where there is none. Raises InvalidArgument, ResourceExhausted,
        Unimplemented."""
        grammar = sampling_grammar(sampling, "sampling")
        if grammar is None:
            return None
        verdict = self._kept.get(grammar)
        if verdict is None:
            verdict = await self._judge(grammar)
        else:
            self._kept.move_to_end(grammar)
        if verdict.grammar is None:
            field = f"{FIELD}.source"
            raise InvalidArgument(
                f"{field} cannot be compiled: {verdict.problem}", reason="INVALID_GRAMMAR", field=field
            )
        return grammar_to_proto(verdict.grammar)

    async def close(self) -> None:
        """Ends the worker."""
        if self._workers is not None:
            await self._workers.close()

    async def _judge(self, grammar: Grammar) -> _Verdict:
        if self.vocabulary is None:
            raise Unimplemented(f"{FIELD} is not served here", field=FIELD)
        if self._waiting >= self.limits.waiting:
            raise ResourceExhausted(
                f"{self._waiting} grammars wait to be compiled here",
                reason="GRAMMARS_BUSY",
                field=FIELD,
                limit=self.limits.waiting,
                retry_after_s=self.limits.compile_s,
            )
        self._waiting += 1
        try:
            async with self._turn:
                known = self._kept.get(grammar)  # another request may have brought the same
                if known is None:
                    known = await self._compile(grammar, self.vocabulary)
                    self._keep(grammar, known)
                return known
        finally:
            self._waiting -= 1

    async def _compile(self, grammar: Grammar, vocabulary: Callable[[], GrammarVocabulary]) -> _Verdict:
        if self._workers is None:
            limits = WorkerLimits(self.limits.compile_s, self.limits.start_s, waiting=self.limits.waiting)
            self._workers = Workers(self.command, lambda: vocabulary_message(vocabulary()), limits)
        try:
            answer = await self._workers.ask(grammar_message(grammar))
        except WorkerTooSlow:
            return _Verdict(problem=f"it takes longer than {self.limits.compile_s:g} s")
        except WorkerDied:
            return _Verdict(problem="it is too much for the compiler")
        except WorkerNotStarted as error:
            raise ResourceExhausted(
                "the process that compiles grammars does not start", reason="NO_GRAMMAR_WORKER", field=FIELD
            ) from error
        if "problem" in answer.head:
            return _Verdict(problem=str(answer.head["problem"]))
        return _Verdict(grammar=Grammar(grammar.kind, str(answer.head["source"])))

    def _keep(self, grammar: Grammar, verdict: _Verdict) -> None:
        self._kept[grammar] = verdict
        self._kept_bytes += _size(grammar, verdict)
        while len(self._kept) > self.limits.kept or self._kept_bytes > self.limits.kept_bytes:
            self._kept_bytes -= _size(*self._kept.popitem(last=False))


def _size(grammar: Grammar, verdict: _Verdict) -> int:
    translated = 0 if verdict.grammar is None else len(verdict.grammar.source)
    return len(grammar.source) + translated + len(verdict.problem)
