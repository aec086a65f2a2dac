"""The command lines of `tercet bench`: what there is to say, and what it means. Runs nothing.

Everything that is refused is refused by its name.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from services.bench.http_target import DIALECTS
from services.bench.plan import Settings
from services.catalogue import DEFAULT_MODEL
from services.config import BACKENDS
from services.simulate.options import read_objectives

_DEFAULTS: Final = Settings()
MOST_TOKENS: Final = 1_000_000
MOST_CLIENTS: Final = 100_000


class OptionError(ValueError):
    """A command line that makes no sense."""


@dataclass(frozen=True, slots=True)
class Where:
    """target, url: of a running server; neither: a chain is started with model and backend."""

    target: str | None
    url: str | None
    model: str | None
    backend: str
    server: str | None
    extra: Mapping[str, object]
    key_variable: str | None


@dataclass(frozen=True, slots=True)
class Output:
    json: Path | None
    html: Path | None
    label: str | None


def measure_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="tercet bench",
        allow_abbrev=False,
        description="Load-tests a server, and says exactly what it measured. Without arguments: a quick run against a "
        "chain of its own. Also: `tercet bench compare A.json B.json`, `tercet bench vary --set NAME=V1,V2`.",
    )
    where = made.add_argument_group("what is measured")
    where.add_argument("--target", help="Tercet's gRPC API, as host:port or unix:/path")
    where.add_argument("--url", help="an OpenAI-compatible server, as http://host:port")
    where.add_argument("--server", choices=tuple(DIALECTS), help="which one it is; absent: as it says of its models")
    where.add_argument("--extra", default="{}", metavar="JSON", help="more fields of every request to --url")
    where.add_argument("--key-variable", metavar="NAME", help="the environment variable that holds the API key")
    _add_chain(where)
    _add_load(made)
    _add_output(made)
    return made


def compare_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="tercet bench compare",
        allow_abbrev=False,
        description="Ratios of the second run to the first, with their spread. Runs whose load or machine differs are "
        "refused.",
    )
    made.add_argument("first", type=Path, help="as written by `tercet bench --json`")
    made.add_argument("second", type=Path)
    made.add_argument("--force", action="store_true", help="compare in spite of differences, and name them")
    return made


def vary_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="tercet bench vary",
        allow_abbrev=False,
        description="Starts a chain for each value of one setting, in turn, round after round, and compares them.",
    )
    made.add_argument(
        "--set",
        action="append",
        required=True,
        metavar="PROCESS.NAME=V1,V2",
        help="a setting as `tercet config` lists it, like executor.threads=1,2; one value: of every chain",
    )
    made.add_argument(
        "--all-combinations", action="store_true", help="allow several settings with several values: every combination"
    )
    made.add_argument("--rounds", type=int, default=_DEFAULTS.repeats, help="of each value, in turn; default 3")
    _add_chain(made)
    _add_load(made, repeats=False)
    _add_output(made)
    return made


def _add_chain(group: Any) -> None:
    group.add_argument("--model", help=f"of the chain that is started; default {DEFAULT_MODEL}")
    group.add_argument("--backend", choices=BACKENDS, default="cpu", help="of the chain that is started; default cpu")


def _add_load(made: argparse.ArgumentParser, *, repeats: bool = True) -> None:
    load = made.add_argument_group("load")
    load.add_argument("--tiers", default=_listed(_DEFAULTS.tiers), help="tokens of a prompt, by commas; default 128")
    load.add_argument("--output", type=int, default=_DEFAULTS.output, help="tokens of an answer; default 128")
    load.add_argument(
        "--concurrency", help="clients that each wait for their answer, by commas; default 1,8. A closed loop"
    )
    load.add_argument("--rate", help="requests a second, by commas, Poisson: an open loop, which waits for nobody")
    load.add_argument("--trace", help="replay a Mooncake .jsonl or an Azure .csv file: an open loop")
    load.add_argument("--scale", type=float, default=1.0, help="replay so many times as fast; default 1")
    load.add_argument("--lengths-from", help="lengths drawn, in pairs, from a trace, instead of --tiers and --output")
    load.add_argument("--first", type=int, help="only so many requests of the trace")
    load.add_argument("--length-divisor", type=int, default=1, help="divide the trace's lengths; default 1")
    load.add_argument(
        "--requests", type=int, help="of a stage; default as many as clients, at least 4; or 30 s of them"
    )
    load.add_argument(
        "--warm-up", type=int, help="requests before each stage that don't count; default as many as clients"
    )
    if repeats:
        load.add_argument("--repeats", type=int, default=_DEFAULTS.repeats, help="of all stages, in turn; default 3")
    load.add_argument(
        "--shared-prefix", type=int, default=0, help="tokens that all prompts begin with; default 0: all differ"
    )
    load.add_argument("--chat", action="store_true", help="each prompt is a user's message")
    load.add_argument("--temperature", type=float, default=0.0, help="default 0: greedy")
    load.add_argument("--seed", type=int, default=1, help="of prompts, arrivals and lengths; default 1")
    load.add_argument("--timeout", type=float, default=_DEFAULTS.timeout_s, help="seconds of a request; default 300")
    load.add_argument("--slo", default="", help="ttft=MS,tpot=MS,e2e=MS: what counts as goodput")


def _add_output(made: argparse.ArgumentParser) -> None:
    out = made.add_argument_group("output")
    out.add_argument("--json", type=Path, help="settings, environment, figures and a row of numbers for each request")
    out.add_argument("--html", type=Path, help="one page with table and charts, self-contained")
    out.add_argument("--label", help="what the run is called")


def read_where(chosen: argparse.Namespace) -> Where:
    if chosen.target is not None and chosen.url is not None:
        raise OptionError("--target and --url exclude each other")
    extra = _json_object("--extra", chosen.extra)
    if chosen.url is None and (chosen.server is not None or extra):
        raise OptionError("--server and --extra are of a --url")
    if chosen.target is not None and chosen.model is not None:
        raise OptionError("--model is of a --url or of the chain that is started; a --target serves one")
    return Where(chosen.target, chosen.url, chosen.model, chosen.backend, chosen.server, extra, chosen.key_variable)


def read_output(chosen: argparse.Namespace) -> Output:
    return Output(chosen.json, chosen.html, chosen.label)


def read_settings(chosen: argparse.Namespace, repeats: int) -> Settings:
    """Raises OptionError; ScenarioError for --slo."""
    read_objectives(chosen.slo)
    loops = [
        flag
        for flag, value in (
            ("--concurrency", chosen.concurrency),
            ("--rate", chosen.rate),
            ("--trace", chosen.trace),
        )
        if value is not None
    ]
    if len(loops) > 1:
        raise OptionError(f"{' and '.join(loops)} exclude each other")
    if chosen.trace is not None and (chosen.lengths_from is not None or chosen.shared_prefix):
        raise OptionError("--trace brings its lengths and what prompts share: no --lengths-from, no --shared-prefix")
    if chosen.trace is None and chosen.scale != 1:
        raise OptionError("--scale is of a --trace")
    if (
        chosen.trace is None
        and chosen.lengths_from is None
        and (chosen.first is not None or chosen.length_divisor != 1)
    ):
        raise OptionError("--first and --length-divisor are of a --trace or of --lengths-from")
    if chosen.trace is not None and chosen.requests is not None:
        raise OptionError("--requests is of generated loads; a trace is cut by --first")
    tiers = tuple(_whole("--tiers", part, 1, MOST_TOKENS) for part in _parts("--tiers", chosen.tiers))
    concurrency = _DEFAULTS.concurrency
    if chosen.concurrency is not None:
        found = (_whole("--concurrency", part, 1, MOST_CLIENTS) for part in _parts("--concurrency", chosen.concurrency))
        concurrency = tuple(sorted(set(found)))
    rates: tuple[float, ...] = ()
    if chosen.rate is not None:
        rates = tuple(sorted({_rate(part) for part in _parts("--rate", chosen.rate)}))
    return Settings(
        tiers=tuple(dict.fromkeys(tiers)),
        output=_whole("--output", chosen.output, 1, MOST_TOKENS),
        concurrency=() if rates or chosen.trace else concurrency,
        rates=rates,
        trace=chosen.trace,
        scale=_positive("--scale", chosen.scale),
        lengths_from=chosen.lengths_from,
        first=None if chosen.first is None else _whole("--first", chosen.first, 1, 1 << 40),
        length_divisor=_whole("--length-divisor", chosen.length_divisor, 1, MOST_TOKENS),
        requests=None if chosen.requests is None else _whole("--requests", chosen.requests, 1, 10_000_000),
        warm_up=None if chosen.warm_up is None else _whole("--warm-up", chosen.warm_up, 0, 10_000_000),
        repeats=repeats,
        shared_prefix=_whole("--shared-prefix", chosen.shared_prefix, 0, MOST_TOKENS),
        chat=chosen.chat,
        temperature=_between("--temperature", chosen.temperature, 0, 100),
        seed=_whole("--seed", chosen.seed, 0, (1 << 63) - 1),
        timeout_s=_positive("--timeout", chosen.timeout),
        slo=chosen.slo,
    )


def read_count(flag: str, value: int) -> int:
    return _whole(flag, value, 1, 1000)


def _parts(flag: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise OptionError(f"{flag} is empty")
    return parts


def _whole(flag: str, value: str | int, low: int, high: int) -> int:
    try:
        number = int(value)
    except ValueError as error:
        raise OptionError(f"{flag}: {value!r} is no whole number") from error
    if not low <= number <= high:
        raise OptionError(f"{flag} is {number}, allowed is {low} to {high}")
    return number


def _rate(text: str) -> float:
    try:
        return _positive("--rate", float(text))
    except ValueError as error:
        raise OptionError(f"--rate: {text!r} is no number above 0") from error


def _positive(flag: str, value: float) -> float:
    if not 0 < value < 1e9:
        raise OptionError(f"{flag} is {value}; it must be above 0")
    return value


def _between(flag: str, value: float, low: float, high: float) -> float:
    if not low <= value <= high:
        raise OptionError(f"{flag} is {value}, allowed is {low} to {high}")
    return value


def _listed(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


def _json_object(flag: str, text: str) -> Mapping[str, object]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise OptionError(f"{flag} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise OptionError(f"{flag} is not a JSON object")
    return found
