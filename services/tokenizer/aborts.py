"""Requests under way at an edge, by name, so that one who did not make the call can end them.

An abort may overtake its request: it is remembered for a while, as the scheduler does. Must not know what a request
does. Invariant: an aborted request's call to the scheduler is cancelled, and it makes no other.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from services.callers import Caller
from services.errors import Cancelled
from services.scheduler.tombstones import RequestName, Tombstones


class Call(Protocol):
    def cancel(self) -> bool: ...


class UnderWay:
    """One request. call: the one that it waits for now."""

    def __init__(self) -> None:
        self.aborted = False
        self.call: Call | None = None

    def abort(self) -> None:
        self.aborted = True
        if self.call is not None:
            self.call.cancel()

    def check(self) -> None:
        """Raises Cancelled once it is aborted."""
        if self.aborted:
            raise Cancelled("the request was aborted", reason="ABORTED_BY_CALLER")


class Aborts:
    """clock: nanoseconds, monotonic."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._under_way: dict[RequestName, list[UnderWay]] = {}
        self._early = Tombstones()

    @contextmanager
    def request(self, caller: Caller) -> Iterator[UnderWay]:
        """Around its life. Raises Cancelled where its abort came before it."""
        name = (caller.tenant, caller.request_id)
        if self._early.take(name, caller.attempt, self._clock()):
            raise Cancelled("the request was aborted before it came", reason="ABORTED_EARLY")
        request = UnderWay()
        self._under_way.setdefault(name, []).append(request)
        try:
            yield request
        finally:
            others = self._under_way[name]
            others.remove(request)
            if not others:
                del self._under_way[name]

    def abort(self, tenant: str, request_id: str) -> bool:
        """Whether it was under way, in any of its attempts; else the name is remembered."""
        found = self._under_way.get((tenant, request_id))
        if found is None:
            self._early.put((tenant, request_id), None, self._clock())
            return False
        for request in found:
            request.abort()
        return True
