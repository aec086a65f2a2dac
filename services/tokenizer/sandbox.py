"""Where a chat template runs: what it may call, and how much it may do.

A template is a program that came with a model file. It runs in jinja2's immutable sandbox with a short list
of filters, string methods and globals, and every loop, call and growing value is charged to a budget, so
that it ends. Charges are put into the syntax tree before compiling. Knows no messages and no tokens.

Not covered: one built-in operation on values that the template nests deeply itself, such as comparing two of
them. So what serves runs it in a process that may be killed (`renderer`).
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sized
from types import CodeType
from typing import Any, cast

import jinja2
from jinja2 import filters as builtin
from jinja2 import nodes, pass_context, pass_environment
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import escape

from services.tokenizer.budget import Run
from services.tokenizer.invalid import InvalidText, InvalidTokenizer, TemplateFailure
from services.tokenizer.masking import Content

MAX_RANGE = 100_000
MAX_INDENT = 64
MAX_INTEGER_BITS = 256

_FIELD = "tokenizer.chat_template"

# fmt: off
BUILTIN_FILTERS = (
    "abs", "count", "d", "default", "dictsort", "first", "items", "last", "length",
    "list", "map", "max", "min", "reject", "rejectattr", "reverse", "round", "safe",
    "select", "selectattr", "sort", "unique",
)

STRING_METHODS = frozenset(
    {
        "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "islower",
        "isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace",
        "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith",
        "strip", "title", "upper",
    }
)
# fmt: on


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox. One is made per process to compile with, an overlay of it per rendering."""

    run: Run
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # folding constants would compute before a budget exists
            finalize=_finalize,
            extensions=[GenerationBlock, "jinja2.ext.loopcontrols"],
        )
        self.filters = {name: builtin.FILTERS[name] for name in BUILTIN_FILTERS} | _FILTERS
        self.globals = dict(_GLOBALS)

    def begin(self, run: Run) -> "TemplateEnvironment":
        """A copy that charges this run; what was compiled here runs there."""
        copy: TemplateEnvironment = self.overlay()
        copy.run = run
        return copy

    def compile_guarded(self, source: str) -> CodeType:
        """Parse, put the charges in, compile.

        Raises:
            InvalidTokenizer: a syntax error, or a construct that is not supported, by name.
        """
        try:
            tree = _Guard().visit(self.parse(source))
            return self.compile(tree)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidTokenizer(_FIELD, f"line {error.lineno}: {error.message}") from None
        except (RecursionError, MemoryError, SyntaxError, OverflowError) as error:
            raise InvalidTokenizer(_FIELD, f"nests too deeply ({type(error).__name__})") from None

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        run = self.run
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            run.charge(len(owner))
            match function.__name__:
                # Of keywords there are only those that jinja2 itself adds: these methods take none.
                case "join":
                    return run.join(owner, *args)
                case "replace":
                    return run.replace(owner, *args)
        run.charge_call()
        result = super().call(context, function, *args, **kwargs)
        return run.content(result) if isinstance(function, Macro) else result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        run = self.run
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise TemplateFailure(_FIELD, f"the operator {operator} is not supported for these values")
        if operator == "*":
            if isinstance(left, int) and isinstance(right, int):
                run.allow(0)
                if left.bit_length() + right.bit_length() > MAX_INTEGER_BITS:
                    raise TemplateFailure(_FIELD, f"makes an integer of more than {MAX_INTEGER_BITS} bits")
            elif isinstance(left, int) or isinstance(right, int):
                count, sequence = (left, right) if isinstance(left, int) else (right, left)
                run.allow(max(0, count) * _size(sequence))
        if operator == "+":
            run.allow(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in STRING_METHODS
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        return None  # `format` is no allowed string method


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Guard(NodeTransformer):
    """Puts the charges into a syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise InvalidTokenizer(_FIELD, f"line {node.lineno}: a recursive loop is not supported")
        self.generic_visit(node)
        fixed = sum(len(data.data) for part in node.body for data in _template_data(part))
        node.iter = _filter(cast(nodes.Expr, node.iter), "_each", nodes.Const(fixed))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        if node.node is None:
            node.node = nodes.Filter(None, "_content", [], [], None, None, lineno=node.lineno)
        else:
            node.node = _filter(node.node, "_charge")
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        if node.filter is None:
            node.filter = nodes.Filter(None, "_content", [], [], None, None, lineno=node.lineno)
        return node

    def _refuse(self, node: nodes.Node) -> nodes.Node:
        raise InvalidTokenizer(_FIELD, f"line {node.lineno}: {type(node).__name__.lower()} is not supported")

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _refuse


def _template_data(node: nodes.Node) -> Iterator[nodes.TemplateData]:
    if isinstance(node, nodes.TemplateData):
        yield node
    yield from node.find_all(nodes.TemplateData)


def _filter(node: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


@pass_context
def _finalize(context: Context, value: Any) -> str:
    return _run_of(context.environment).text(value)


def _run_of(environment: jinja2.Environment) -> Run:
    if not isinstance(environment, TemplateEnvironment):
        raise TypeError("a chat template runs in a TemplateEnvironment only")
    return environment.run


@pass_environment
def _charge(environment: TemplateEnvironment, value: Any) -> Any:
    environment.run.charge(_size(value))
    return value


@pass_environment
def _each(environment: TemplateEnvironment, items: Iterable[Any], fixed_chars: int) -> Iterable[Any]:
    run = environment.run
    if isinstance(items, Sized):
        for _ in range(len(items)):
            run.charge(fixed_chars)
        return items
    return _each_lazily(run, items, fixed_chars)


def _each_lazily(run: Run, items: Iterable[Any], fixed_chars: int) -> Iterator[Any]:
    for item in items:
        run.charge(fixed_chars)
        yield item


@pass_environment
def _concat(environment: TemplateEnvironment, parts: list[Any]) -> str:
    return environment.run.join("", parts)


@pass_environment
def _content(environment: TemplateEnvironment, text: str) -> Content:
    environment.run.charge(len(text))
    return environment.run.content(text)


@pass_environment
def _string(environment: TemplateEnvironment, value: Any) -> str:
    return environment.run.text(value)


def _as_text(change: Callable[..., str]) -> Callable[..., str]:
    """A filter that is a string's own method; what is no string becomes text first."""

    @pass_environment
    def apply(environment: TemplateEnvironment, value: Any, *args: Any) -> str:
        return change(environment.run.content(environment.run.text(value)), *args)

    return apply


@pass_environment
def _title(environment: TemplateEnvironment, value: Any) -> str:
    run = environment.run
    return run.mask.rewrite(run.text(value), builtin.do_title)


@pass_environment
def _join(environment: TemplateEnvironment, parts: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        parts = map(builtin.make_attrgetter(environment, attribute), parts)
    return environment.run.join(environment.run.text(d), parts)


@pass_environment
def _replace(environment: TemplateEnvironment, text: Any, old: Any, new: Any, count: int | None = None) -> str:
    run = environment.run
    return run.replace(run.text(text), run.text(old), run.text(new), -1 if count is None else count)


@pass_environment
def _indent(
    environment: TemplateEnvironment, text: str, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    length = width if isinstance(width, int) else len(width)
    if length > MAX_INDENT:
        raise TemplateFailure(_FIELD, f"indents by {length}; the limit is {MAX_INDENT}")
    environment.run.allow(len(text) + length * (1 + len(text.splitlines())))
    return builtin.do_indent(environment.run.content(text), width, first, blank)


@pass_environment
def _int(environment: TemplateEnvironment, value: Any, default: int = 0, base: int = 10) -> int:
    return builtin.do_int(environment.run.plain(value), default, base)


@pass_environment
def _float(environment: TemplateEnvironment, value: Any, default: float = 0.0) -> float:
    return builtin.do_float(environment.run.plain(value), default)


@pass_environment
def _escape(environment: TemplateEnvironment, value: Any) -> str:
    run = environment.run
    run.allow(6 * _size(value))
    return run.mask.mask(str(escape(run.plain(run.text(value)))))


@pass_environment
def _tojson(
    environment: TemplateEnvironment,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and not 0 <= indent <= MAX_INDENT:
        raise TemplateFailure(_FIELD, f"tojson: indent {indent} is outside 0 to {MAX_INDENT}")
    run = environment.run
    plain = run.plain(value)
    text = json.dumps(plain, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    run.allow(len(text))
    return run.mask.mask(text)


@pass_environment
def _raise_exception(environment: TemplateEnvironment, message: Any) -> None:
    run = environment.run
    raise InvalidText("messages", f"the chat template refuses them: {run.plain(run.text(message))}")


@pass_environment
def _strftime_now(environment: TemplateEnvironment, form: str) -> str:
    if environment.run.now is None:
        raise TemplateFailure(_FIELD, "asks for the time, and none was given")
    if len(form) > 64 or re.search(r"%[^A-Za-z%]*[0-9]", form):
        raise TemplateFailure(_FIELD, "asks for the time in a form with widths or of more than 64 characters")
    return environment.run.now.strftime(form)


@pass_environment
def _range(environment: TemplateEnvironment, *bounds: int) -> range:
    numbers = range(*bounds)
    environment.run.charge()
    # `len` of a range fails beyond the machine's word.
    if len(numbers[: MAX_RANGE + 1]) > MAX_RANGE:
        raise TemplateFailure(_FIELD, f"range of more than {MAX_RANGE} numbers")
    return numbers


_FILTERS: dict[str, Callable[..., Any]] = {
    "_charge": _charge,
    "_concat": _concat,
    "_content": _content,
    "_each": _each,
    "capitalize": _as_text(Content.capitalize),
    "e": _escape,
    "escape": _escape,
    "float": _float,
    "indent": _indent,
    "int": _int,
    "join": _join,
    "lower": _as_text(Content.lower),
    "replace": _replace,
    "string": _string,
    "title": _title,
    "tojson": _tojson,
    "trim": _as_text(Content.strip),
    "upper": _as_text(Content.upper),
}

_GLOBALS: dict[str, Any] = {
    "cycler": Cycler,
    "dict": dict,
    "joiner": Joiner,
    "namespace": Namespace,
    "raise_exception": _raise_exception,
    "range": _range,
    "strftime_now": _strftime_now,
}
