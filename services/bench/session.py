"""Runs stages against one target: warm-up, then what is measured, each request judged."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.bench.drive import Job, Tell, clock, closed_loop, open_loop
from services.bench.plan import Settings, Stage, longest
from services.bench.prompts import Prompts, make_prompts
from services.bench.record import Outcome, Reply, checked
from services.bench.target import ServerFacts, Target, TargetError
from services.simulate.load import Request


@dataclass(frozen=True, slots=True)
class StageRun:
    """One stage, once. client_cpu_ns: CPU time of this process while it ran. began_ns: of the outcomes' clock."""

    stage: Stage
    repeat: int
    began_ns: int
    client_cpu_ns: int
    outcomes: tuple[Outcome, ...]


Begin = Callable[[Stage, int], Tell]
"""(stage, repeat) -> who is told each outcome"""


def unheard(stage: Stage, repeat: int) -> Tell:
    return lambda outcome: None


@dataclass(frozen=True, slots=True)
class Session:
    """A server that can be asked, and prompts made for it."""

    target: Target
    facts: ServerFacts
    prompts: Prompts
    settings: Settings

    async def run(self, stage: Stage, repeat: int, begin: Begin = unheard) -> StageRun:
        """Raises TargetError where not one request of the warm-up is served."""
        key = f"{stage.name}/{stage.load}/{repeat}"
        await self._warm_up(stage, self._jobs(f"{key}/warm-up", stage.warm_up))
        jobs = self._jobs(key, stage.requests)
        tell = begin(stage, repeat)
        began, cpu = clock(), time.process_time_ns()
        if stage.clients is not None:
            outcomes = await closed_loop(stage.clients, jobs, self._ask, tell)
        else:
            outcomes = await open_loop(jobs, self._ask, tell)
        return StageRun(stage, repeat, began, time.process_time_ns() - cpu, tuple(outcomes))

    async def _warm_up(self, stage: Stage, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        outcomes = await closed_loop(stage.clients or len(jobs), jobs, self._ask, lambda outcome: None)
        if not any(one.served for one in outcomes):
            first = outcomes[0].reply
            raise TargetError(
                f"{stage.name}, {stage.load}: no request is served; the first: {first.failure}, {first.detail}"
            )

    def _jobs(self, key: str, requests: Sequence[Request]) -> list[Job]:
        return [Job(request, self.prompts.text(f"{key}/{index}", request)) for index, request in enumerate(requests)]

    async def _ask(self, job: Job) -> Reply:
        wanted = job.request.output_len
        reply = await self.target.ask(job.text, wanted, self.settings.timeout_s)
        return checked(reply, job.request.prompt_len, wanted if self.facts.exact else None)


async def open_session(target: Target, settings: Settings, planned: Sequence[Stage]) -> Session:
    """Raises TargetError, PromptError; for a load that the server can't take, before any of it is sent."""
    facts = await target.describe()
    if facts.max_model_len is not None and longest(planned) > facts.max_model_len:
        raise TargetError(
            f"the longest request has {longest(planned)} tokens, in and out; the server takes {facts.max_model_len}. "
            "A trace's lengths are divided by --length-divisor"
        )
    prompts = await make_prompts(target.count, settings.seed, settings.shared_prefix)
    for length in {one.prompt_len for stage in planned for one in (*stage.requests, *stage.warm_up)}:
        prompts.check(length)
    return Session(target, facts, prompts, settings)
