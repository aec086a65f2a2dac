"""The certificates of a port, read again when their files change: for gRPC, HTTP and metrics alike.

Owns the reading; which port uses which files is `services.trust`'s. Each new connection looks at the files' stamps, so
a changed certificate is shown from the next connection on and those that stand stay. Invariant: files that are no good
(missing, half written, not belonging together) are logged once, and what was read before still holds.
"""

import logging
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar, cast

import grpc

from services.settings import ConfigError

T = TypeVar("T")
Stamp = tuple[int, int, int] | None

log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Certificates:
    """Paths of PEM files. client_ca: whose clients are let in; None: all."""

    cert: str
    key: str
    client_ca: str | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.cert, self.key) if self.client_ca is None else (self.cert, self.key, self.client_ca)

    def context(self) -> ssl.SSLContext:
        """For a server, of the files as they are now. Raises ConfigError naming what can't be used."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"--tls-cert {self.cert} with --tls-key {self.key}: {error}", field="--tls-cert"
            ) from None
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"the client CA {self.client_ca}: {error}", field="client-ca") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def lasting_context(self) -> ssl.SSLContext:
        """For a server that stays: each handshake is of the files as they are then. Raises ConfigError as `context`."""
        fresh = Fresh(self.paths, self.context)
        door = self.context()

        def choose(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
            connection.context = fresh.value()

        door.sni_callback = choose  # called for every handshake, also where the client names nobody
        return door

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """The same for a gRPC port. Raises ConfigError."""
        fresh = Fresh(self.paths, self._configuration)
        # None tells gRPC that nothing changed, which its types leave out.
        changed = cast("Callable[[], grpc.ServerCertificateConfiguration]", fresh.changed)
        return grpc.dynamic_ssl_server_credentials(
            fresh.value(), changed, require_client_authentication=self.client_ca is not None
        )

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        self.context()  # says what is wrong with them, which gRPC does not
        return grpc.ssl_server_certificate_configuration(
            [(read_pem("--tls-key", self.key), read_pem("--tls-cert", self.cert))],
            None if self.client_ca is None else read_pem("--tls-client-ca", self.client_ca),
        )


class Fresh(Generic[T]):
    """What `make` makes of some files, made again once one of them has changed. For any thread: gRPC asks from its own.

    The first `make` raises what it raises."""

    def __init__(self, paths: Sequence[str], make: Callable[[], T]) -> None:
        self._paths = paths
        self._make = make
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self._value = make()

    def value(self) -> T:
        self.changed()
        return self._value

    def changed(self) -> T | None:
        """The new value, once; None while the files are what they were, or are no good."""
        with self._lock:
            stamps = self._stamps()  # before the files are read: a change in between shows the next time
            if stamps == self._seen:
                return None
            self._seen = stamps
            try:
                self._value = self._make()
            except ConfigError as error:
                log.error("certificates are no good; those read before still hold", extra={"reason": error.message})
                return None
            log.info("certificates were read again", extra={"files": list(self._paths)})
            return self._value

    def _stamps(self) -> tuple[Stamp, ...]:
        return tuple(_stamp(path) for path in self._paths)


def read_pem(flag: str, path: str) -> bytes:
    """Raises ConfigError naming the flag."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}", field=flag) from None


def _stamp(path: str) -> Stamp:
    try:
        seen = Path(path).stat()
    except OSError:
        return None
    return seen.st_mtime_ns, seen.st_size, seen.st_ino
