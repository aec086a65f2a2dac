"""API keys: who may call, as whom, and how a file of them is read and written. Pure.

A key is `tercet_ID_SECRET`: an id that names it in logs and commands, and 32 random bytes. The file holds the SHA-256
of the whole key, never the key: what is random over 256 bits can't be guessed from its hash, so no slow hash is needed.
Invariant: whether a key is right is decided by comparing digests in constant time; a `KeyFile` that exists is valid.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum
from typing import Any, Final

from services.errors import InvalidArgument
from services.scheduler.core.limits import TOP_PRIORITY

TENANT: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
KEY: Final = re.compile(r"tercet_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
SECRET_BYTES: Final = 32
ID_BYTES: Final = 6
VERSION: Final = 1
NOTE_LIMIT: Final = 200
MOST_KEYS: Final = 100_000
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class Role(IntEnum):
    """Each may do what those below it may. USER: generate as one tenant. OPERATOR: also watch and steer servers.
    SERVICE: a process of the chain, which says by itself on whose behalf it calls."""

    USER = 1
    OPERATOR = 2
    SERVICE = 3


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls. tenant: None: whoever the call names. max_priority: the highest that it may ask for."""

    name: str
    role: Role
    tenant: str | None = None
    max_priority: int = TOP_PRIORITY


@dataclass(frozen=True, slots=True)
class ApiKey:
    """sha256: of the whole key, hex. role: "user" or "operator". created: ISO 8601, for people."""

    id: str
    sha256: str
    tenant: str
    role: str = "user"
    max_priority: int = 0
    created: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        where = f"the key {self.id!r}"
        _require(re.fullmatch(r"[0-9a-f]{12}", self.id) is not None, f"{where}: an id is 12 hexadecimal digits")
        _require(_DIGEST.fullmatch(self.sha256) is not None, f"{where}: sha256 must be 64 hexadecimal digits")
        _require(
            TENANT.fullmatch(self.tenant) is not None,
            f"{where}: the tenant must be 1 to 128 characters of A-Z a-z 0-9 . _ : -",
        )
        _require(self.role in ("user", "operator"), f"{where}: role is {self.role!r}, allowed is user or operator")
        _require(
            type(self.max_priority) is int and abs(self.max_priority) <= TOP_PRIORITY,
            f"{where}: max_priority must be -{TOP_PRIORITY} to {TOP_PRIORITY}",
        )
        _require(len(self.note) <= NOTE_LIMIT, f"{where}: a note has at most {NOTE_LIMIT} characters")

    @property
    def principal(self) -> Principal:
        return Principal(self.id, Role[self.role.upper()], self.tenant, self.max_priority)


@dataclass(frozen=True, slots=True)
class KeyFile:
    """keys: by id. quotas: of tenants, in the notation of `--tenant-quotas`, read by schedulers."""

    keys: Mapping[str, ApiKey] = field(default_factory=dict)
    quotas: Mapping[str, str] = field(default_factory=dict)

    def find(self, presented: str) -> ApiKey | None:
        """The key that was presented; None: there is no such key."""
        form = KEY.fullmatch(presented)
        known = None if form is None else self.keys.get(form[1])
        # An unknown id costs the same comparison: its absence can't be told by the time of an answer.
        wanted = "0" * 64 if known is None else known.sha256
        is_equal = hmac.compare_digest(digest(presented), wanted)
        return known if is_equal else None


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def new_key(id_bytes: bytes, secret: bytes, encoded: str) -> tuple[str, str]:
    """An id and the whole key of random bytes. encoded: `secret` in URL-safe base64 without padding."""
    if len(id_bytes) != ID_BYTES or len(secret) != SECRET_BYTES:
        raise ValueError(f"an id has {ID_BYTES} bytes, a secret {SECRET_BYTES}")
    return id_bytes.hex(), f"tercet_{id_bytes.hex()}_{encoded}"


def parse(raw: bytes) -> KeyFile:
    """Raises InvalidArgument that says what is wrong, without any digest in it."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the keys file is not JSON: {error}", reason="BAD_KEYS_FILE") from None
    _require(isinstance(content, dict), "the keys file must hold a JSON object")
    _known(content, {"version", "keys", "quotas"}, "the keys file")
    _require(
        content.get("version") == VERSION, f"the keys file is of version {content.get('version')!r}, not {VERSION}"
    )
    rows = content.get("keys", [])
    _require(isinstance(rows, list) and len(rows) <= MOST_KEYS, f"keys must be a list of at most {MOST_KEYS}")
    keys: dict[str, ApiKey] = {}
    for row in rows:
        key = _api_key(row)
        _require(key.id not in keys, f"the key {key.id!r} comes twice")
        keys[key.id] = key
    quotas = content.get("quotas", {})
    _require(
        isinstance(quotas, dict) and all(isinstance(text, str) for text in quotas.values()),
        "quotas must be an object of texts",
    )
    return KeyFile(keys, dict(quotas))


def dump(file: KeyFile) -> bytes:
    """What `parse` reads."""
    content = {
        "version": VERSION,
        "keys": [asdict(key) for key in file.keys.values()],
        "quotas": dict(file.quotas),
    }
    return json.dumps(content, indent=1).encode() + b"\n"


def _api_key(row: Any) -> ApiKey:
    _require(isinstance(row, dict), "each of keys must be an object")
    types = {one.name: one.type for one in fields(ApiKey)}
    _known(row, types, "a key")
    for name in ("id", "sha256", "tenant"):
        _require(name in row, f"a key has no {name}")
    for name, value in row.items():
        expected = int if name == "max_priority" else str
        _require(type(value) is expected, f"{name} of the key {row['id']!r} must be of type {expected.__name__}")
    return ApiKey(**row)


def _known(row: Mapping[str, Any], names: Any, what: str) -> None:
    unknown = sorted(set(row) - set(names))
    _require(not unknown, f"{what} has unknown entries: {', '.join(unknown)}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidArgument(message, reason="BAD_KEYS_FILE")
