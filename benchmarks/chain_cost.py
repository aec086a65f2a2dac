"""CPU time per token of everything but the model: gateway and tokenizer in one process, the scheduler in another.

`python benchmarks/chain_cost.py`. Real processes over Unix sockets, as `tercet up` starts them, but the executor is the
fake one at a fixed pace; clients read HTTP streams. For each number of streams it prints a line: tokens per second,
microseconds of CPU (user and system) per token of each process, and the share of the time in which the executor had
nothing to run though its sequences went on (gap).

Of the fake executor's own figure only the event loop's part means something: its runner keeps a store in Python.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from services.catalogue import DEFAULT_MODEL
from services.health import check

STEP_S: Final = {1: 0.004, 8: 0.016, 32: 0.064}  # 250, 500 and 500 tokens per second
READY_S: Final = 60.0


@dataclass
class Stream:
    """One client's stream. tokens: chunks with text so far."""

    tokens: int = 0
    began: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False

    async def read(self, path: str, new_tokens: int, number: int) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        body = json.dumps(
            {"model": DEFAULT_MODEL, "prompt": f"Number {number} says", "max_tokens": new_tokens, "stream": True}
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body)
        try:
            async for line in reader:
                if line.startswith(b"data: {"):
                    self.tokens += 1
                    self.began.set()
                elif line.startswith(b"data: [DONE]"):
                    self.ended = True
                    return
                elif line.startswith(b"HTTP/1.1 ") and b" 200 " not in line:
                    raise SystemExit(f"refused: {line!r}")
        finally:
            writer.close()


@dataclass(frozen=True)
class Running:
    name: str
    process: asyncio.subprocess.Process

    def cpu_s(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)


async def start(name: str, directory: Path, *arguments: str) -> Running:
    listen = ("--listen", f"unix:{directory}/{name}.sock")
    command = ["-m", f"services.{name}"]
    log = (directory / f"{name}.log").open("wb")
    process = await asyncio.create_subprocess_exec(sys.executable, *command, *listen, *arguments, stderr=log)
    return Running(name, process)


async def measure(streams: int, step_s: float, seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="tercet-cost-", dir=os.environ.get("XDG_RUNTIME_DIR")) as name:
        directory = Path(name)
        executor = ("--model", DEFAULT_MODEL, "--fake", "hash", "--fake-delay-s", str(step_s))
        metrics = f"unix:{directory}/metrics.sock"
        room = (
            "--metrics-listen",
            metrics,
            "--max-model-len",
            "8192",
            "--total-blocks",
            str(32 * 512),
            "--max-sequences",
            "64",
        )
        running: list[Running] = []
        try:
            running.append(await start("executor", directory, *executor, *room))
            running.append(await start("scheduler", directory, "--executors", f"unix:{directory}/executor.sock"))
            edge = ("--model", DEFAULT_MODEL, "--scheduler", f"unix:{directory}/scheduler.sock")
            running.append(await start("tokenizer", directory, *edge, "--http", f"unix:{directory}/http.sock"))
            await ready(f"unix:{directory}/tokenizer.sock")
            row = await load(streams, step_s, seconds, directory, running)
        finally:
            for one in reversed(running):
                with contextlib.suppress(ProcessLookupError):
                    one.process.send_signal(signal.SIGTERM)
                await one.process.wait()
        return row


async def ready(target: str) -> None:
    until = time.monotonic() + READY_S
    while (reason := await check(target, timeout=2.0)) is not None:
        if time.monotonic() > until:
            raise SystemExit(f"not ready after {READY_S:g} s: {reason}")
        await asyncio.sleep(0.2)


async def load(
    streams: int, step_s: float, seconds: float, directory: Path, running: Sequence[Running]
) -> dict[str, float]:
    """Begins when every stream has its first token, and ends before any has its last."""
    clients = [Stream() for _ in range(streams)]
    new_tokens = int((seconds + 2 + streams * 0.05) / step_s) + 64
    tasks = [
        asyncio.create_task(one.read(f"{directory}/http.sock", new_tokens, number))
        for number, one in enumerate(clients)
    ]
    try:
        for one in clients:
            await asyncio.wait_for(one.began.wait(), READY_S)
        await asyncio.sleep(0.5)
        gap_s = await idle_s(directory)
        began, before = time.monotonic(), {part.name: part.cpu_s() for part in running}
        tokens = sum(one.tokens for one in clients)
        own = time.process_time()
        await asyncio.sleep(seconds)
        elapsed = time.monotonic() - began
        tokens = sum(one.tokens for one in clients) - tokens
        gap_s = await idle_s(directory) - gap_s
        if any(one.ended for one in clients):
            raise SystemExit("a stream ended within the measurement")
        row = {"streams": float(streams), "tokens_per_s": round(tokens / elapsed, 1)}
        row["gap"] = round(gap_s / elapsed, 4)
        for part in running:
            row[f"{part.name}_us"] = round((part.cpu_s() - before[part.name]) / tokens * 1e6, 1)
        row["chain_us"] = round(row["tokenizer_us"] + row["scheduler_us"], 1)
        row["client_us"] = round((time.process_time() - own) / tokens * 1e6, 1)
        return row
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def idle_s(directory: Path) -> float:
    """The executor's own count."""
    reader, writer = await asyncio.open_unix_connection(f"{directory}/metrics.sock")
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    lines = (await reader.read()).decode().splitlines()
    writer.close()
    return next(float(line.split()[1]) for line in lines if line.startswith("tercet_executor_step_gap_seconds_total"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=sorted(STEP_S))
    parser.add_argument(
        "--step-ms", type=float, help="the executor's pace; default 4, 16 and 64 at 1, 8 and 32 streams"
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    chosen = parser.parse_args(argv)
    for streams in chosen.streams:
        step_s = chosen.step_ms / 1e3 if chosen.step_ms else STEP_S.get(streams, 0.064)
        row = asyncio.run(measure(streams, step_s, chosen.seconds))
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
