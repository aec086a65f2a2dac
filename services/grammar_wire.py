"""Grammars over the wire, both directions. Pure.

Invariant: what is no grammar by its kind or size is refused by field.
"""

from typing import Final

from executor.step import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from services.errors import InvalidArgument
from tercet.v1 import common_pb2

_KINDS: Final = {
    common_pb2.GRAMMAR_KIND_JSON_OBJECT: GrammarKind.JSON_OBJECT,
    common_pb2.GRAMMAR_KIND_JSON_SCHEMA: GrammarKind.JSON_SCHEMA,
    common_pb2.GRAMMAR_KIND_REGEX: GrammarKind.REGEX,
    common_pb2.GRAMMAR_KIND_EBNF: GrammarKind.EBNF,
    common_pb2.GRAMMAR_KIND_CHOICE: GrammarKind.CHOICE,
}
_WIRE_KINDS: Final = {kind: wire for wire, kind in _KINDS.items()}


def grammar_to_proto(grammar: Grammar) -> common_pb2.Grammar:
    return common_pb2.Grammar(kind=_WIRE_KINDS[grammar.kind], source=grammar.source)


def grammar_from_proto(message: common_pb2.Grammar, field: str) -> Grammar:
    """Raises InvalidArgument naming `field`.kind or `field`.source."""
    kind = _KINDS.get(message.kind)
    if kind is None:
        raise InvalidArgument(f"{field}.kind is {int(message.kind)}, no kind of grammar", field=f"{field}.kind")
    size = len(message.source.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidArgument(
            f"{field}.source has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed",
            field=f"{field}.source",
            limit=MAX_GRAMMAR_BYTES,
        )
    return Grammar(kind, message.source)


def sampling_grammar(message: common_pb2.SamplingParams, field: str) -> Grammar | None:
    """Of sampling parameters. Raises InvalidArgument, also where it can't be used with what is beside it."""
    if not message.HasField("grammar"):
        return None
    if message.ignore_eos:
        raise InvalidArgument(
            f"{field}.ignore_eos can't be used with {field}.grammar: an output that is complete must end",
            field=f"{field}.ignore_eos",
        )
    return grammar_from_proto(message.grammar, f"{field}.grammar")
