"""Addresses as people write them in settings: `unix:/path`, `host:port`, `[v6]:port`.

Owns their form and limits. Must not know sockets or gRPC. Invariant: an Address that exists is well formed;
whether it can be had is found out when it is bound.
"""

import os
from dataclasses import dataclass
from typing import Final

from services.errors import InvalidArgument

UNIX_PATH_LIMIT: Final = 107  # sockaddr_un.sun_path on Linux is 108 bytes with its final zero


@dataclass(frozen=True, slots=True)
class Address:
    """Where a process listens or connects: a Unix socket's path, or host and port."""

    host: str
    port: int | None

    @property
    def is_unix(self) -> bool:
        return self.port is None

    @property
    def target(self) -> str:
        """As gRPC writes it."""
        if self.port is None:
            return f"unix:{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(text: str) -> Address:
    """`unix:/path`, `host:port` or `[v6]:port`; InvalidArgument says what is wrong with anything else."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if path.startswith("//"):
            path = path.removeprefix("//")
        size = len(os.fsencode(path))
        if not path:
            raise InvalidArgument("unix: needs a path after it", field="address")
        if size > UNIX_PATH_LIMIT:
            raise InvalidArgument(
                f"the Unix socket path {path} has {size} bytes, the limit is {UNIX_PATH_LIMIT}",
                field="address",
                limit=UNIX_PATH_LIMIT,
            )
        return Address(path, None)
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or (":" in bare and bare == host):
        raise InvalidArgument(f"{text!r} is no address: use host:port, [v6]:port or unix:/path", field="address")
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise InvalidArgument(f"the port {port!r} of {text!r} is not 0 to 65535", field="address", limit=65535)
    return Address(bare, int(port))
