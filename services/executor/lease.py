"""Who owns the executor: one holder at a time, an epoch per grant.

Owns the epoch counter and the holder. Must not know streams, threads or clocks: time is an argument. Invariant:
epochs only grow, and at most one of them is current.

How the shell knows that a holder is gone: an owner sends steps only while there is work, so its silence proves
nothing. What proves it is its stream: gRPC ends it at once when the owner's process or connection goes, and the
server's HTTP/2 pings (`services.rpc`) end it when the peer is frozen or the network is cut. Either way the shell calls
`release`. So a claim is refused exactly as long as the holder's connection answers.
"""

from dataclasses import dataclass

from services.errors import FailedPrecondition, InvalidArgument, ServiceError, Unavailable
from services.rpc_server import REQUEST_ID_FORMAT


@dataclass(frozen=True, slots=True)
class Holder:
    """since_ns: when it was granted, on the caller's clock."""

    scheduler_id: str
    epoch: int
    since_ns: int


@dataclass(frozen=True, slots=True)
class Grant:
    """ousted: the holder that lost the lease by this claim."""

    holder: Holder
    ousted: Holder | None


class Lease:
    def __init__(self) -> None:
        self._epochs = 0
        self._holder: Holder | None = None
        self._draining = False

    @property
    def holder(self) -> Holder | None:
        return self._holder

    @property
    def draining(self) -> bool:
        return self._draining

    def claim(self, scheduler_id: str, *, takeover: bool, now_ns: int) -> Grant:
        """Raises InvalidArgument for a malformed name, Unavailable while draining, FailedPrecondition if held."""
        if REQUEST_ID_FORMAT.fullmatch(scheduler_id) is None:
            raise InvalidArgument(
                "claim.scheduler_id must be 1 to 128 characters of A-Z a-z 0-9 . _ : -",
                field="claim.scheduler_id",
                limit=128,
            )
        if self._draining:
            raise Unavailable("the executor is draining and takes no new owner", reason="DRAINING")
        ousted = self._holder
        if ousted is not None and not takeover:
            raise FailedPrecondition(
                f"the lease is held by {ousted.scheduler_id} since {(now_ns - ousted.since_ns) / 1e9:.1f} s",
                reason="LEASE_HELD",
                metadata={"holder": ousted.scheduler_id, "epoch": str(ousted.epoch)},
            )
        self._epochs += 1
        self._holder = Holder(scheduler_id, self._epochs, now_ns)
        return Grant(self._holder, ousted)

    def release(self, epoch: int) -> None:
        """The stream of `epoch` ended. Does nothing where another epoch is current."""
        if self._holder is not None and self._holder.epoch == epoch:
            self._holder = None

    def drain(self) -> None:
        """No claim is granted from here on; the holder stays."""
        self._draining = True


def lease_lost(ousted: Holder, successor: Holder) -> ServiceError:
    """What the ousted owner's stream ends with."""
    return FailedPrecondition(
        f"{successor.scheduler_id} took the lease over from {ousted.scheduler_id}",
        reason="LEASE_LOST",
        metadata={"holder": successor.scheduler_id, "epoch": str(successor.epoch)},
    )


def stale_epoch(given: int, current: int) -> ServiceError:
    return FailedPrecondition(
        f"the step is of epoch {given}, the lease is of epoch {current}",
        reason="STALE_EPOCH",
        metadata={"given": str(given), "current": str(current)},
    )
