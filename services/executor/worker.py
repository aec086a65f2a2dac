"""The thread that owns the model: loads it, runs steps and resets, in the order in which they were asked for.

Owns the runner: no other thread touches it. Must not know gRPC, nor who owns the lease beyond a number. Invariants:
jobs run one at a time, first in first out, so a reset ends after every step before it; a step starts only while its
epoch is current, and no step of an epoch starts after one of its steps failed.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from executor.grammar.grammars import GrammarsBusy
from executor.step import Capacity, Grammar, Step, StepResult
from services.description import ModelIdentity
from services.wire import StepOrder

T = TypeVar("T")

HANG_FLOOR_NS: Final = 10_000_000_000
HANG_FACTOR: Final = 20
UNPREDICTED_FACTOR: Final = 12  # of the floor: nobody knows yet how slow this machine is


class StepRunner(Protocol):
    """What runs steps. Called from one thread only, which also made it.

    numerics: equal for two runners means equal tokens. run raises its step error for a step that breaks the
    contract; whatever else it raises is a failure of the step as a whole. reset: empties the pool and every slot,
    also after a failure.
    """

    @property
    def capacity(self) -> Capacity: ...

    @property
    def numerics(self) -> str: ...

    def run(self, step: Step) -> StepResult: ...

    def reset(self) -> None: ...


class GrammarSource(Protocol):
    """Compiles grammars beside the steps; see `executor.grammar.grammars.Grammars`."""

    def prepare(self, grammar: Grammar, done: Callable[[str | None], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class Held:
    """What loading gives. step_error: what the runner raises for a step that breaks the contract. backend: for
    people. weight_bytes, kv_bytes: resident. grammars: None where sequences can have none. kv_format: of the pages,
    empty where there are none. late_kernels: how many were compiled since, in the midst of steps."""

    runner: StepRunner
    step_error: type[Exception]
    model: ModelIdentity
    backend: str
    weight_bytes: int = 0
    kv_bytes: int = 0
    grammars: GrammarSource | None = None
    kv_format: str = ""
    late_kernels: Callable[[], int] = int


@dataclass(frozen=True, slots=True)
class Running:
    """The step in the thread now. started_ns: monotonic. limit_ns: beyond it the step counts as hung."""

    order: StepOrder
    started_ns: int
    limit_ns: int


@dataclass(frozen=True, slots=True)
class Stale:
    """Not run: `current` is the epoch that holds, 0 if none."""

    current: int


@dataclass(frozen=True, slots=True)
class Failed:
    """bad_step: the owner's doing; else the runner's."""

    error: Exception
    bad_step: bool


Outcome = StepResult | Stale | Failed


@dataclass(frozen=True, slots=True)
class StepDone:
    """Times are monotonic; started_ns and ended_ns are equal where the step was not run."""

    order: StepOrder
    outcome: Outcome
    arrived_ns: int
    started_ns: int
    ended_ns: int


def hang_limit_ns(predicted_ns: int | None, floor_ns: int = HANG_FLOOR_NS) -> int:
    """Nanoseconds after which a step counts as hung. Without a prediction the floor alone would end a slow machine's
    first prefill, again and again."""
    return UNPREDICTED_FACTOR * floor_ns if predicted_ns is None else max(floor_ns, HANG_FACTOR * predicted_ns)


class Worker:
    """Made on the event loop that its answers go to; `start` before anything else, `close` at the end."""

    def __init__(self, *, hang_floor_ns: int = HANG_FLOOR_NS) -> None:
        self._hang_floor_ns = hang_floor_ns
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="model", daemon=True)
        self._held: Held | None = None
        # Read by the thread, written by the loop; and the other way round. Each is one reference, never a pair.
        self._epoch = 0
        self._failed_epoch = 0
        self._running: Running | None = None

    @property
    def running(self) -> Running | None:
        return self._running

    async def start(self, load: Callable[[], Held]) -> Held:
        """Run `load` in the thread, and keep what it gives."""
        self._thread.start()
        held = await self._call(load)
        self._held = held
        return held

    def admit(self, epoch: int) -> None:
        """Steps of `epoch`, and of no other, may start from here on."""
        self._epoch = epoch

    def revoke(self, epoch: int) -> None:
        """No further step of `epoch` starts. Does nothing where another one is admitted."""
        if self._epoch == epoch:
            self._epoch = 0

    async def reset(self) -> None:
        """Return when every step asked for before has ended and the pool is empty."""
        await self._call(self._loaded().runner.reset)

    def submit(self, order: StepOrder, arrived_ns: int, deliver: Callable[[StepDone], None]) -> None:
        """Queue a step; `deliver` is called on the loop when it is done, whatever became of it."""
        self._loaded()
        self._jobs.put(partial(self._step, order, arrived_ns, deliver))

    def prepare(self, grammar: Grammar, deliver: Callable[[str | None, bool], None]) -> None:
        """Have a grammar compiled beside the steps; `deliver` is called on the loop: (what is wrong with it, whether
        that is only that too many others wait)."""
        grammars = self._loaded().grammars
        if grammars is None:
            deliver("this executor serves no grammars", False)
            return
        try:
            grammars.prepare(grammar, lambda problem: self._post(deliver, problem, False))
        except GrammarsBusy as error:
            deliver(str(error), True)

    async def close(self, limit_s: float = 5.0) -> bool:
        """Let the present job end, skip the steps behind it. False: the thread was still busy at the limit."""
        self._epoch = 0
        if not self._thread.is_alive():
            return True
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, limit_s)
        return not self._thread.is_alive()

    def _loaded(self) -> Held:
        if self._held is None:
            raise RuntimeError("the worker has not loaded its runner")
        return self._held

    async def _call(self, function: Callable[[], T]) -> T:
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put(partial(self._answer, function, future))
        return await future

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _answer(self, function: Callable[[], T], future: "asyncio.Future[T]") -> None:
        try:
            value = function()
        except Exception as error:
            self._post(_settle, future, None, error)
        else:
            self._post(_settle, future, value, None)

    def _step(self, order: StepOrder, arrived_ns: int, deliver: Callable[[StepDone], None]) -> None:
        started_ns = time.monotonic_ns()
        current = self._epoch
        if order.epoch != current or order.epoch == self._failed_epoch:
            self._post(deliver, StepDone(order, Stale(current), arrived_ns, started_ns, started_ns))
            return
        self._running = Running(order, started_ns, hang_limit_ns(order.predicted_ns, self._hang_floor_ns))
        held = self._loaded()
        outcome: Outcome
        try:
            result = held.runner.run(order.step)
            outcome = replace(result, timings=replace(result.timings, wait_ns=max(0, started_ns - arrived_ns)))
        except Exception as error:
            self._failed_epoch = order.epoch
            outcome = Failed(error, bad_step=isinstance(error, held.step_error))
        finally:
            self._running = None
        self._post(deliver, StepDone(order, outcome, arrived_ns, started_ns, time.monotonic_ns()))

    def _post(self, callback: Callable[..., object], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            # The loop is closed: the process is going, and nobody waits for the answer.
            if not self._loop.is_closed():
                raise


def _settle(future: "asyncio.Future[Any]", value: object, error: Exception | None) -> None:
    if future.done():  # whoever waited was cancelled
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
