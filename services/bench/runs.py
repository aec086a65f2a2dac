"""A whole run: against one server every stage, again and again; or a chain for each variant, in turn.

Owns the order of what is measured: all of it once, then all again, so that a machine whose speed drifts treats all
alike.
"""

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from services.bench.document import Document, StageResult, result_of
from services.bench.grpc_target import GrpcTarget
from services.bench.http_client import parse_url
from services.bench.http_target import HttpTarget
from services.bench.machine import environment
from services.bench.options import OptionError, Where
from services.bench.plan import Settings, Stage
from services.bench.progress import StageProgress
from services.bench.session import Session, open_session
from services.bench.target import Drawing, ServerFacts, Target
from services.bench.vary import Variant
from services.catalogue import DEFAULT_MODEL, cache_directory, resolve
from services.simulate.options import read_objectives
from services.stack import Stack, StackOptions

READY_S: Final = 300.0


async def measured(where: Where, settings: Settings, planned: Sequence[Stage], label: str, command: str) -> Document:
    before = environment()
    progress = StageProgress(sys.stderr, settings.repeats)
    results: list[StageResult] = []
    async with open_target(where, settings) as target:
        session = await open_session(target, settings, planned)
        for repeat in range(settings.repeats):
            results += await _round(session, planned, repeat, progress)
        return Document(label, command, settings, session.facts, before, tuple(results))


async def _round(session: Session, planned: Sequence[Stage], repeat: int, progress: StageProgress) -> list[StageResult]:
    objectives = read_objectives(session.settings.slo)
    results = []
    for stage in planned:
        run = await session.run(stage, repeat, progress.begin)
        results.append(result_of(run, objectives))
        progress.ended(results[-1])
    return results


@asynccontextmanager
async def open_target(where: Where, settings: Settings) -> AsyncIterator[Target]:
    """A server that runs already, or a chain of our own."""
    drawing = Drawing(settings.temperature, settings.seed)
    key = None
    if where.key_variable is not None:
        key = os.environ.get(where.key_variable)
        if not key:
            raise OptionError(f"--key-variable: {where.key_variable} is not set")
    if where.url is not None:
        yield HttpTarget(
            parse_url(where.url, key),
            drawing,
            model=where.model,
            server=where.server,
            extra=where.extra,
            chat=settings.chat,
        )
        return
    if where.target is not None:
        async with _grpc(where.target, drawing, key, settings) as target:
            yield target
        return
    options = stack_options(where.model, where.backend)
    async with Stack(options, os.environ) as stack:
        await stack.ready(READY_S)
        async with _grpc(stack.target, drawing, key, settings) as target:
            yield target


@asynccontextmanager
async def _grpc(address: str, drawing: Drawing, key: str | None, settings: Settings) -> AsyncIterator[Target]:
    target = GrpcTarget(address, drawing, key=key, chat=settings.chat)
    try:
        yield target
    finally:
        await target.close()


def stack_options(model: str | None, backend: str, variant: Variant | None = None) -> StackOptions:
    """Raises CatalogueError."""
    model = model or DEFAULT_MODEL
    resolve(model, cache_directory(os.environ))
    flags = {} if variant is None else variant.flags
    return StackOptions(
        model,
        log_level="error",
        tokenizer=flags.get("tokenizer", ()),
        scheduler=flags.get("scheduler", ()),
        executor=("--backend", backend, *flags.get("executor", ())),
    )


async def varied(
    chains: Sequence[StackOptions], labels: Sequence[str], settings: Settings, planned: Sequence[Stage], command: str
) -> list[Document]:
    """One chain at a time: A B A B. Each is started anew, so no round finds what another left behind."""
    before = environment()
    progress = StageProgress(sys.stderr, settings.repeats)
    results: list[list[StageResult]] = [[] for _ in chains]
    servers: dict[int, ServerFacts] = {}
    for repeat in range(settings.repeats):
        for index, options in enumerate(chains):
            print(f"{labels[index]}, round {repeat + 1}/{settings.repeats}", file=sys.stderr, flush=True)
            async with Stack(options, os.environ) as stack:
                await stack.ready(READY_S)
                drawing = Drawing(settings.temperature, settings.seed)
                async with _grpc(stack.target, drawing, None, settings) as target:
                    session = await open_session(target, settings, planned)
                    results[index] += await _round(session, planned, repeat, progress)
                    servers[index] = session.facts
    return [
        Document(label, command, settings, servers[index], before, tuple(results[index]))
        for index, label in enumerate(labels)
    ]
