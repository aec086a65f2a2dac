"""The process in which a grammar that a request brings is compiled for the first time, so that it may take too long,
eat too much or crash without harm.

Owns the form of its messages: a vocabulary, then grammars, one answer for each. Must not know gRPC.
"""

import base64
from collections.abc import Callable

from executor.grammar.engine import GrammarEngine, GrammarVocabulary
from executor.grammar.source import GrammarError, normalised
from executor.step import Grammar, GrammarKind
from services.tokenizer.worker import Message, work


def vocabulary_message(vocabulary: GrammarVocabulary) -> Message:
    tokens = [base64.b64encode(token).decode() for token in vocabulary.tokens]
    return Message({"tokens": tokens, "special_ids": vocabulary.special_ids, "end_ids": vocabulary.end_ids})


def grammar_message(grammar: Grammar) -> Message:
    return Message({"kind": int(grammar.kind), "source": grammar.source})


def _check(engine: GrammarEngine, kind: int, source: str) -> dict[str, str]:
    """The source that executors take, or what is wrong."""
    try:
        grammar = normalised(Grammar(GrammarKind(kind), source))
        engine.compile(grammar)
    except GrammarError as error:
        return {"problem": str(error)}
    except MemoryError:
        return {"problem": "it takes more memory than it may"}
    except RecursionError:
        return {"problem": "it nests too deeply"}
    return {"source": grammar.source}


def _begin(opening: Message) -> Callable[[Message], Message]:
    given = opening.head
    engine = GrammarEngine(
        GrammarVocabulary(
            tokens=tuple(base64.b64decode(token) for token in given["tokens"]),
            special_ids=tuple(given["special_ids"]),
            end_ids=tuple(given["end_ids"]),
        )
    )
    return lambda asked: Message(_check(engine, asked.head["kind"], asked.head["source"]))


if __name__ == "__main__":
    work(_begin)
