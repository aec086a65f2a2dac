"""Processes that work on what nobody vouches for, and that are killed when it takes too long.

Owns the processes, who has which, and the limits of time, size and waiting. Must not know what the messages mean.
Invariants: a worker has one message at a time; one that is killed or dies fails the one message that it had; the event
loop never waits for more than a pipe.
"""

import asyncio
import logging
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from services.tokenizer import worker
from services.tokenizer.worker import Message

READ_AHEAD_BYTES: Final = 1 << 20

log = logging.getLogger(__name__)


def module(name: str) -> tuple[str, ...]:
    """The command that runs a module of ours as a worker."""
    return (sys.executable, "-m", name)


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """answer_s: seconds for one message. start_s: for a process and its opening. processes: at most so many. warm: so
    many are kept started. waiting: messages that wait for a process. answer_bytes: of one answer."""

    answer_s: float
    start_s: float = 30.0
    processes: int = 1
    warm: int = 0
    waiting: int = 64
    answer_bytes: int = 1 << 27


class WorkerFailure(Exception):
    """Base of what can go wrong."""


class WorkerTooSlow(WorkerFailure):
    """It had longer than `answer_s` and was killed."""


class WorkerDied(WorkerFailure):
    """It ended, or answered what is no answer, and was killed."""


class WorkersBusy(WorkerFailure):
    """So many messages wait already."""


class WorkerNotStarted(WorkerFailure):
    """It ended or said nothing before it took a message."""


@dataclass(slots=True)
class Workers:
    """opening: makes a worker's first message; it is called in a thread. One event loop's; `close` it."""

    command: tuple[str, ...]
    opening: Callable[[], Message]
    limits: WorkerLimits
    _idle: list[Process] = field(default_factory=list)
    _all: set[Process] = field(default_factory=set)
    _starting: int = 0
    _waiting: deque[asyncio.Future[Process]] = field(default_factory=deque)
    _tasks: set[asyncio.Task[object]] = field(default_factory=set)
    _closed: bool = False

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(process.pid for process in self._all)

    def warm(self) -> None:
        """Starts what is to be kept started; returns at once."""
        while not self._closed and len(self._all) + self._starting < self.limits.warm:
            self._start()

    async def ask(self, message: Message) -> Message:
        """The worker's answer. Whoever stops waiting leaves the worker to its message, under the same limits, since to
        start another costs more than nearly every message. Raises WorkerFailure."""
        process = await self._take()
        task = asyncio.create_task(self._work(process, message))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Ends every worker."""
        self._closed = True
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in tuple(self._all):
            await self._kill(process)
        self._fail_waiting()

    async def _take(self) -> Process:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
            await self._kill(process)
        if len(self._waiting) >= self.limits.waiting:
            raise WorkersBusy
        turn: asyncio.Future[Process] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._start_for_waiting()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._free(turn.result())
            raise
        finally:
            with suppress(ValueError):
                self._waiting.remove(turn)

    def _start_for_waiting(self) -> None:
        if self._waiting and not self._closed and len(self._all) + self._starting < self.limits.processes:
            self._start()

    def _start(self) -> None:
        self._starting += 1
        task = asyncio.create_task(self._started())
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    async def _started(self) -> None:
        process: Process | None = None
        is_ready = False
        try:
            made = await asyncio.to_thread(self.opening)
            opening = Message({**made.head, "answer_s": self.limits.answer_s}, made.body)
            async with asyncio.timeout(self.limits.start_s):
                process = await asyncio.create_subprocess_exec(
                    *self.command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=READ_AHEAD_BYTES
                )
                self._all.add(process)
                await _exchange(process, opening, self.limits.answer_bytes)
            is_ready = True
        except Exception:  # whatever it was, the one who waits must hear of it
            log.warning("a worker does not start", exc_info=True)
        finally:
            self._starting -= 1
            if process is not None and is_ready:
                self._free(process)
            elif process is not None:
                await self._kill(process)
        if not is_ready:  # one who waits is told; for the next, another try
            self._fail_first()
            self._start_for_waiting()

    async def _work(self, process: Process, message: Message) -> Message:
        try:
            async with asyncio.timeout(self.limits.answer_s):
                answer = await _exchange(process, message, self.limits.answer_bytes)
        except BaseException as error:
            await self._kill(process)
            self.warm()
            self._start_for_waiting()
            if isinstance(error, TimeoutError):
                raise WorkerTooSlow from None
            if isinstance(error, OSError | EOFError | ValueError):
                raise WorkerDied from error
            raise
        self._free(process)
        return answer

    def _free(self, process: Process) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(process)
                return
        self._idle.append(process)

    def _fail_first(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(WorkerNotStarted())
                return

    def _fail_waiting(self) -> None:
        while self._waiting:
            self._fail_first()

    async def _kill(self, process: Process) -> None:
        self._all.discard(process)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if process.stdin is not None:
            process.stdin.close()

    def _forget(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the one who asked may have gone; then nobody else looks at it


async def _exchange(process: Process, message: Message, most_bytes: int) -> Message:
    """Raises EOFError, OSError, ValueError."""
    if process.stdin is None or process.stdout is None:
        raise EOFError
    process.stdin.write(worker.pack(message))
    await process.stdin.drain()
    head, body = worker.unpack_lengths(await process.stdout.readexactly(worker.LENGTHS_BYTES))
    if head + body > most_bytes:
        raise ValueError(f"an answer of {head + body} bytes")
    return worker.unpack(await process.stdout.readexactly(head), await process.stdout.readexactly(body))
