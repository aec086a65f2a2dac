"""What is behind a text edge, for tests in which something of it dies: a fake executor, a scheduler that comes back,
and edges that do."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from chain import CAPACITY, Chain, scheduler
from fake_stack import RunningExecutor, running_executor, until
from resumable import running_edge
from tiny_tokenizer import tiny_model

import tercet
from services.executor.fake import FakeRunner

MODEL = tiny_model()
PATIENT = tercet.RetryPolicy(attempts=200, initial_backoff=0.02, max_backoff=0.05)
ROOMY = replace(CAPACITY, vocab_size=MODEL.vocab_size, total_blocks=256)


@dataclass
class Behind:
    """An executor, and a scheduler on a fixed address that can be ended and started again."""

    fake: RunningExecutor
    current: Chain
    _stack: AsyncExitStack

    @property
    def target(self) -> str:
        return self.current.target

    async def end(self) -> None:
        await self._stack.aclose()

    async def start(self) -> None:
        self._stack = AsyncExitStack()
        self.current = await self._stack.enter_async_context(scheduler(self.fake.target, listen=self.target))
        await until(lambda: not self.current.lease.state.reason, "the lease")

    async def restart(self) -> None:
        await self.end()
        await self.start()


@asynccontextmanager
async def behind(delay_s: float = 0.004) -> AsyncIterator[Behind]:
    runner = FakeRunner("hash", ROOMY, eos_every=300)
    async with running_executor(runner=runner, tokenizer_hash=MODEL.hash, eos_token_ids=(1,)) as fake:
        stack = AsyncExitStack()
        first = await stack.enter_async_context(scheduler(fake.target))
        running = Behind(fake, first, stack)
        await until(lambda: not first.lease.state.reason, "the lease")
        runner.faults = replace(runner.faults, delay_s=delay_s)
        try:
            yield running
            await running.current.drained()
        finally:
            await running.end()
        assert not runner.violations


class Edges:
    """An edge at one address that can be ended and started again."""

    def __init__(self, back: Behind) -> None:
        self._back = back
        self._stack = AsyncExitStack()
        self.target = "127.0.0.1:0"

    async def start(self) -> None:
        self._stack = AsyncExitStack()
        edge = await self._stack.enter_async_context(running_edge(MODEL, self._back.target, listen=self.target))
        self.target = edge.target

    async def end(self) -> None:
        await self._stack.aclose()

    async def restart(self) -> None:
        await self.end()
        await self.start()
