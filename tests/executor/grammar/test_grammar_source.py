"""Grammars of every kind against texts that they allow and texts that they do not."""

import json
from array import array

import pytest

from executor.grammar.engine import Compiled, GrammarEngine, GrammarVocabulary, Matcher
from executor.grammar.source import GrammarError, normalised
from executor.step import MAX_GRAMMAR_BYTES, Grammar, GrammarKind

END = 256
SPECIAL = 257
VOCABULARY = GrammarVocabulary(
    (*(bytes([byte]) for byte in range(256)), b"<end>", b"<special>"), (END, SPECIAL), (END,)
)


@pytest.fixture(scope="module")
def engine() -> GrammarEngine:
    return GrammarEngine(VOCABULARY)


def allows(compiled: Compiled, text: str) -> bool:
    """Whether an output may be exactly this."""
    matcher = compiled.matcher()
    try:
        matcher.advance(text.encode())
    except GrammarError:
        return False
    return matcher.is_complete


def check(engine: GrammarEngine, kind: GrammarKind, source: str, good: list[str], bad: list[str]) -> None:
    compiled = engine.compile(normalised(Grammar(kind, source)))
    assert [text for text in good if not allows(compiled, text)] == []
    assert [text for text in bad if allows(compiled, text)] == []


def test_a_json_object(engine: GrammarEngine) -> None:
    good = ["{}", '{"a":1,"b":[true,null,"x"]}']
    check(engine, GrammarKind.JSON_OBJECT, "", good, ["", "[]", "1", "{", '{"a":1}x', '{"a": 1}', "null"])


def test_a_json_schema(engine: GrammarEngine) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 3},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "ä"]}, "maxItems": 2},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    good = ['{"name":"äöü","age":120}', '{"name":"","age":0,"tags":["a","ä"]}']
    bad = ['{"name":"abcd","age":1}', '{"name":"a","age":121}', '{"name":"a"}', '{"name":"a","age":1,"x":1}']
    bad += ['{"name":"a","age":1,"tags":["a","a","a"]}', '{"name":"a", "age":1}', '{"age":1,"name":"a"}']
    check(engine, GrammarKind.JSON_SCHEMA, json.dumps(schema), good, bad)


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ("[0-9]{3}-[a-f]+", ["123-a", "000-fff"], ["12-a", "123-", "123-g", "x123-a", "123-a "]),
        ("^(yes|no)$", ["yes", "no"], ["", "yesno", "^yes$"]),
        ("^a|b$", ["a", "b"], ["ab", "a|b"]),
        ("cost: 5\\$", ["cost: 5$"], ["cost: 5"]),
        ("é+", ["é", "éé"], ["e"]),
    ],
)
def test_a_regular_expression(engine: GrammarEngine, source: str, good: list[str], bad: list[str]) -> None:
    check(engine, GrammarKind.REGEX, source, good, bad)


def test_choices(engine: GrammarEngine) -> None:
    source = 'red\ngreen\nred\n"quoted" \\ back\n日本 😀\na\tb'
    good = ["red", "green", '"quoted" \\ back', "日本 😀", "a\tb"]
    check(engine, GrammarKind.CHOICE, source, good, ["", "re", "redgreen", "blue", "red\ngreen"])


def test_lark(engine: GrammarEngine) -> None:
    source = 'start: "(" start ")" | NUMBER\nNUMBER: /[0-9]+/'
    check(engine, GrammarKind.EBNF, source, ["7", "((42))"], ["(7", "()", "x"])


GBNF = r"""
root   ::= (expr "=" ws term "\n")+   # sums
expr   ::= term ([-+*/] term)*
term   ::= ident | num | "(" ws expr ")" ws
ident  ::= [a-z] [a-z0-9_]* ws
num    ::= [0-9]{1,3} ws
ws     ::= [ \t]*
"""


def test_gbnf(engine: GrammarEngine) -> None:
    good = ["a=1\n", "(a+b)*c=7\nx_1 = 2\n"]
    check(engine, GrammarKind.EBNF, GBNF, good, ["a=1", "=1\n", "a=1000\n", "A=1\n"])
    check(engine, GrammarKind.EBNF, 'root ::= "\\u0041" [\\u00e9-\\u00ff]+ "\\x42"', ["AéÿB"], ["AeB", "AB", "u0041éB"])


def test_what_is_gbnf_goes_on_as_lark() -> None:
    translated = normalised(Grammar(GrammarKind.EBNF, GBNF))
    assert translated.kind is GrammarKind.EBNF
    assert "::=" not in translated.source
    assert normalised(translated) is translated
    lark = Grammar(GrammarKind.EBNF, 'start: "::="')
    assert normalised(lark) is lark


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        (GrammarKind.JSON_OBJECT, "{}", "the source of a JSON object is empty"),
        (GrammarKind.JSON_SCHEMA, "{", "not JSON"),
        (GrammarKind.JSON_SCHEMA, "[]", "must be a JSON object"),
        (GrammarKind.JSON_SCHEMA, '{"type":"integer","minimum":5,"maximum":3}', "Unsatisfiable schema"),
        (GrammarKind.JSON_SCHEMA, '{"type":"array","uniqueItems":true}', "uniqueItems"),
        (GrammarKind.JSON_SCHEMA, '{"type":"array","uniqueItems":true,"x-guidance":{"lenient":true}}', "uniqueItems"),
        (GrammarKind.JSON_SCHEMA, '{"$ref":"http://example.com/x"}', "example.com"),
        (GrammarKind.REGEX, "(a", "unclosed group"),
        (GrammarKind.REGEX, "(?=a)b", "look-ahead"),
        (GrammarKind.REGEX, "[^\\s\\S]", "no text matches"),
        (GrammarKind.EBNF, "", "Empty grammar"),
        (GrammarKind.EBNF, "start: missing", "missing"),
        (GrammarKind.EBNF, "root ::= unknown", "'unknown' not found"),
        (GrammarKind.EBNF, "root ::= " + "(" * 5000, "nests too deeply"),
        (GrammarKind.EBNF, 'root ::= "\\uD800"', "does not exist"),
        (GrammarKind.CHOICE, "a\n\nb", "a choice is empty"),
        (GrammarKind.CHOICE, "", "a choice is empty"),
        (GrammarKind.CHOICE, "\n".join(map(str, range(5000))), "5000 choices"),
        (GrammarKind.REGEX, "a\0b", "NUL"),
        (GrammarKind.REGEX, "a" * (MAX_GRAMMAR_BYTES + 1), f"at most {MAX_GRAMMAR_BYTES}"),
        (GrammarKind.REGEX, "(" * 30_000 + ")" * 30_000, ""),
        (GrammarKind.JSON_SCHEMA, '{"items":' * 6000 + "{}" + "}" * 6000, ""),
    ],
)
def test_what_cannot_be_matched_is_refused(engine: GrammarEngine, kind: GrammarKind, source: str, message: str) -> None:
    with pytest.raises(GrammarError) as refused:
        engine.compile(normalised(Grammar(kind, source)))
    assert message in str(refused.value)
    assert str(refused.value)


def test_only_an_end_may_follow_what_is_complete(engine: GrammarEngine) -> None:
    compiled = engine.compile(Grammar(GrammarKind.CHOICE, "ab"))
    matcher = compiled.matcher()
    assert allowed(matcher) == {ord("a")}
    matcher.advance(b"a")
    assert not matcher.is_complete
    matcher.advance(b"b")
    assert allowed(matcher) == {END}
    with pytest.raises(GrammarError):
        matcher.advance(b"c")


def test_control_tokens_are_no_text(engine: GrammarEngine) -> None:
    matcher = engine.compile(Grammar(GrammarKind.REGEX, ".*")).matcher()
    assert SPECIAL not in allowed(matcher)
    assert END in allowed(matcher)


def test_a_matcher_knows_nothing_of_another(engine: GrammarEngine) -> None:
    compiled = engine.compile(Grammar(GrammarKind.CHOICE, "ab\ncd"))
    one, other = compiled.matcher(), compiled.matcher()
    one.advance(b"a")
    assert allowed(one) == {ord("b")}
    assert allowed(other) == {ord("a"), ord("c")}


def allowed(matcher: Matcher) -> set[int]:
    mask = array("I", bytes(4 * 9))
    matcher.fill(mask)
    return {token for token in range(len(VOCABULARY.tokens)) if mask[token // 32] >> token % 32 & 1}


def test_a_vocabulary_without_an_end_is_of_no_use() -> None:
    with pytest.raises(ValueError, match="ends an output"):
        GrammarVocabulary((b"a",), (), ())
