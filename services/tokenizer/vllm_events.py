"""`SubscribeKvEvents`: what is cached behind this edge, as a gateway that routes by it wants to hear it.

Owns the watching of the schedulers' KV events, and the numbers of the batches told. One edge is one worker to the
gateway, so a block counts as cached while any scheduler behind it has it. Nothing is watched before somebody
subscribes. Invariant: batches are numbered without a gap, and a subscriber who can't be given those from a number on
gets the whole state instead.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
from smg_grpc_proto.generated import common_pb2 as smg_pb2

from services.errors import FailedPrecondition
from services.rpc_errors import from_rpc_error
from services.tokenizer.cached_blocks import CachedBlocks, Change, Gone, PassedBy, Told
from services.tokenizer.schedulers import Scheduler, Schedulers
from tercet.v1 import scheduler_pb2

MOST_BATCHES: Final = 4096  # kept for those who were away
SNAPSHOT_BLOCKS: Final = 2048  # in one message
FIRST: Final = 1 << 20  # number before the first batch: a snapshot's messages are numbered backwards from it
RETRY_S: Final = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batch:
    sequence: int
    at: float  # seconds since 1970
    changes: tuple[Change, ...]


class CacheEvents:
    """clock: seconds since 1970."""

    def __init__(self, schedulers: Schedulers, clock: Callable[[], float] = time.time) -> None:
        self._schedulers = schedulers
        self._clock = clock
        self._blocks = CachedBlocks()
        self._kept: deque[Batch] = deque(maxlen=MOST_BATCHES)
        self._last = FIRST
        self._grown = asyncio.Event()
        self._wanted = asyncio.Event()

    async def watch(self) -> None:
        """Until cancelled. Begins when somebody has subscribed."""
        await self._wanted.wait()
        async with asyncio.TaskGroup() as group:
            for scheduler in self._schedulers:
                group.create_task(self._follow(scheduler))

    def learn(self, numerics: str, tenant: str, *token_ids: Sequence[int]) -> None:
        """A sequence that goes by, in parts."""
        if self._wanted.is_set():
            ids = tuple(token_id for part in token_ids for token_id in part)
            self._add(self._blocks.learn(PassedBy(numerics, tenant, ids)))

    async def subscribe(self, start: int) -> AsyncIterator[Any]:
        """KvEventBatches without end. start: number of the first; 0, or one that is not to be had: the state of now."""
        self._wanted.set()
        oldest = self._kept[0].sequence if self._kept else self._last + 1
        at = start
        if not max(oldest, FIRST + 1) <= start <= self._last + 1:
            at = self._last + 1
            for message in self._snapshot():
                yield message
        while True:
            while at <= self._last:
                ahead = at - self._kept[0].sequence
                if ahead < 0:
                    raise FailedPrecondition(
                        f"batch {at} is no longer kept; the reader stayed behind", reason="EVENTS_GONE"
                    )
                yield _message(self._kept[ahead])
                at += 1
            self._grown.clear()
            await self._grown.wait()

    async def _follow(self, scheduler: Scheduler) -> None:
        first: int | None = 1
        while True:
            stream = scheduler.asking.WatchKvEvents(
                scheduler_pb2.SchedulerServiceWatchKvEventsRequest(from_sequence=first)
            )
            first = 1
            try:
                async for event in stream:
                    self._add(self._changes(scheduler.target, event))
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
                if isinstance(failure, FailedPrecondition) and (failure.limit or "").isdecimal():
                    first = int(failure.limit or 0)
                    continue
                log.info("KV events end", extra={"scheduler": scheduler.target, "reason": failure.message})
            finally:
                stream.cancel()
            self._add(self._blocks.lost(scheduler.target))
            await asyncio.sleep(RETRY_S)

    def _changes(self, target: str, event: scheduler_pb2.SchedulerServiceWatchKvEventsResponse) -> list[Change]:
        match event.WhichOneof("event"):
            case "stored":
                place = (target, event.stored.executor)
                return self._blocks.stored(place, event.stored.keys, event.stored.block_size)
            case "removed":
                return self._blocks.removed((target, event.removed.executor), event.removed.keys)
            case "cleared":
                return self._blocks.cleared((target, event.cleared.executor))
        return []

    def _add(self, changes: Sequence[Change]) -> None:
        if changes:
            self._last += 1
            self._kept.append(Batch(self._last, self._clock(), tuple(changes)))
            self._grown.set()

    def _snapshot(self) -> Iterator[Any]:
        told = tuple(self._blocks.told)
        parts = [told[at : at + SNAPSHOT_BLOCKS] for at in range(0, max(1, len(told)), SNAPSHOT_BLOCKS)]
        for index, blocks in enumerate(parts):
            message = _message(Batch(self._last - len(parts) + 1 + index, self._clock(), blocks))
            message.snapshot.CopyFrom(smg_pb2.KvSnapshotChunk(index=index, count=len(parts), blocks=len(told)))
            if index == 0:
                message.events.insert(0, smg_pb2.KvCacheEvent(cleared=smg_pb2.KvCacheCleared()))
            yield message


def _message(batch: Batch) -> Any:
    return smg_pb2.KvEventBatch(
        sequence_number=batch.sequence,
        timestamp=batch.at,
        events=[_event(change) for change in batch.changes],
        dp_rank=0,
    )


def _event(change: Change) -> Any:
    match change:
        case Told(key=key, parent=parent, token_ids=token_ids):
            block = smg_pb2.KvBlock(block_hash=_hash(key), token_ids=token_ids, block_size=len(token_ids))
            return smg_pb2.KvCacheEvent(
                stored=smg_pb2.KvBlocksStored(
                    blocks=[block], parent_block_hash=None if parent is None else _hash(parent)
                )
            )
        case Gone(keys=keys):
            return smg_pb2.KvCacheEvent(removed=smg_pb2.KvBlocksRemoved(block_hashes=[_hash(key) for key in keys]))


def _hash(key: bytes) -> int:
    """Of a block's key what a name there has room for."""
    return int.from_bytes(key[:8], "big", signed=True)
