"""`tercet bench`: a load tester. Wiring only: options, a target, a session, what is written."""

import argparse
import asyncio
import dataclasses
import shlex
import sys
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from services.bench.compare import NotComparable, compare, ratios_table, unlike
from services.bench.document import BadDocument, Document, read, write
from services.bench.http_client import BadUrl
from services.bench.options import (
    OptionError,
    Output,
    compare_parser,
    measure_parser,
    read_count,
    read_output,
    read_settings,
    read_where,
    vary_parser,
)
from services.bench.plan import stages
from services.bench.prompts import PromptError
from services.bench.report import charts_of, facts, table_of, told
from services.bench.runs import measured, stack_options, varied
from services.bench.target import TargetError
from services.bench.vary import VaryError, variants
from services.catalogue import CatalogueError
from services.errors import ServiceError
from services.plots.page import page
from services.plots.table import Table
from services.simulate.load import LoadError
from services.simulate.scenario import ScenarioError
from services.simulate.traces import TraceError
from services.stack import NotReady
from services.supervisor import ChildRefused

_REFUSALS: Final = (
    OptionError,
    VaryError,
    ScenarioError,
    LoadError,
    TraceError,
    BadUrl,
    BadDocument,
    NotComparable,
    TargetError,
    PromptError,
    CatalogueError,
    NotReady,
    ChildRefused,
    ServiceError,
    OSError,
)

Made = TypeVar("Made")


def main(argv: Sequence[str]) -> int:
    command = shlex.join(["tercet", "bench", *argv])
    try:
        if argv and argv[0] == "compare":
            return _compare(compare_parser().parse_args(argv[1:]))
        if argv and argv[0] == "vary":
            return _vary(vary_parser().parse_args(argv[1:]), command)
        return _measure(measure_parser().parse_args(argv), command)
    except _REFUSALS as error:
        print(f"tercet bench: {error}", file=sys.stderr)
        return 1


def _measure(chosen: argparse.Namespace, command: str) -> int:
    where = read_where(chosen)
    settings = read_settings(chosen, read_count("--repeats", chosen.repeats))
    output = read_output(chosen)
    planned = stages(settings)
    document = _run(measured(where, settings, planned, output.label or where.url or where.target or "bench", command))
    print(table_of(document.stages).text())
    _tell(told(document))
    _write([document], output, command)
    return 0 if any(stage.figures.served for stage in document.stages) else 1


def _compare(chosen: argparse.Namespace) -> int:
    first, second = read(chosen.first), read(chosen.second)
    ratios = compare(first, second, force=chosen.force)
    _tell(f"warning: they differ in {difference}" for difference in unlike(first, second))
    names = (first.label, second.label) if first.label != second.label else ("first", "second")
    print(ratios_table(ratios, *names).text())
    return 0


def _vary(chosen: argparse.Namespace, command: str) -> int:
    rounds = read_count("--rounds", chosen.rounds)
    settings = read_settings(chosen, rounds)
    chosen_variants = variants(chosen.set, all_combinations=chosen.all_combinations)
    output = read_output(chosen)
    chains = [stack_options(chosen.model, chosen.backend, variant) for variant in chosen_variants]
    labels = [variant.label for variant in chosen_variants]
    documents = _run(varied(chains, labels, settings, stages(settings), command))
    for document in documents:
        print(table_of(document.stages, document.label).text(), end="\n\n")
        _tell(told(document))
    print("\n\n".join(table.text() for table in _ratios(documents)))
    _write(documents, output, command)
    return 0


def _ratios(documents: Sequence[Document]) -> list[Table]:
    """Of each to the first."""
    first, *others = documents
    return [ratios_table(compare(first, other), first.label, other.label, "Ratios") for other in others]


def _write(documents: Sequence[Document], output: Output, command: str) -> None:
    several = len(documents) > 1
    if output.json is not None:
        for document in documents:
            path = _beside(output.json, document.label) if several else output.json
            write(document, path)
            _tell([f"wrote {path}"])
    if output.html is not None:
        tables = [table_of(document.stages, document.label if several else "") for document in documents]
        tables += _ratios(documents)
        results = [
            dataclasses.replace(stage, name=f"{document.label}: {stage.name}") if several else stage
            for document in documents
            for stage in document.stages
        ]
        sentences = [
            f"{document.label}: {fact}" if several else fact for document in documents for fact in facts(document)
        ]
        title = output.label or "Benchmark"
        output.html.write_text(page(title, command, sentences, tables, charts_of(results)), encoding="utf-8")
        _tell([f"wrote {output.html}"])


def _beside(path: Path, label: str) -> Path:
    """out.json of `threads=2`: out.threads=2.json."""
    name = "".join(c if c.isalnum() or c in "=._-" else "_" for c in label)
    return path.with_name(f"{path.stem}.{name}{path.suffix}")


def _run(work: Coroutine[Any, Any, Made]) -> Made:
    try:
        import uvloop
    except ImportError:  # not to be had on every platform
        return asyncio.run(work)
    return uvloop.run(work)


def _tell(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
