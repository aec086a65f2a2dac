"""Live requests by the name that callers know them by. Invariant: a name belongs to its highest attempt."""

from services.errors import AlreadyExists
from services.scheduler.live import LiveRequest
from services.scheduler.tombstones import RequestName


class Named:
    def __init__(self) -> None:
        self._live: dict[RequestName, LiveRequest] = {}

    def put(self, live: LiveRequest) -> None:
        self._live[_name(live)] = live

    def drop(self, live: LiveRequest) -> None:
        """Where the name is another's by now, that one keeps it."""
        if self._live.get(_name(live)) is live:
            del self._live[_name(live)]

    def find(self, name: RequestName) -> LiveRequest | None:
        return self._live.get(name)

    def superseded(self, name: RequestName, attempt: int) -> LiveRequest | None:
        """The live request whose place this attempt takes. Raises AlreadyExists where it isn't a higher one."""
        live = self.find(name)
        if live is None or attempt > live.admission.caller.attempt:
            return live
        raise AlreadyExists(
            f"request {name[1]} is live with attempt {live.admission.caller.attempt}; a retry needs a higher attempt",
            field="context.request_id",
        )


def _name(live: LiveRequest) -> RequestName:
    return live.admission.caller.tenant, live.admission.caller.request_id
