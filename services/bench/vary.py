"""One setting of the chain, several values: which chains are to be started. Pure: checks names and values only."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Final

from services.config import ExecutorConfig, SchedulerConfig, TokenizerConfig
from services.settings import ConfigError, Settings, describe, parse

PROCESSES: Final[dict[str, type[Settings]]] = {
    config.process: config for config in (TokenizerConfig, SchedulerConfig, ExecutorConfig)
}
OWN: Final = frozenset({"listen", "http", "scheduler", "executors", "model"})  # what the chain itself decides


class VaryError(ValueError):
    """What is to be varied makes no sense."""


@dataclass(frozen=True, slots=True)
class Variant:
    """label: the values that make it differ from the others. flags: of each process."""

    label: str
    flags: dict[str, tuple[str, ...]] = field(default_factory=dict)


def variants(texts: Sequence[str], *, all_combinations: bool = False) -> list[Variant]:
    """texts: PROCESS.NAME=V1,V2. Raises VaryError before anything is started."""
    parsed = [_parse(text) for text in texts]
    names = [f"{process}.{name}" for process, name, _ in parsed]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise VaryError(f"--set names {', '.join(sorted(twice))} twice")
    several = [name for name, (_, _, values) in zip(names, parsed, strict=True) if len(values) > 1]
    if not several:
        raise VaryError("--set gives every setting one value: there is nothing to compare")
    if len(several) > 1 and not all_combinations:
        raise VaryError(
            f"{' and '.join(several)} have several values; one thing is changed at a time, unless --all-combinations"
        )
    return [_variant(parsed, combination) for combination in product(*(values for _, _, values in parsed))]


def _variant(parsed: Sequence[tuple[str, str, tuple[str, ...]]], combination: Sequence[str]) -> Variant:
    flags: dict[str, tuple[str, ...]] = {}
    label = []
    for (process, name, values), value in zip(parsed, combination, strict=True):
        flags[process] = (*flags.get(process, ()), f"--{name.replace('_', '-')}", value)
        if len(values) > 1:
            label.append(f"{name}={value}")
    for process, given in flags.items():
        try:
            parse(PROCESSES[process], given, {})
        except ConfigError as error:
            raise VaryError(f"--set {process}: {error.message}") from error
    return Variant(" ".join(label), flags)


def _parse(text: str) -> tuple[str, str, tuple[str, ...]]:
    left, equals, right = text.partition("=")
    process, dot, name = left.partition(".")
    name = name.replace("-", "_")
    if not equals or not dot:
        raise VaryError(f"--set {text!r} is not PROCESS.NAME=VALUE")
    if process not in PROCESSES:
        raise VaryError(f"--set: {process!r} is none of {', '.join(PROCESSES)}")
    known = {row.path[-1]: row for row in describe(PROCESSES[process])}
    if name not in known:
        raise VaryError(f"--set: {name!r} is no setting of the {process}; `tercet config` lists them")
    if name in OWN:
        raise VaryError(f"--set: {name} is given to the {process} by the chain that is started")
    values = tuple(part.strip() for part in right.split(","))
    if known[name].kind is tuple:
        values = (right,)  # its own commas
    if len(set(values)) != len(values):
        raise VaryError(f"--set {text!r} has a value twice")
    return process, name, values
