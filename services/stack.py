"""The whole chain on one machine: three processes, Unix sockets between them, one front door.

Owns which process gets which address. What each setting means is `services.config`'s.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from services.health import check
from services.rpc import PLAIN, Outgoing
from services.supervisor import ChildRefused, ChildSpec, Supervisor

POLL_S: Final = 0.1
PROBE_S: Final = 2.0
DRAIN_S: Final = 30.0  # of a child, where TERCET_DRAIN_S says nothing else
CLOSE_MARGIN_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class StackOptions:
    """listen, http: addresses of the front door; None: a Unix socket only, no gateway. The three tuples: further flags
    of each process. probe: how its own front door is asked whether it is ready."""

    model: str
    listen: str | None = None
    http: str | None = None
    otlp_endpoint: str | None = None
    log_level: str | None = None
    tokenizer: tuple[str, ...] = ()
    scheduler: tuple[str, ...] = ()
    executor: tuple[str, ...] = ()
    probe: Outgoing = PLAIN


class NotReady(Exception):
    """The chain was not complete in time; the message says what was missing."""


class Stack:
    """`async with Stack(...) as stack:` runs it; `await stack.ready(limit_s)` waits until it can answer."""

    def __init__(self, options: StackOptions, environ: Mapping[str, str]) -> None:
        runtime = environ.get("XDG_RUNTIME_DIR", "")  # may be left over from a session that has ended
        self._probe = options.probe
        self._directory = Path(tempfile.mkdtemp(prefix="tercet-", dir=runtime if os.path.isdir(runtime) else None))
        self._drain_s = float(environ.get("TERCET_DRAIN_S") or DRAIN_S)
        self.target = options.listen or self._socket("tokenizer")
        scheduler, executor = self._socket("scheduler"), self._socket("executor")
        common = []
        if options.otlp_endpoint is not None:
            common += ["--otlp-endpoint", options.otlp_endpoint]
        if options.log_level is not None:
            common += ["--log-level", options.log_level]
        front = ["--listen", self.target, "--scheduler", scheduler, "--model", options.model]
        if options.http is not None:
            front += ["--http", options.http]
        # In the order in which they are to end: the edge first, so that nobody is cut off.
        self._supervisor = Supervisor(
            (
                ChildSpec("tokenizer", "services.tokenizer", (*front, *common, *options.tokenizer)),
                ChildSpec(
                    "scheduler",
                    "services.scheduler",
                    ("--listen", scheduler, "--executors", executor, *common, *options.scheduler),
                ),
                ChildSpec(
                    "executor",
                    "services.executor",
                    ("--listen", executor, "--model", options.model, *common, *options.executor),
                ),
            ),
            environ,
        )

    @property
    def supervisor(self) -> Supervisor:
        return self._supervisor

    async def __aenter__(self) -> Self:
        self._supervisor.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._supervisor.close(self._drain_s + CLOSE_MARGIN_S)
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)

    async def ready(self, limit_s: float) -> None:
        """Raises NotReady or ChildRefused."""
        failed = asyncio.create_task(self._supervisor.failed())
        reason: str | None = "nothing has answered yet"
        try:
            async with asyncio.timeout(limit_s):
                while not failed.done():
                    reason = await check(self.target, timeout=PROBE_S, outgoing=self._probe)
                    if reason is None:
                        return
                    await asyncio.sleep(POLL_S)
            failed.result()
        except TimeoutError:
            raise NotReady(f"not ready after {limit_s:g} s: {reason}") from None
        finally:
            failed.cancel()
            await asyncio.gather(failed, return_exceptions=True)
        raise ChildRefused("a child ended for good")

    def _socket(self, name: str) -> str:
        return f"unix:{self._directory / name}.sock"
