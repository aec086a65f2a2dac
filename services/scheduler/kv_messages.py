"""KV events as messages. Pure."""

from typing import assert_never

from services.scheduler.core.calls import KvCleared, KvRemoved, KvStored
from services.scheduler.kv_events import Numbered
from tercet.v1 import scheduler_pb2


def event(numbered: Numbered) -> scheduler_pb2.SchedulerServiceWatchKvEventsResponse:
    message = scheduler_pb2.SchedulerServiceWatchKvEventsResponse(sequence=numbered.sequence)
    match numbered.event:
        case KvStored(keys=keys, parent=parent, block_size=block_size):
            message.stored.MergeFrom(
                scheduler_pb2.KvBlocksStored(
                    keys=keys, parent_key=parent, block_size=block_size, executor=numbered.executor
                )
            )
        case KvRemoved(keys=keys):
            message.removed.MergeFrom(scheduler_pb2.KvBlocksRemoved(keys=keys, executor=numbered.executor))
        case KvCleared():
            message.cleared.MergeFrom(scheduler_pb2.KvBlocksCleared(executor=numbered.executor))
        case other:
            assert_never(other)
    return message
