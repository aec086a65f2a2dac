"""The form that an answer must have, as OpenAI's and vLLM's clients ask for it, to the contract's grammar.

Pure. Owns these parameters' shapes. Invariant: a request has one form at most; what is not applied is refused by name.
"""

import json
from collections.abc import Callable, Mapping
from typing import Final

from services.errors import InvalidArgument, Unimplemented
from services.gateway import fields
from services.gateway.json_body import JsonObject, JsonValue, shown
from tercet.v1 import common_pb2

MAX_CHOICES: Final = 4096
MAX_NAME_BYTES: Final = 64


def response_format(name: str, value: JsonValue) -> common_pb2.Grammar | None:
    """None: any text."""
    given = fields.mapping(name, value)
    kind = fields.text(f"{name}.type", given.get("type"))
    allowed = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    if kind not in ("text", "json_object", "json_schema"):
        raise _unsupported(f"{name}.type", f"the form {shown(kind)}")
    _refuse_others(name, given, allowed)
    if kind == "text":
        return None
    if kind == "json_object":
        return common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_JSON_OBJECT)
    return _named_schema(f"{name}.json_schema", given.get("json_schema"))


def _named_schema(name: str, value: JsonValue) -> common_pb2.Grammar:
    """strict: the schema holds in any case."""
    given = fields.mapping(name, value)
    _refuse_others(name, given, {"name", "description", "schema", "strict"})
    fields.text(f"{name}.name", given.get("name"), MAX_NAME_BYTES, empty=False)
    if given.get("strict") is not None:
        fields.boolean(f"{name}.strict", given["strict"])
    if given.get("description") is not None:
        fields.text(f"{name}.description", given["description"])
    return _json(f"{name}.schema", given.get("schema"))


def _json(name: str, value: JsonValue) -> common_pb2.Grammar:
    """A schema, as JSON or as a string of it."""
    source = value if isinstance(value, str) else json.dumps(fields.mapping(name, value), ensure_ascii=False)
    return common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_JSON_SCHEMA, source=fields.text(name, source))


def _json_object(name: str, value: JsonValue) -> common_pb2.Grammar:
    if not fields.boolean(name, value):
        raise fields.invalid(name, "true or absent")
    return common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_JSON_OBJECT)


def _regex(name: str, value: JsonValue) -> common_pb2.Grammar:
    return common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_REGEX, source=fields.text(name, value))


def _grammar(name: str, value: JsonValue) -> common_pb2.Grammar:
    return common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_EBNF, source=fields.text(name, value, empty=False))


def _choice(name: str, value: JsonValue) -> common_pb2.Grammar:
    choices = []
    for index, item in enumerate(fields.array(name, value, 1, MAX_CHOICES)):
        one = fields.text(f"{name}[{index}]", item, empty=False)
        if "\n" in one:
            raise fields.invalid(f"{name}[{index}]", "one line: a choice with a line break can't be told from two")
        choices.append(one)
    return common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_CHOICE, source="\n".join(choices))


Form = Callable[[str, JsonValue], common_pb2.Grammar]
GUIDED: Final[Mapping[str, Form]] = {
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
}
_STRUCTURED: Final[Mapping[str, Form]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}


def structured_outputs(name: str, value: JsonValue) -> common_pb2.Grammar | None:
    """vLLM's: an object with one of these forms."""
    given = {key: item for key, item in fields.mapping(name, value).items() if item is not None}
    found = None
    for key, item in given.items():
        path = f"{name}.{fields.printable(key)}"
        form = _STRUCTURED.get(key)
        if form is None:
            raise _unsupported(path, "this form")
        if found is not None:
            raise fields.invalid(name, f"one form, not {len(given)}")
        found = form(path, item)
    return found


def _refuse_others(name: str, given: JsonObject, allowed: set[str]) -> None:
    for key in given:
        if key not in allowed:
            path = f"{name}.{fields.printable(key)}"
            raise InvalidArgument(f"unknown parameter {path}", reason="UNKNOWN_PARAMETER", field=path)


def _unsupported(path: str, what: str) -> Unimplemented:
    return Unimplemented(f"{path}: {what} is not supported", reason="UNSUPPORTED_PARAMETER", field=path)
