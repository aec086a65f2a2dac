"""An owner's side of a step stream, for checks: claims, steps, and results that are looked at on the way in."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import grpc

from executor.step import NewSequence, SamplingParams, Slice, Step
from services.conform.kit import ANSWER_S, Refusal, check_status, fail, require
from services.wire import StepOrder, step_to_proto
from tercet.v1 import common_pb2, executor_pb2

if TYPE_CHECKING:
    from tercet.v1.executor_pb2_grpc import ExecutorServiceAsyncStub

Description = executor_pb2.ExecutorServiceDescribeResponse
GREEDY: Final = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Executor:
    """The subject of the checks."""

    channel: grpc.aio.Channel
    stub: "ExecutorServiceAsyncStub"
    description: Description

    @property
    def vocab_size(self) -> int:
        return self.description.model.vocab_size

    def prompt(self, length: int, first: int = 3) -> tuple[int, ...]:
        """Ids of the vocabulary that end nothing."""
        ends = set(self.description.model.eos_token_ids)
        usable = [one for one in range(min(self.vocab_size, 4096)) if one not in ends]
        return tuple(usable[(first + 7 * at) % len(usable)] for at in range(length))

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.description.block_size)


@dataclass
class Owner:
    """One stream. heartbeats: those that came so far."""

    call: Any
    executor: Executor
    epoch: int = 0
    step_id: int = 0
    heartbeats: list[executor_pb2.Heartbeat] = field(default_factory=list)
    _sent: dict[int, tuple[int, ...]] = field(default_factory=dict)  # step -> slots that sample

    async def claim(self, scheduler_id: str = "conform", **changes: Any) -> executor_pb2.Granted:
        await self.ask(scheduler_id, **changes)
        message = await self.read()
        kind = message.WhichOneof("message")
        require(kind == "granted", f"a claim was answered with {kind}; expected granted")
        self.epoch = message.granted.epoch
        return message.granted

    async def ask(self, scheduler_id: str = "conform", **changes: Any) -> None:
        claim = executor_pb2.Claim(
            scheduler_id=scheduler_id,
            model_hash=changes.get("model_hash", self.executor.description.model.model_hash),
            schema_revision=changes.get("schema_revision", common_pb2.SCHEMA_REVISION_ONE),
            takeover=changes.get("takeover", False),
        )
        await self.send(executor_pb2.ExecutorServiceRunRequest(claim=claim))

    async def send(self, message: executor_pb2.ExecutorServiceRunRequest) -> None:
        with suppress(asyncio.InvalidStateError):  # the stream has ended: reading tells how
            await self.call.write(message)

    def order(self, *slices: Slice, step_id: int | None = None, epoch: int | None = None) -> executor_pb2.Step:
        """The next step, as a message that a check may still spoil."""
        if step_id is None:
            self.step_id += 1
        whole = Step(self.step_id if step_id is None else step_id, slices)
        self._sent[whole.step_id] = tuple(piece.slot for piece in slices if piece.samples)
        return step_to_proto(StepOrder(whole, self.epoch if epoch is None else epoch))

    async def step(self, *slices: Slice, **changes: Any) -> None:
        await self.send(executor_pb2.ExecutorServiceRunRequest(step=self.order(*slices, **changes)))

    async def result(self) -> executor_pb2.StepResult:
        """The next one, whole and for the step whose turn it is; heartbeats before it are kept aside."""
        while True:
            message = await self.read()
            match message.WhichOneof("message"):
                case "heartbeat":
                    self.heartbeats.append(message.heartbeat)
                case "result":
                    return self._checked(message.result)
                case other:
                    fail(f"the executor sent {other} after granted")

    async def run(self, *slices: Slice) -> list[int]:
        """A step and what it drew, one token for each slice that samples."""
        await self.step(*slices)
        return drawn(await self.result())

    async def read(self) -> executor_pb2.ExecutorServiceRunResponse:
        message = await self.call.read()
        if message is grpc.aio.EOF:
            code = await self.call.code()
            raise grpc.aio.AioRpcError(
                code, grpc.aio.Metadata(), await self.call.trailing_metadata(), await self.call.details() or ""
            )
        answer: executor_pb2.ExecutorServiceRunResponse = message
        return answer

    async def end(self, *codes: grpc.StatusCode, what: str, quiet: bool = False) -> Refusal:
        """What the stream ends with, one of `codes`. Results before it are skipped; quiet: none may come."""
        try:
            async with asyncio.timeout(ANSWER_S):
                while True:
                    message = await self.read()
                    require(not quiet or message.HasField("heartbeat"), "a result came that no step is owed")
        except grpc.aio.AioRpcError as error:
            return check_status(error, *codes, what=what)
        except TimeoutError:
            fail(f"{what}: the stream goes on; expected {' or '.join(code.name for code in codes)}")

    def _checked(self, result: executor_pb2.StepResult) -> executor_pb2.StepResult:
        due = min(self._sent, default=0)
        require(result.step_id == due, f"the result of step {result.step_id} came; expected that of {due or 'no step'}")
        slots = self._sent.pop(due)
        told = tuple(one.slot for one in result.results)
        require(told == slots, f"step {due} was answered for the slots {told}; slices that sample are {slots}")
        for one in result.results:
            if one.HasField("error"):
                require(one.error.code, f"slot {one.slot}: an error without a code")
                require(not one.token_ids, f"slot {one.slot}: tokens and an error")
            else:
                require(one.token_ids, f"slot {one.slot}: neither a token nor an error")
            outside = [token for token in one.token_ids if token >= self.executor.vocab_size]
            require(not outside, f"slot {one.slot}: the tokens {outside} are outside the vocabulary")
        return result


def drawn(result: executor_pb2.StepResult) -> list[int]:
    for one in result.results:
        require(not one.HasField("error"), f"slot {one.slot} failed: {one.error.message}")
    return [one.token_ids[0] for one in result.results]


@asynccontextmanager
async def stream_to(executor: Executor) -> AsyncIterator[Owner]:
    """Not claimed yet; cancelled at the end."""
    call: Any = executor.stub.Run()
    try:
        yield Owner(call, executor)
    finally:
        call.cancel()


@asynccontextmanager
async def owning(executor: Executor, **claim: Any) -> AsyncIterator[Owner]:
    """Holds the lease. What a check before left behind may take a moment to go."""
    deadline = asyncio.get_running_loop().time() + ANSWER_S
    while True:
        async with stream_to(executor) as owner:
            try:
                await owner.claim(**claim)
            except grpc.aio.AioRpcError as error:
                is_late = asyncio.get_running_loop().time() > deadline
                if error.code() is not grpc.StatusCode.FAILED_PRECONDITION or is_late:
                    raise
                await asyncio.sleep(0.05)
                continue
            yield owner
            return


def first(
    slot: int,
    ids: Sequence[int],
    blocks: Sequence[int],
    sampling: SamplingParams = GREEDY,
    *,
    prompt_len: int | None = None,
    samples: bool = True,
    cached: Sequence[int] = (),
) -> Slice:
    """The first slice of a new sequence. cached: ids before it, whose blocks come first. prompt_len: where the slice is
    not the whole rest of the prompt."""
    length = len(cached) + len(ids) if prompt_len is None else prompt_len
    new = NewSequence(sampling, length, cached_token_ids=tuple(cached))
    return Slice(slot, len(cached), len(ids), tuple(ids), tuple(blocks), samples, new)


def further(slot: int, start: int, blocks: Sequence[int] = (), ids: Sequence[int] = (), samples: bool = True) -> Slice:
    """A later one; without ids its input is the token that the slot drew last."""
    return Slice(slot, start, len(ids) or 1, tuple(ids), tuple(blocks), samples)


async def generate(owner: Owner, slot: int, prompt: Sequence[int], count: int, blocks: Sequence[int]) -> list[int]:
    """A prompt in one slice, then `count` tokens in all. blocks: enough for everything."""
    tokens = await owner.run(first(slot, prompt, blocks))
    for at in range(count - 1):
        tokens += await owner.run(further(slot, len(prompt) + at))
    return tokens
