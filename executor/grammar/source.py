"""A grammar as a request brings it, to the one language that llguidance compiles.

Owns what each kind means, and the bound of its source. Must not know vocabularies, threads, the wire.
Invariant: equal grammars give equal definitions, so what an edge has checked is what an executor compiles.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Final

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from executor.step import MAX_GRAMMAR_BYTES, Grammar, GrammarKind

MAX_CHOICES: Final = 4096

# JSON is written without white space between its parts: a model that may write white space can write it for ever.
# What a schema asks for and nobody can hold is an error, never left out.
_JSON_OPTIONS: Final = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}


class GrammarError(ValueError):
    """The grammar says nothing that could be matched; the message tells why."""


def definition(grammar: Grammar) -> str:
    """What llguidance compiles. Raises GrammarError where that can be told from the source alone."""
    size = len(grammar.source.encode("utf-8", "surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"the source has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")
    if "\0" in grammar.source:
        raise GrammarError("the source holds a NUL character")
    return _DEFINITIONS[grammar.kind](grammar.source)


def normalised(grammar: Grammar) -> Grammar:
    """The same with llama.cpp's GBNF written as Lark, which is what the other programs take. Raises GrammarError."""
    if grammar.kind is not GrammarKind.EBNF or not is_gbnf(grammar.source):
        return grammar
    try:
        lark: str = gbnf_to_lark(_without_unicode_escapes(grammar.source))
    except RecursionError:
        raise GrammarError("the GBNF nests too deeply") from None
    except Exception as error:  # the translator raises plain ones, with the place and the reason in their text
        raise GrammarError(f"the GBNF cannot be translated: {error}") from None
    return Grammar(GrammarKind.EBNF, lark)


def is_gbnf(source: str) -> bool:
    return "::=" in source and not is_lark_syntax(source)


def _json_object(source: str) -> str:
    if source:
        raise GrammarError("the source of a JSON object is empty; a schema is of kind JSON_SCHEMA")
    return _json_schema('{"type": "object"}')


def _json_schema(source: str) -> str:
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError):
        raise GrammarError("the schema is not JSON") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("the schema must be a JSON object")
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS)  # type: ignore[arg-type]


def _regex(source: str) -> str:
    """The whole output must match, so anchors at its ends say nothing new; the engine has none."""
    inner = source.removeprefix("^")
    if inner.endswith("$") and not _ends_escaped(inner[:-1]):
        inner = inner[:-1]
    if "|" in inner and inner != source:
        inner = f"({inner})"
    return LLMatcher.grammar_from_regex(inner)


def _ends_escaped(text: str) -> bool:
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def _ebnf(source: str) -> str:
    if is_gbnf(source):
        raise GrammarError("this is GBNF; the edge translates it, here it must be Lark")
    return LLMatcher.grammar_from_lark(source)


def _choice(source: str) -> str:
    choices = list(dict.fromkeys(source.split("\n")))
    if "" in choices:
        raise GrammarError("a choice is empty; choices are the lines of the source")
    if len(choices) > MAX_CHOICES:
        raise GrammarError(f"there are {len(choices)} choices; at most {MAX_CHOICES} are allowed")
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in choices))


_DEFINITIONS: Final[Mapping[GrammarKind, Callable[[str], str]]] = {
    GrammarKind.JSON_OBJECT: _json_object,
    GrammarKind.JSON_SCHEMA: _json_schema,
    GrammarKind.REGEX: _regex,
    GrammarKind.EBNF: _ebnf,
    GrammarKind.CHOICE: _choice,
}

_ESCAPE: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def _without_unicode_escapes(gbnf: str) -> str:
    """Characters in place of their numbers, which GBNF and Lark write differently."""

    def plain(match: re.Match[str]) -> str:
        digits = match[1] or match[2]
        if digits is None:
            return match[0]
        number = int(digits, 16)
        if number < 0x80:
            return f"\\x{number:02x}"
        if number > 0x10FFFF or 0xD800 <= number < 0xE000:
            raise GrammarError(f"the GBNF names a character that does not exist: {match[0]}")
        return chr(number)

    return _ESCAPE.sub(plain, gbnf)
