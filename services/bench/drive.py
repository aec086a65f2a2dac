"""Sends requests as a load says: closed loop (each client asks again when it has its answer) or open (at given times).

Knows no protocol: `ask` sends one request. Invariant: it returns when every request has its outcome.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from services.bench.record import Outcome, Reply
from services.simulate.load import Request


@dataclass(frozen=True, slots=True)
class Job:
    request: Request
    text: str


Ask = Callable[[Job], Awaitable[Reply]]
Tell = Callable[[Outcome], None]

clock = time.perf_counter_ns


async def closed_loop(clients: int, jobs: Sequence[Job], ask: Ask, tell: Tell) -> list[Outcome]:
    """The first `clients` jobs begin at once."""
    waiting = iter(jobs)
    outcomes: list[Outcome] = []

    async def client() -> None:
        for job in waiting:
            began = clock()
            outcome = Outcome(began, began, job.request.prompt_len, await ask(job))
            outcomes.append(outcome)
            tell(outcome)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(clients, len(jobs))):
            group.create_task(client())
    return outcomes


async def open_loop(jobs: Sequence[Job], ask: Ask, tell: Tell) -> list[Outcome]:
    """Each job begins at its `at_ns`, counted from the first one's, whether or not the others have ended.

    Times count from when a request was due, so a client that is late is seen in the figures, not hidden by them.
    """
    origin = clock() - jobs[0].request.at_ns

    async def one(job: Job, due: int) -> Outcome:
        began = clock()
        outcome = Outcome(due, began, job.request.prompt_len, await ask(job))
        tell(outcome)
        return outcome

    tasks = []
    async with asyncio.TaskGroup() as group:
        for job in jobs:
            due = origin + job.request.at_ns
            await asyncio.sleep(max(0, due - clock()) / 1e9)
            tasks.append(group.create_task(one(job, due)))
    return [task.result() for task in tasks]
