"""Tercet against llama.cpp and vLLM on this machine: `python benchmarks/against_peers.py --peers PATH/TO/peers.py`.

Everything is measured in turn, round after round, and each result is written to the state file at once; a run that was
interrupted goes on where it was. One server at a time; every process that is started is ended. At the end the table of
medians and ratios is printed, and written into the document between its markers. docs/performance.md has the method.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
from peer_figures import ENGINE, MODES, OURS, ROOT, Figure, State, put, read_state, report

from services.bench.document import StageResult, result_of
from services.bench.http1 import ProtocolError
from services.bench.http_client import parse_url, request
from services.bench.http_target import HttpTarget
from services.bench.plan import Settings, stages
from services.bench.session import open_session
from services.bench.target import Drawing, TargetError
from services.catalogue import DEFAULT_MODEL
from services.simulate.summary import Objectives

DOCUMENT: Final = ROOT / "docs/performance.md"
PARTS: Final = ("engine", "prefill", "served", "modes", "perplexity")
WHO: Final = {
    "served": (OURS, ENGINE, "llama-q8", "llama-q40", "vllm"),
    "modes": (OURS, *(mode.system for mode in MODES)),
}
OWN: Final = (OURS, ENGINE, *(mode.system for mode in MODES))
BATCHES: Final = (1, 8, 32)
READY_S: Final = 300.0
END_S: Final = 45.0
COMMAND_S: Final = 1200.0

LOAD: Final = Settings(tiers=(256,), output=128, concurrency=BATCHES, warm_up=4, repeats=1)
# llama-server gives each of its 32 slots 1,024 tokens.
FIRST_TOKEN: Final = Settings(tiers=(1000,), output=16, concurrency=(8,), requests=8, warm_up=1, repeats=1)


class MeasurementFailed(Exception):
    """One measurement gave no figures; the others go on."""


@contextmanager
def process(
    command: Sequence[str], environ: Mapping[str, str], log: Path, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process with a session of its own; on leaving it is ended, with what it has started."""
    with log.open("w", encoding="utf-8") as stream:
        child = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stderr=stream,
            text=True,
            start_new_session=True,
            **options,
        )
    try:
        yield child
    finally:
        end(child)


def end(child: "subprocess.Popen[str]") -> None:
    """SIGTERM to its group, and SIGKILL to what is left of it."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signum)
        until = time.monotonic() + END_S
        while time.monotonic() < until:
            if child.poll() is not None and not alive(child.pid):
                return
            time.sleep(0.1)


def alive(group: int) -> list[int]:
    """Processes of the group, those left out that only wait to be reaped."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(one.pid) == group and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one.pid)
    return found


def lines_of(command: Sequence[str], log: Path) -> list[dict[str, Any]]:
    """The JSON objects that a command prints. Raises MeasurementFailed with the last words of its log."""
    with process(command, os.environ, log, stdout=subprocess.PIPE) as child:
        try:
            printed, _ = child.communicate(timeout=COMMAND_S)
        except subprocess.TimeoutExpired as error:
            raise MeasurementFailed(f"no end within {COMMAND_S:g} s") from error
    found = []
    for line in filter(None, printed.splitlines()):
        if line.startswith("{"):
            found.append(json.loads(line))
        else:  # such as which peer gave no result; its cells stay empty
            print(f"  {Path(command[1]).name}: {line}", file=sys.stderr, flush=True)
    if child.returncode != 0 or not found:
        raise MeasurementFailed(f"exit code {child.returncode}, {printed[-300:]!r}, {log.read_text()[-300:]!r}")
    return found


@dataclass(frozen=True, slots=True)
class Bench:
    """What every measurement needs. logs: a directory for what the processes say."""

    peers: Path
    text: Path
    model: str
    backend: str
    logs: Path

    def measure(self, part: str, who: str) -> list[tuple[str, str, float]]:
        """(system, figure, value). Raises MeasurementFailed."""
        match part:
            case "engine":
                return self.engine(who, BATCHES, 128)
            case "prefill":
                return self.engine(who, (1,), 1000)
            case "modes":
                return [*self.engine(who, BATCHES, 128), *self.engine(who, (1,), 1000)]
            case "perplexity":
                return self.perplexity(who)
        return self.engine_under_load() if who == ENGINE else self.served(who)

    def engine(self, who: str, batches: Sequence[int], prompt: int) -> list[tuple[str, str, float]]:
        found = []
        for line in self.own_engine(who, batches, prompt) if who in OWN else self.peers_engines(batches, prompt):
            system = who if who in OWN else str(line["peer"])
            if prompt > 128:
                found.append((system, f"prefill {prompt}", float(line["prefill"])))
            else:
                found.append((system, f"decode x{line['batch']}", float(line["decode"])))
        return found

    def engine_under_load(self) -> list[tuple[str, str, float]]:
        """What the engine alone makes of the load that the servers are measured with."""
        lines = self.own_engine(ENGINE, BATCHES, LOAD.tiers[0])
        return [(ENGINE, f"tokens/s x{line['batch']}", float(line["output"])) for line in lines]

    def own_engine(self, who: str, batches: Sequence[int], prompt: int) -> list[dict[str, Any]]:
        command = [sys.executable, str(ROOT / "benchmarks/engine_speed.py"), "--model", self.model]
        command += ["--backend", self.backend, "--batch", ",".join(map(str, batches)), "--prompt", str(prompt)]
        for mode in MODES:
            if mode.system == who:
                command += ["--weights", mode.weights, "--activations", mode.activations]
        return lines_of(command, self.logs / f"engine-{who}.log")

    def peers_engines(self, batches: Sequence[int], prompt: int) -> list[dict[str, Any]]:
        sizes = ",".join(map(str, batches))
        command = [sys.executable, str(self.peers), "engine", "--batch", sizes, "--prompt", str(prompt)]
        return lines_of(command, self.logs / "engine-peers.log")

    def perplexity(self, who: str) -> list[tuple[str, str, float]]:
        size = ["--bytes", "120000"]
        command = [sys.executable, str(self.peers), "perplexity", *size]
        if who == OURS:
            ours = ["--model", self.model, "--backend", self.backend, "--file", str(self.text), "--json"]
            command = [sys.executable, "-m", "services.cli", "eval", "perplexity", *ours, *size]
        found = lines_of(command, self.logs / f"perplexity-{who}.log")
        if who == OURS:
            return [(OURS, "perplexity", float(line["value"])) for line in found]
        return [(str(line["peer"]), "perplexity", float(line["perplexity"])) for line in found]

    def served(self, who: str) -> list[tuple[str, str, float]]:
        port = free_port()
        command = [sys.executable, str(self.peers), "serve", who, "--port", str(port)]
        if who == OURS:
            doors = ["--listen", f"127.0.0.1:{free_port()}", "--http", f"127.0.0.1:{port}"]
            command = [
                sys.executable,
                "-m",
                "services.cli",
                "up",
                "--model",
                self.model,
                "--backend",
                self.backend,
                *doors,
            ]
        log = self.logs / f"served-{who}.log"
        with process(command, os.environ, log, stdout=subprocess.DEVNULL) as child:
            try:
                found = asyncio.run(ask(f"http://127.0.0.1:{port}", "/ready" if who == OURS else "/health", child))
            except TargetError as error:
                raise MeasurementFailed(f"{error}; {log.read_text()[-300:]!r}") from error
        return [(who, name, value) for name, value in found]


async def ask(url: str, health: str, child: "subprocess.Popen[str]") -> list[tuple[str, float]]:
    """Figures of one server. Raises TargetError; where one request fails, since then it is not the same work."""
    site = parse_url(url)
    until = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(OSError, ProtocolError):
            if (await request(site, health)).status == 200:
                break
        if child.poll() is not None:
            raise TargetError(f"the server ended with {child.returncode}")
        if time.monotonic() > until:
            raise TargetError(f"the server was not ready after {READY_S:g} s")
        await asyncio.sleep(0.25)
    target = HttpTarget(site, Drawing(0.0, 1))
    load = [(f"tokens/s x{one.level:g}", one.figures.output_tokens_per_s) for one in await asked(target, LOAD)]
    first = [one.figures.ttft.p50 for one in await asked(target, FIRST_TOKEN)]
    return [*load, *(("first token x8, 1,000 in, ms", value) for value in first if value is not None)]


async def asked(target: HttpTarget, settings: Settings) -> list[StageResult]:
    made = stages(settings)
    session = await open_session(target, settings, made)
    results = [result_of(await session.run(stage, 0), Objectives()) for stage in made]
    for result in results:
        if result.figures.failures:
            raise TargetError(f"{result.name}, {result.load}: {'; '.join(result.samples)}")
    return results


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def planned(parts: Sequence[str], rounds: int) -> Iterator[tuple[int, str, str]]:
    """(round, part, who) in order: ours first in one round, last in the next. Perplexity never changes: once."""
    for number in range(rounds):
        for part in (one for one in PARTS if one in parts):
            if part == "perplexity" and number:
                continue
            who = list(WHO.get(part, (OURS, "peers")))
            yield from ((number, part, one) for one in (who if number % 2 == 0 else reversed(who)))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--peers", type=Path, required=True, help="peers.py; its setup has been run")
    parser.add_argument(
        "--text", type=Path, help="for the perplexity; default ../text/wikitext2_test.txt beside peers.py"
    )
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, by commas; default {','.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--for-s", type=float, default=math.inf, help="begin no measurement after so many seconds")
    parser.add_argument("--state", type=Path, default=Path("against_peers.json"), help="default against_peers.json")
    parser.add_argument("--fresh", action="store_true", help="begin anew where there is a state already")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="that the table is written into")
    parser.add_argument("--no-document", action="store_true", help="print the table only")
    chosen = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started is ended
    parts = [part for part in chosen.only.split(",") if part]
    text = chosen.text or chosen.peers.resolve().parent.parent / "text/wikitext2_test.txt"
    if not parts or set(parts) - set(PARTS):
        parser.error(f"--only: known are {', '.join(PARTS)}")
    if chosen.rounds < 1:
        parser.error("--rounds must be at least 1")
    for path in (chosen.peers, *([text] if "perplexity" in parts else [])):
        if not path.is_file():
            parser.error(f"there is no {path}")
    if chosen.fresh:
        chosen.state.unlink(missing_ok=True)
    state = read_state(chosen.state, {"model": chosen.model, "backend": chosen.backend})
    logs = chosen.state.with_suffix(".logs")
    logs.mkdir(exist_ok=True)
    bench = Bench(chosen.peers.resolve(), text, chosen.model, chosen.backend, logs)
    until = time.monotonic() + chosen.for_s
    failures = measure(bench, planned(parts, chosen.rounds), state, chosen.state, until)
    shown = report(state, f"python benchmarks/against_peers.py --only {','.join(parts)} --rounds {chosen.rounds}")
    print(shown)
    if not chosen.no_document and state.figures:
        put(chosen.document, shown)
        print(f"wrote {chosen.document}", file=sys.stderr)
    return 1 if failures else 0


def measure(bench: Bench, todo: Iterator[tuple[int, str, str]], state: State, path: Path, until: float) -> int:
    """How many failed: they are told, and measured at the next run. none begins after `until` (monotonic clock)."""
    failures = 0
    for number, part, who in todo:
        key = f"{number}/{part}/{who}"
        if key in state.done:
            continue
        began = time.monotonic()
        if began > until:
            print(f"{key} and what comes after it are left for the next run", file=sys.stderr, flush=True)
            break
        try:
            found = bench.measure(part, who)
        except MeasurementFailed as error:
            failures += 1
            print(f"{key} failed: {error}", file=sys.stderr, flush=True)
            continue
        state.figures += [Figure(number, part, system, name, value) for system, name, value in found]
        state.done.append(key)
        state.write(path)
        told = ", ".join(f"{system} {name} {value:.4g}" for system, name, value in found)
        print(f"{key} ({time.monotonic() - began:.0f} s): {told}", file=sys.stderr, flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
