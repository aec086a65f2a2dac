"""Keeps child processes running: start, restart with backoff, end in order.

Owns processes, not what they do. Invariant: when `close` returns, no child of this supervisor runs.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from services.process import EXIT_REFUSED, RESTARTS

log = logging.getLogger(__name__)

BACKOFF_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0)
STEADY_S: Final = 30.0  # alive for so long: the next failure counts as the first


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process: `python -m module *arguments`."""

    name: str
    module: str
    arguments: tuple[str, ...]


class ChildRefused(Exception):
    """A child exited because of its configuration; starting it again would change nothing."""


class Supervisor:
    """Runs children of one kind of life: all of them until `close`."""

    def __init__(self, children: Sequence[ChildSpec], environ: Mapping[str, str]) -> None:
        self._specs = tuple(children)
        self._environ = {"GRPC_VERBOSITY": "ERROR", **environ}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._closing = False

    def start(self) -> None:
        for spec in self._specs:
            self._keepers[spec.name] = asyncio.create_task(self._keep(spec), name=f"keep {spec.name}")

    def pid(self, name: str) -> int | None:
        """Of the child as it runs now."""
        process = self._processes.get(name)
        return None if process is None or process.returncode is not None else process.pid

    async def failed(self) -> None:
        """Returns never; raises ChildRefused when a child can't be started."""
        # Not gather: cancelled, it would cancel the keepers too, and then nothing were started again.
        done, _ = await asyncio.wait(self._keepers.values(), return_when=asyncio.FIRST_EXCEPTION)
        for keeper in done:
            keeper.result()

    def hurry(self) -> None:
        """SIGTERM to all that still run: a child that drains ends at once, the others begin to drain."""
        for spec in self._specs:
            process = self._processes.get(spec.name)
            if process is not None and process.returncode is None:
                process.send_signal(signal.SIGTERM)

    async def close(self, limit_s: float) -> None:
        """SIGTERM to one child after the other, in the order given; SIGKILL to what is left after `limit_s` each."""
        self._closing = True
        for spec in self._specs:
            keeper = self._keepers[spec.name]
            process = self._processes.get(spec.name)
            if process is not None and process.returncode is None:
                process.send_signal(signal.SIGTERM)
                try:
                    async with asyncio.timeout(limit_s):
                        await process.wait()
                except TimeoutError:
                    log.error("child did not end in time", extra={"child": spec.name, "limit_s": limit_s})
                    process.kill()
                    await process.wait()
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)

    async def _keep(self, spec: ChildSpec) -> None:
        failures = restarts = 0
        while not self._closing:
            began = time.monotonic()
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.child",
                str(os.getpid()),
                spec.module,
                *spec.arguments,
                env={**self._environ, RESTARTS: str(restarts)},
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is the supervisor's to pass on, in order
            )
            self._processes[spec.name] = process
            code = await process.wait()
            if self._closing:
                return
            if code == EXIT_REFUSED:
                raise ChildRefused(f"{spec.name} refused its configuration; its message is above")
            failures = 1 if time.monotonic() - began > STEADY_S else failures + 1
            pause = BACKOFF_S[min(failures - 1, len(BACKOFF_S) - 1)]
            log.error("child ended, starting it again", extra={"child": spec.name, "code": code, "pause_s": pause})
            restarts += 1
            await asyncio.sleep(pause)
