"""Steps with one thing wrong each: an executor must end the stream, and serve the next owner."""

from collections.abc import Awaitable, Callable
from typing import Final

import grpc

from services.conform.owner import Executor, first, owning
from tercet.v1 import executor_pb2

Spoil = Callable[[Executor, executor_pb2.Step], None]


def _first_slice(change: Callable[[Executor, executor_pb2.Slice], None]) -> Spoil:
    return lambda executor, step: change(executor, step.slices[0])


def _set(name: str, value: Callable[[Executor], int]) -> Spoil:
    return _first_slice(lambda executor, piece: setattr(piece, name, value(executor)))


def _without_sampling(executor: Executor, piece: executor_pb2.Slice) -> None:
    piece.new_sequence.sampling.ClearField("temperature")


def _no_new_sequence(executor: Executor, piece: executor_pb2.Slice) -> None:
    piece.ClearField("new_sequence")


def _token_outside(executor: Executor, piece: executor_pb2.Slice) -> None:
    piece.token_ids[0] = executor.vocab_size


def _block_outside(executor: Executor, piece: executor_pb2.Slice) -> None:
    piece.new_block_ids[0] = executor.description.total_blocks


def _no_blocks(executor: Executor, piece: executor_pb2.Slice) -> None:
    piece.ClearField("new_block_ids")


def _block_twice(executor: Executor, piece: executor_pb2.Slice) -> None:
    piece.new_block_ids.append(piece.new_block_ids[0])


def _ids_missing(executor: Executor, piece: executor_pb2.Slice) -> None:
    del piece.token_ids[-1]


def _slot_twice(executor: Executor, step: executor_pb2.Step) -> None:
    twin = step.slices.add()
    twin.CopyFrom(step.slices[0])
    twin.new_block_ids[:] = [one + len(twin.new_block_ids) for one in twin.new_block_ids]


def _no_slices(executor: Executor, step: executor_pb2.Step) -> None:
    step.ClearField("slices")


# Each is a good step with one thing wrong; the stream must end INVALID_ARGUMENT.
BAD_STEPS: Final[dict[str, tuple[str, Spoil]]] = {
    "slot": ("a slot beyond max_sequences", _set("slot", lambda executor: executor.description.max_sequences)),
    "start": ("a new sequence that starts behind 0 with nothing cached", _set("start", lambda executor: 1)),
    "count": ("a slice of no positions", _set("count", lambda executor: 0)),
    "ids": ("fewer ids than positions", _first_slice(_ids_missing)),
    "token": ("a token outside the vocabulary", _first_slice(_token_outside)),
    "block": ("a block outside the pool", _first_slice(_block_outside)),
    "block-twice": ("a block twice in one table", _first_slice(_block_twice)),
    "no-blocks": ("positions without blocks", _first_slice(_no_blocks)),
    "no-sequence": ("a slot that holds no sequence", _first_slice(_no_new_sequence)),
    "sampling": ("a new sequence that leaves its temperature open", _first_slice(_without_sampling)),
    "slot-twice": ("two slices of one slot", _slot_twice),
    "empty": ("a step without slices", _no_slices),
}


def ended_as_bad(what: str, spoil: Spoil) -> Callable[[Executor], Awaitable[None]]:
    async def run(executor: Executor) -> None:
        blocks = range(executor.blocks_for(4))
        async with owning(executor) as owner:
            step = owner.order(first(0, executor.prompt(3), blocks))
            spoil(executor, step)
            await owner.send(executor_pb2.ExecutorServiceRunRequest(step=step))
            await owner.end(grpc.StatusCode.INVALID_ARGUMENT, what=what)
        async with owning(executor) as owner:  # it goes on for the next owner
            await owner.run(first(0, executor.prompt(3), blocks))

    return run
