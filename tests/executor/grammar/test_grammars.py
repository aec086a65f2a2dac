"""The thread that compiles, its cache and its bounds."""

import threading

import pytest

from executor.grammar.engine import GrammarVocabulary
from executor.grammar.grammars import Grammars, GrammarsBusy
from executor.grammar.source import GrammarError
from executor.step import Grammar, GrammarKind

VOCABULARY = GrammarVocabulary((*(bytes([byte]) for byte in range(256)), b"<end>"), (256,), (256,))


def choice(text: str) -> Grammar:
    return Grammar(GrammarKind.CHOICE, text)


def test_a_grammar_is_compiled_once_while_it_is_kept() -> None:
    grammars = Grammars(lambda: VOCABULARY, kept=2)
    first = grammars.get(choice("a"))
    assert grammars.get(choice("a")) is first
    grammars.get(choice("b"))
    grammars.get(choice("a"))
    grammars.get(choice("c"))  # "b" was used longest ago
    assert grammars.get(choice("a")) is first
    grammars.close()


def test_whoever_asked_is_told() -> None:
    grammars = Grammars(lambda: VOCABULARY)
    told: dict[str, str | None] = {}
    came = threading.Semaphore(0)

    def tell(name: str, problem: str | None) -> None:
        told[name] = problem
        came.release()

    grammars.prepare(choice("a"), lambda problem: tell("good", problem))
    grammars.prepare(choice(""), lambda problem: tell("bad", problem))
    for _ in range(2):
        assert came.acquire(timeout=20)
    assert told["good"] is None
    assert "a choice is empty" in str(told["bad"])
    grammars.close()


def test_no_more_than_so_many_wait() -> None:
    held = threading.Event()

    def vocabulary() -> GrammarVocabulary:
        held.wait(20)
        return VOCABULARY

    grammars = Grammars(vocabulary, waiting=2)
    grammars.prepare(choice("a"), lambda problem: None)
    grammars.prepare(choice("b"), lambda problem: None)
    with pytest.raises(GrammarsBusy, match="2 grammars wait"):
        grammars.prepare(choice("c"), lambda problem: None)
    held.set()
    assert grammars.get(choice("b")).result(20)
    grammars.prepare(choice("c"), lambda problem: None)
    grammars.close()


def test_a_vocabulary_of_no_use_fails_each_grammar() -> None:
    grammars = Grammars(lambda: GrammarVocabulary((b"a",), (), ()))
    with pytest.raises(GrammarError, match="ends an output"):
        grammars.get(choice("a")).result(20)
    grammars.close()
