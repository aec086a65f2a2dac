"""What a run leaves: a document that can be written, read and compared. Pure but for the two functions with a path.

Schema `tercet-bench/1`. A stage's `requests` are columns, one entry a request, times in ms since the stage began.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from services.bench.plan import Settings
from services.bench.session import StageRun
from services.bench.summary import Figures, figures
from services.bench.target import ServerFacts
from services.simulate.summary import Objectives, Spread

SCHEMA: Final = "tercet-bench/1"


class BadDocument(ValueError):
    """A file that is no document of this schema."""


@dataclass(frozen=True, slots=True)
class Environment:
    """load_average: of the machine before the run; above about 0.5 it was not quiet."""

    cpu: str
    cores: int
    python: str
    system: str
    load_average: float
    when: str


@dataclass(frozen=True, slots=True)
class Columns:
    """One entry a request. ms; None: it never came. failure: empty where served."""

    due: tuple[float, ...]
    ttft: tuple[float | None, ...]
    tpot: tuple[float | None, ...]
    e2e: tuple[float, ...]
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    messages: tuple[int, ...]
    failure: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageResult:
    """name, load: which stage. level: clients or requests a second. samples: failures in the server's own words."""

    name: str
    load: str
    level: float
    open_loop: bool
    repeat: int
    figures: Figures
    requests: Columns
    samples: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.load


@dataclass(frozen=True, slots=True)
class Document:
    """label: what people call the run."""

    label: str
    command: str
    settings: Settings
    server: ServerFacts
    environment: Environment
    stages: tuple[StageResult, ...]
    schema: str = SCHEMA


def result_of(run: StageRun, objectives: Objectives) -> StageResult:
    outcomes = run.outcomes
    failures = {f"{one.reply.failure}: {one.reply.detail}": None for one in outcomes if not one.served}
    return StageResult(
        name=run.stage.name,
        load=run.stage.load,
        level=run.stage.level,
        open_loop=run.stage.clients is None,
        repeat=run.repeat,
        figures=figures(outcomes, objectives, open_loop=run.stage.clients is None, client_cpu_ns=run.client_cpu_ns),
        requests=Columns(
            due=tuple(_ms(one.due_ns - run.began_ns) for one in outcomes),
            ttft=tuple(_ms_or_none(one.ttft_ns) for one in outcomes),
            tpot=tuple(_ms_or_none(one.tpot_ns) for one in outcomes),
            e2e=tuple(_ms(one.e2e_ns) for one in outcomes),
            prompt_tokens=tuple(one.prompt_len for one in outcomes),
            output_tokens=tuple(one.reply.output for one in outcomes),
            messages=tuple(len(one.reply.arrivals) for one in outcomes),
            failure=tuple("" if one.reply.failure is None else str(one.reply.failure) for one in outcomes),
        ),
        samples=tuple(list(failures)[:3]),
    )


def write(document: Document, path: Path) -> None:
    path.write_text(json.dumps(dataclasses.asdict(document), indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Document:
    """Raises BadDocument; OSError where there is no such file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadDocument(f"{path}: not JSON: {error}") from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise BadDocument(f"{path}: its schema is {schema!r}, not {SCHEMA!r}")
    try:
        return Document(
            label=found["label"],
            command=found["command"],
            settings=_build(Settings, found["settings"]),
            server=_build(ServerFacts, found["server"]),
            environment=_build(Environment, found["environment"]),
            stages=tuple(_stage(one) for one in found["stages"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise BadDocument(f"{path}: not as its schema says: {error}") from error


def _stage(found: Mapping[str, Any]) -> StageResult:
    measured = dict(found["figures"])
    for name in ("ttft", "tpot", "itl", "e2e"):
        measured[name] = _build(Spread, measured[name])
    columns = _build(Columns, found["requests"])
    return _build(StageResult, {**found, "figures": _build(Figures, measured), "requests": columns})


Built = TypeVar("Built")


def _build(kind: type[Built], values: Mapping[str, Any]) -> Built:
    """JSON's lists are tuples here."""
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def differences(one: object, other: object, ignored: Iterable[str] = ()) -> list[str]:
    """`name: this against that` for each field of two equal dataclasses that differs."""
    assert dataclasses.is_dataclass(one)
    names: Sequence[str] = [field.name for field in dataclasses.fields(one) if field.name not in set(ignored)]
    return [
        f"{name}: {getattr(one, name)} against {getattr(other, name)}"
        for name in names
        if getattr(one, name) != getattr(other, name)
    ]


def _ms(ns: float) -> float:
    return round(ns / 1e6, 3)


def _ms_or_none(ns: float | None) -> float | None:
    return None if ns is None else _ms(ns)
