"""Who may come in: the one check of callers that every port of a process shares, gRPC and HTTP alike.

Owns which method needs which role, and the keys as they are in their files now. Must not know a transport.
Invariants: with a gate that is closed nobody gets in without a valid key; a method that no row names needs a service's
key; a file that can't be read any more, or no longer holds what it should, changes nothing.
"""

import asyncio
import hmac
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Generic, TypeVar

from services import keys
from services.errors import InvalidArgument, PermissionDenied, ServiceError, Unauthenticated
from services.keys import KeyFile, Principal, Role
from services.settings import ConfigError

T = TypeVar("T")

POLL_S: Final = 1.0
MOST_BYTES: Final = 64 << 20
SHORTEST_SECRET: Final = 32
SERVICE: Final = Principal("service", Role.SERVICE)

# Without a key on any port: whether a server is alive and ready, and what its contract is.
OPEN: Final = ("grpc.health.v1.Health/", "grpc.reflection.")

# Methods, or whole services where the name ends with "/". The longest that fits counts; what fits none needs a service.
LEAST_ROLE: Final[Mapping[str, Role]] = {
    "tercet.v1.TokenizerService/": Role.USER,
    "tercet.v1.SchedulerService/Generate": Role.USER,
    "tercet.v1.SchedulerService/Stop": Role.USER,
    "tercet.v1.SchedulerService/Abort": Role.USER,
    "tercet.v1.SchedulerService/PinPrefix": Role.USER,
    "tercet.v1.SchedulerService/Describe": Role.USER,
    "tercet.v1.SchedulerService/": Role.OPERATOR,
    "tercet.v1.ExecutorService/": Role.SERVICE,
    "vllm.grpc.engine.VllmEngine/": Role.USER,
    "vllm.grpc.engine.VllmEngine/GetLoads": Role.OPERATOR,
    "vllm.grpc.engine.VllmEngine/FlushCache": Role.OPERATOR,
    "vllm.grpc.engine.VllmEngine/SubscribeKvEvents": Role.OPERATOR,  # it tells tokens of everybody's prompts
}

log = logging.getLogger(__name__)


class Watched(Generic[T]):
    """What a file holds, read again when it has changed. The first reading raises ConfigError where it is no good."""

    def __init__(self, flag: str, path: Path, read: Callable[[bytes], T]) -> None:
        self._path = path
        self._read = read
        try:
            self._seen, self.value = self._load()
        except (OSError, ServiceError) as error:
            raise ConfigError(f"{flag}: {_why(error)}", field=flag) from error

    def refresh(self, force: bool = False) -> bool:
        """Whether the value is a new one. A file that is no good is logged and changes nothing."""
        try:
            if not force and self._stamp() == self._seen:
                return False
            self._seen, value = self._load()
        except (OSError, ServiceError) as error:
            log.error("a file of keys is no good; what was read before still holds", extra={"reason": _why(error)})
            return False
        is_new = value != self.value
        self.value = value
        return is_new

    def _load(self) -> tuple[tuple[int, int, int], T]:
        stamp = self._stamp()
        if stamp[1] > MOST_BYTES:
            raise InvalidArgument(f"{self._path} has {stamp[1]} bytes; at most {MOST_BYTES} are read")
        return stamp, self._read(self._path.read_bytes())

    def _stamp(self) -> tuple[int, int, int]:
        seen = self._path.stat()
        return seen.st_mtime_ns, seen.st_size, seen.st_ino


class Gate:
    """api_keys, service_keys: files; None: no such keys are known. Where both are None the gate is open."""

    def __init__(self, api_keys: str | None = None, service_keys: str | None = None) -> None:
        self._users = None if api_keys is None else Watched("--api-keys", Path(api_keys), keys.parse)
        self._services = (
            None if service_keys is None else Watched("--service-key-file", Path(service_keys), parse_service_keys)
        )

    @property
    def is_open(self) -> bool:
        return self._users is None and self._services is None

    @property
    def users(self) -> KeyFile:
        return KeyFile() if self._users is None else self._users.value

    @property
    def service_key(self) -> str | None:
        """What this process shows to the services that it calls."""
        return None if self._services is None else self._services.value[0]

    def admit(self, authorization: str | None) -> Principal | None:
        """Who comes with this `authorization`; None: the gate is open, and the caller is whoever the call says.

        Raises Unauthenticated. The message never holds what was presented.
        """
        if self.is_open:
            return None
        if authorization is None:
            raise Unauthenticated(
                "a key is needed: authorization: Bearer KEY", reason="NO_API_KEY", field="authorization"
            )
        scheme, _, presented = authorization.partition(" ")
        if scheme.lower() != "bearer" or not presented:
            raise Unauthenticated(
                "authorization must be: Bearer KEY", reason="BAD_AUTHORIZATION", field="authorization"
            )
        presented = presented.strip()
        own = () if self._services is None else self._services.value
        if sum(hmac.compare_digest(presented.encode(), one.encode()) for one in own):
            return SERVICE
        found = self.users.find(presented)
        if found is None:
            raise Unauthenticated("this key is not known here", reason="INVALID_API_KEY", field="authorization")
        return found.principal

    def refresh(self, force: bool = False) -> None:
        if self._users is not None and self._users.refresh(force):
            log.info("API keys read anew", extra={"keys": len(self.users.keys)})
        if self._services is not None and self._services.refresh(force):
            log.info("service keys read anew")

    async def watch(self, reload: asyncio.Event) -> None:
        """Reads what has changed, and everything when `reload` is set. Until cancelled."""
        while True:
            try:
                async with asyncio.timeout(POLL_S):
                    await reload.wait()
            except TimeoutError:
                self.refresh()
            else:
                reload.clear()
                self.refresh(force=True)


OPEN_GATE: Final = Gate()


def least_role(method: str) -> Role | None:
    """What a caller of `pkg.v1.Service/Method` needs; None: nothing at all."""
    if method.startswith(OPEN):
        return None
    fitting = [name for name in LEAST_ROLE if method == name or (name.endswith("/") and method.startswith(name))]
    return LEAST_ROLE[max(fitting, key=len)] if fitting else Role.SERVICE


def check_role(principal: Principal | None, least: Role | None, what: str) -> None:
    """Raises PermissionDenied. principal: None where no keys are asked for."""
    if principal is not None and least is not None and principal.role < least:
        raise PermissionDenied(
            f"{what} needs the key of {_ROLES[least]}; this is the key of {_ROLES[principal.role]}",
            reason="ROLE_TOO_LOW",
        )


def parse_service_keys(raw: bytes) -> tuple[str, ...]:
    """One a line; the first is shown to others, all are taken. Raises InvalidArgument."""
    try:
        lines = tuple(line.strip() for line in raw.decode("ascii").splitlines() if line.strip())
    except UnicodeDecodeError:
        raise InvalidArgument("a service key must be ASCII") from None
    if not lines:
        raise InvalidArgument("there is no service key in it")
    if any(len(line) < SHORTEST_SECRET or not line.isprintable() or " " in line for line in lines):
        raise InvalidArgument(
            f"a service key has at least {SHORTEST_SECRET} printable characters and no space",
            limit=SHORTEST_SECRET,
        )
    return lines


_ROLES: Final = {Role.USER: "a user", Role.OPERATOR: "an operator", Role.SERVICE: "a service"}


def _why(error: OSError | ServiceError) -> str:
    return error.message if isinstance(error, ServiceError) else f"{error.filename}: {error.strerror}"
