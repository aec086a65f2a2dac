"""Faults of an executor's stream, as opposed to its steps: what a broken executor or network would send.

Plugs into `ExecutorService(outgoing=...)`. Replace `faults` at any time.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from services.executor.lease import stale_epoch
from tercet.v1 import executor_pb2


@dataclass(frozen=True, slots=True)
class StreamFaults:
    """duplicate_results: results of these step ids are sent twice. stale_epoch_at: instead of this step's result the
    stream ends as if its epoch were over. drop_heartbeats: none is sent. grant_epoch: Granted tells this epoch
    instead of the true one."""

    duplicate_results: frozenset[int] = frozenset()
    stale_epoch_at: int | None = None
    drop_heartbeats: bool = False
    grant_epoch: int | None = None


class FaultyStream:
    def __init__(self, faults: StreamFaults = StreamFaults()) -> None:
        self.faults = faults

    def __call__(
        self, message: executor_pb2.ExecutorServiceRunResponse
    ) -> Iterable[executor_pb2.ExecutorServiceRunResponse]:
        faults = self.faults
        match message.WhichOneof("message"):
            case "heartbeat" if faults.drop_heartbeats:
                return ()
            case "granted" if faults.grant_epoch is not None:
                granted = executor_pb2.Granted(instance_id=message.granted.instance_id, epoch=faults.grant_epoch)
                return (executor_pb2.ExecutorServiceRunResponse(granted=granted),)
            case "result":
                return self._result(message, message.result.step_id)
        return (message,)

    def _result(
        self, message: executor_pb2.ExecutorServiceRunResponse, step_id: int
    ) -> Iterable[executor_pb2.ExecutorServiceRunResponse]:
        if step_id == self.faults.stale_epoch_at:
            raise stale_epoch(given=0, current=0)
        return (message, message) if step_id in self.faults.duplicate_results else (message,)
