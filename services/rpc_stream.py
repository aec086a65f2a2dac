"""How a handler's messages go out, and how long one may wait for the client to read.

Invariant: the handler's generator is closed when this returns. Must not know calls or statuses.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Self

from services.errors import ResourceExhausted


async def deliver(result: Any, write: Callable[[Any], Awaitable[None]], slow_reader_s: float | None) -> None:
    """Drive a streaming handler, be it a generator of messages or a coroutine that writes them.

    A generator whose client leaves a message unread for too long is told so by the ResourceExhausted thrown into it.
    """
    if not isinstance(result, AsyncGenerator):
        await result
        return
    async with aclosing(result) as messages, _Patience(slow_reader_s) as patience:
        async for message in messages:
            patience.begin()
            try:
                await write(message)
            except asyncio.CancelledError:
                if not patience.is_over():
                    raise
                slow = ResourceExhausted(
                    f"a message of this stream was not read within {slow_reader_s:g} s", reason="SLOW_READER"
                )
                await messages.athrow(slow)
                raise slow from None
            patience.end()


class _Patience:
    """Cancels the task that made it when one wait takes longer than `limit_s`; None: never.

    One timer for all waits, since a stream waits once a token: so a wait ends up to a quarter of the limit late.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._since: float | None = None
        self._fired = False

    async def __aenter__(self) -> Self:
        self._arm()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def begin(self) -> None:
        self._since = self._loop.time()

    def end(self) -> None:
        self._since = None

    def is_over(self) -> bool:
        """Whether the cancellation that has just come is this one, and no other came with it."""
        return self._fired and self._task is not None and self._task.uncancel() == 0

    def _arm(self) -> None:
        if self._limit_s is not None:
            self._timer = self._loop.call_later(self._limit_s / 4, self._look)

    def _look(self) -> None:
        if self._since is None or self._limit_s is None or self._loop.time() - self._since < self._limit_s:
            self._arm()
        elif self._task is not None:
            self._fired = True
            self._task.cancel()
