"""Services as real processes for tests: started, waited for, ended, with their exit codes looked at."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from services.health import check

START_S = 120.0
END_S = 60.0


@dataclass
class Running:
    """log: the file that its standard error goes to."""

    name: str
    process: asyncio.subprocess.Process
    target: str
    log: Path

    async def ready(self, limit_s: float = START_S) -> None:
        reason: str | None = None
        for _ in range(round(limit_s / 0.1)):
            if self.process.returncode is not None:
                raise AssertionError(f"{self.name} ended with {self.process.returncode}:\n{self.log.read_text()}")
            reason = await check(self.target, timeout=2.0)
            if reason is None:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"{self.name} is not ready after {limit_s} s: {reason}\n{self.log.read_text()}")

    async def end(self, signum: int = signal.SIGTERM) -> int:
        """Its exit code after the signal."""
        if self.process.returncode is None:
            self.process.send_signal(signum)
        async with asyncio.timeout(END_S):
            return await self.process.wait()


@dataclass
class Processes:
    directory: Path
    running: list[Running]

    async def start(self, name: str, *arguments: str, target: str | None = None) -> Running:
        """`python -m services.NAME --listen TARGET ...`."""
        target = target or f"unix:{self.directory}/{name}.sock"
        log = self.directory / f"{name}-{len(self.running)}.log"
        with log.open("wb") as stream:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", f"services.{name}", "--listen", target, *arguments, stderr=stream
            )
        started = Running(name, process, target, log)
        self.running.append(started)
        return started

    def socket(self, name: str) -> str:
        return f"unix:{self.directory}/{name}.sock"


@asynccontextmanager
async def processes() -> AsyncIterator[Processes]:
    """Whatever is still running at the end is killed."""
    with tempfile.TemporaryDirectory(prefix="tercet-test-", dir=os.environ.get("XDG_RUNTIME_DIR")) as directory:
        started = Processes(Path(directory), [])
        try:
            yield started
        finally:
            for one in started.running:
                if one.process.returncode is None:
                    one.process.kill()
                    await one.process.wait()


async def fake_chain(started: Processes, model: Path, *executor_flags: str) -> Running:
    """All three processes, the fake executor with the real model's vocabulary; the edge is returned, ready."""
    await started.start("executor", "--model", str(model), "--fake", "hash", *executor_flags)
    await started.start("scheduler", "--executors", started.socket("executor"))
    edge = await started.start("tokenizer", "--model", str(model), "--scheduler", started.socket("scheduler"))
    await edge.ready()
    return edge
