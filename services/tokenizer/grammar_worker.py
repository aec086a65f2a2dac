"""The process in which a grammar that a request brings is compiled for the first time, so that it may take too long,
eat too much or crash without harm.

Reads a vocabulary, then grammars, from standard input; writes one answer for each. It ends when its input does. Must
not know gRPC. A message is its length in 4 bytes, then JSON (of the vocabulary: `pack_vocabulary`).
"""

import base64
import json
import resource
import struct
import sys
from typing import Any, BinaryIO, Final

from executor.grammar.engine import GrammarEngine, GrammarVocabulary
from executor.grammar.source import GrammarError, normalised
from executor.step import Grammar, GrammarKind

MEMORY_BYTES: Final = 2 << 30  # of addresses, the interpreter's own among them
_LENGTH: Final = struct.Struct("=I")


def pack(value: Any) -> bytes:
    raw = json.dumps(value).encode()
    return _LENGTH.pack(len(raw)) + raw


def pack_vocabulary(vocabulary: GrammarVocabulary) -> bytes:
    tokens = [base64.b64encode(token).decode() for token in vocabulary.tokens]
    return pack({"tokens": tokens, "special_ids": vocabulary.special_ids, "end_ids": vocabulary.end_ids})


def pack_grammar(grammar: Grammar) -> bytes:
    return pack({"kind": int(grammar.kind), "source": grammar.source})


def unpack_length(raw: bytes) -> int:
    (length,) = _LENGTH.unpack(raw)
    return int(length)


LENGTH_BYTES: Final = _LENGTH.size


def _read(stream: BinaryIO) -> Any:
    """None at the end."""
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    return json.loads(stream.read(unpack_length(head)))


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


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    given = _read(sys.stdin.buffer)
    engine = GrammarEngine(
        GrammarVocabulary(
            tokens=tuple(base64.b64decode(token) for token in given["tokens"]),
            special_ids=tuple(given["special_ids"]),
            end_ids=tuple(given["end_ids"]),
        )
    )
    while (asked := _read(sys.stdin.buffer)) is not None:
        sys.stdout.buffer.write(pack(_check(engine, asked["kind"], asked["source"])))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
