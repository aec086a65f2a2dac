"""One declaration per setting gives its flag, its environment variable, its check and its documentation.

Owns the mechanism; the settings themselves are in `services.config`. A class of settings is a frozen dataclass
that inherits from `Settings`; each field is declared with `setting(...)` or is itself such a class (a group,
flattened). Precedence: default < environment < flag. Must not read the process's environment by itself: a
mapping is passed in. Invariant: an instance that exists has passed every check, however it was made.
"""

import argparse
import dataclasses
import difflib
import hashlib
import json
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from services.errors import InvalidArgument

PREFIX: Final = "TERCET_"
_KEY: Final = "setting"
_BOOLEANS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class ConfigError(InvalidArgument):
    """A setting that cannot be: names the flag or variable, the value and the limit."""

    default_reason = "BAD_CONFIGURATION"


@dataclass(frozen=True, slots=True)
class Setting:
    """What is declared about one setting.

    help: one phrase. unit: of the value. minimum, maximum: inclusive. choices: the only values. shared: one
    variable `TERCET_<NAME>` serves all processes; the variable of the process wins over it. aliases: further
    variables, weakest. secret: never shown, and no part of the hash. check: raises InvalidArgument.
    """

    help: str
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    shared: bool = False
    aliases: tuple[str, ...] = ()
    secret: bool = False
    check: Callable[[str], object] | None = None

    @property
    def limit(self) -> str:
        """The allowed values, for people."""
        if self.choices:
            return " or ".join(self.choices)
        if self.minimum is not None and self.maximum is not None:
            return f"{_number(self.minimum)} to {_number(self.maximum)}"
        if self.minimum is not None:
            return f"at least {_number(self.minimum)}"
        return "" if self.maximum is None else f"at most {_number(self.maximum)}"


def setting(default: Any, help: str, **declared: Any) -> Any:
    """Declare a field of a Settings class; the keyword arguments are those of Setting."""
    return dataclasses.field(default=default, metadata={_KEY: Setting(help, **declared)})


@dataclass(frozen=True, slots=True)
class Settings:
    """Base of all settings. `process` names the program that a top-level class belongs to."""

    process: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for row in _own_rows(type(self)):
            _check(row.flag, getattr(self, row.path[-1]), row)
        self.validate()

    def validate(self) -> None:
        """Checks across fields; raises ConfigError."""


Config = TypeVar("Config", bound=Settings)


@dataclass(frozen=True, slots=True)
class Row:
    """One setting of one process, ready for a parser or a table. path: attribute names from the top."""

    process: str
    path: tuple[str, ...]
    kind: Any
    optional: bool
    default: Any
    setting: Setting

    @property
    def flag(self) -> str:
        return "--" + self.path[-1].replace("_", "-")

    @property
    def variables(self) -> tuple[str, ...]:
        """Environment variables, strongest first."""
        name = self.path[-1].upper()
        own = (f"{PREFIX}{self.process.upper()}_{name}",)
        return own + ((PREFIX + name,) if self.setting.shared else ()) + self.setting.aliases


def describe(config: type[Config]) -> list[Row]:
    """Every setting of a process, in the order of declaration."""
    rows = list(_walk(config(), config.process, ()))
    names = [row.path[-1] for row in rows]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise TypeError(f"{config.__name__} declares {', '.join(sorted(twice))} more than once")
    return rows


def markdown_table(*configs: type[Settings]) -> str:
    """The documentation of the settings, one table per process."""
    parts = []
    for config in configs:
        lines = [
            f"**{config.process}**",
            "",
            "| flag | variable | default | allowed | meaning |",
            "|---|---|---|---|---|",
        ]
        for row in describe(config):
            variables = ", ".join(f"`{name}`" for name in row.variables)
            unit = f" {row.setting.unit}" if row.setting.unit else ""
            default = "none" if row.default in (None, "", ()) else f"`{_text(row.default)}`{unit}"
            lines.append(f"| `{row.flag}` | {variables} | {default} | {row.setting.limit} | {row.setting.help} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def add_arguments(parser: argparse.ArgumentParser, config: type[Config]) -> None:
    """Add one flag per setting; absent flags stay absent from the namespace."""
    for row in describe(config):
        limit = f" ({row.setting.limit})" if row.setting.limit else ""
        default = "none" if row.default in (None, "", ()) else _text(row.default)
        parser.add_argument(
            row.flag,
            dest=row.path[-1],
            default=argparse.SUPPRESS,
            metavar=(row.setting.unit or "VALUE").upper().replace(" ", "_"),
            help=f"{row.setting.help}{limit}; default {default}".replace("%", "%%"),
        )


def load(config: type[Config], environ: Mapping[str, str], flags: Mapping[str, Any]) -> Config:
    """Make a process's settings of defaults, variables and flags (field name -> text).

    Raises ConfigError naming the flag or variable at fault, also for an unknown variable of this process.
    """
    rows = describe(config)
    _refuse_unknown(config.process, rows, environ)
    values: dict[tuple[str, ...], Any] = {}
    for row in rows:
        source, text = _find(row, environ, flags)
        if source is not None and text is not None:
            values[row.path] = _parse(source, text, row)
    return _build(config(), values, ())


def parse(config: type[Config], argv: Sequence[str], environ: Mapping[str, str]) -> Config:
    """`load` with the flags of a command line; unknown flags are refused, abbreviations too."""
    parser = _Parser(prog=f"tercet {config.process}", allow_abbrev=False)
    add_arguments(parser, config)
    return load(config, environ, vars(parser.parse_args(argv)))


def as_dict(config: Settings) -> dict[str, Any]:
    """Flat name -> value; a secret is shown as whether it is set."""
    rows = _walk(config, config.process, ())
    return {row.path[-1]: (bool(row.default) if row.setting.secret else row.default) for row in rows}


def effective_hash(config: Settings) -> str:
    """12 hexadecimal digits of SHA-256 over the effective settings; secrets do not enter it."""
    facts = {row.path[-1]: row.default for row in _walk(config, config.process, ()) if not row.setting.secret}
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _own_rows(config: type[Settings], process: str = "") -> list[Row]:
    """The settings declared in the class itself, groups left out."""
    hints = get_type_hints(config)
    rows = []
    for declared in dataclasses.fields(config):
        if _KEY in declared.metadata:
            kind, optional = _kind(hints[declared.name])
            rows.append(Row(process, (declared.name,), kind, optional, declared.default, declared.metadata[_KEY]))
    return rows


def _walk(config: Settings, process: str, above: tuple[str, ...]) -> Iterator[Row]:
    """All settings below an instance; each Row's default is the instance's value."""
    own = {row.path[0]: row for row in _own_rows(type(config), process)}
    for declared in dataclasses.fields(config):
        value = getattr(config, declared.name)
        path = (*above, declared.name)
        if declared.name in own:
            yield dataclasses.replace(own[declared.name], path=path, default=value)
        else:
            yield from _walk(value, process, path)


def _build(config: Config, values: Mapping[tuple[str, ...], Any], above: tuple[str, ...]) -> Config:
    changes: dict[str, Any] = {}
    for declared in dataclasses.fields(config):
        path = (*above, declared.name)
        if _KEY in declared.metadata:
            if path in values:
                changes[declared.name] = values[path]
        else:
            changes[declared.name] = _build(getattr(config, declared.name), values, path)
    return dataclasses.replace(config, **changes)


def _kind(hint: Any) -> tuple[Any, bool]:
    """The type of a value and whether it may be absent."""
    if get_origin(hint) in (Union, types.UnionType):
        (kind,) = [part for part in get_args(hint) if part is not type(None)]
        return kind, True
    return (tuple, False) if get_origin(hint) is tuple else (hint, False)


def _find(row: Row, environ: Mapping[str, str], flags: Mapping[str, Any]) -> tuple[str | None, str | None]:
    if row.path[-1] in flags:
        return row.flag, str(flags[row.path[-1]])
    for name in row.variables:
        if environ.get(name):  # an empty variable is an absent one: `${NAME:-}` in compose files
            return name, environ[name]
    return None, None


def _refuse_unknown(process: str, rows: Sequence[Row], environ: Mapping[str, str]) -> None:
    known = {name for row in rows for name in row.variables}
    for name in sorted(environ):
        if name.startswith(f"{PREFIX}{process.upper()}_") and name not in known:
            near = difflib.get_close_matches(name, sorted(known), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{name} is no setting of the {process}{hint}", field=name)


def _parse(source: str, text: str, row: Row) -> Any:
    kind = row.kind
    shown = "***" if row.setting.secret else repr(text)
    value: Any = text
    if row.optional and text == "":
        return None
    if kind is bool:
        if text.lower() not in _BOOLEANS:
            raise ConfigError(f"{source} is {shown}, which is not true or false", field=source)
        value = _BOOLEANS[text.lower()]
    elif kind is tuple:
        value = tuple(part.strip() for part in text.split(",") if part.strip())
    elif kind in (int, float):
        try:
            value = kind(text.replace("_", "x"))  # Python reads 1_000 as a number; people do not expect it
        except ValueError:
            noun = "a whole number" if kind is int else "a number"
            raise ConfigError(f"{source} is {shown}, which is not {noun}", field=source) from None
    _check(source, value, row)
    return value


def _check(source: str, value: Any, row: Row) -> None:
    """Raise ConfigError if a value is outside what its Setting allows. `source` is a flag or a variable."""
    declared = row.setting
    if value is None:
        if row.optional:
            return
        raise ConfigError(f"{source} needs a value", field=source)
    if row.kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not row.kind:
        raise ConfigError(f"{source} is {value!r}, which is not of type {row.kind.__name__}", field=source)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{source} is {value}, which is not a finite number", field=source)
    shown = "***" if declared.secret else repr(value)
    unit = f" {declared.unit}" if declared.unit else ""
    low, high = declared.minimum, declared.maximum
    size = value if isinstance(value, (int, float)) else len(value)
    if (low is not None and size < low) or (high is not None and size > high):
        raise ConfigError(f"{source} is {shown}{unit}, allowed is {declared.limit}", field=source, limit=declared.limit)
    if declared.choices and value not in declared.choices:
        raise ConfigError(f"{source} is {shown}, allowed is {declared.limit}", field=source, limit=declared.limit)
    if declared.check is not None:
        for part in value if isinstance(value, tuple) else (value,):
            try:
                declared.check(part)
            except InvalidArgument as error:
                raise ConfigError(f"{source}: {error.message}", field=source, limit=error.limit) from error


def _text(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"
