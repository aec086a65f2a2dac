"""Keys and certificates of a process, read from their files and ready for its ports and channels.

Owns the rule of what may listen where. Invariants: nothing listens beyond loopback unless callers are asked for a key
or a certificate, or somebody has said that this is meant; Unix sockets are plain, whoever may open them is trusted as
far as the keys say.
"""

import asyncio
import ipaddress
import logging
import signal
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from services.address import Address, parse_address
from services.certificates import Certificates, read_pem
from services.gate import OPEN_GATE, Gate
from services.rpc import PLAIN, Outgoing
from services.settings import ConfigError
from services.trust_settings import CallTrust, ServerTrust

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Trust:
    """gate: of every port. certificates: of TCP ports; None: plain text. outgoing: how others are called."""

    gate: Gate = OPEN_GATE
    certificates: Certificates | None = None
    server: grpc.ServerCredentials | None = None
    outgoing: Outgoing = PLAIN
    allow_insecure: bool = False

    def http(self, client_ca: str | None) -> Certificates | None:
        """For the gateway's port, which asks for other clients' certificates, or for none."""
        if self.certificates is None:
            if client_ca is not None:
                raise ConfigError("--http-client-ca needs --tls-cert", field="--http-client-ca")
            return None
        return Certificates(self.certificates.cert, self.certificates.key, client_ca)

    def check_listen(self, flag: str, listen: str, certificates: Certificates | None) -> None:
        """Raises ConfigError where anybody in the network could use the port; warns where keys could be read."""
        address = parse_address(listen)
        if is_local(address):
            return
        asks = not self.gate.is_open or (certificates is not None and certificates.client_ca is not None)
        if not asks and not self.allow_insecure:
            raise ConfigError(
                f"{flag} {address.target} is beyond loopback, and nobody is asked for a key or a certificate: set "
                "--api-keys, --service-key-file or a client CA, or --allow-insecure true if the network is trusted",
                reason="INSECURE_LISTEN",
                field=flag,
            )
        if not asks:
            log.warning("whoever reaches this address can use it", extra={"address": address.target, "flag": flag})
        elif certificates is None:
            log.warning("keys and texts travel unencrypted", extra={"address": address.target, "flag": flag})

    def check_targets(self, targets: Iterable[str]) -> None:
        """Warns where this process's own key would travel unencrypted."""
        if self.outgoing.tls is not None or self.outgoing.key() is None:
            return
        for target in targets:
            if target.startswith("dns:") or not is_local(parse_address(target)):
                log.warning("the service key travels unencrypted; set --tls-ca", extra={"target": target})

    @asynccontextmanager
    async def kept_fresh(self) -> AsyncIterator[None]:
        """Files of keys are read again when they change, and on SIGHUP."""
        if self.gate.is_open:
            yield
            return
        loop, reload = asyncio.get_running_loop(), asyncio.Event()
        with suppress(RuntimeError, ValueError):  # not in the main thread: then a change of the file is all
            loop.add_signal_handler(signal.SIGHUP, reload.set)
        watching = asyncio.create_task(self.gate.watch(reload))
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            loop.remove_signal_handler(signal.SIGHUP)


NO_TRUST: Final = Trust()


def open_trust(server: ServerTrust, calls: CallTrust = CallTrust(), api_keys: str | None = None) -> Trust:
    """Reads the files. Raises ConfigError naming the flag and what is wrong."""
    if (server.tls_cert is None) != (server.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together", field="--tls-cert")
    if server.tls_client_ca is not None and server.tls_cert is None:
        raise ConfigError("--tls-client-ca needs --tls-cert", field="--tls-client-ca")
    gate = Gate(api_keys, server.service_key_file)
    if server.service_key_file is not None and Path(server.service_key_file).stat().st_mode & 0o077:
        log.warning("others may read the service key", extra={"file": server.service_key_file})
    certificates = credentials = None
    if server.tls_cert is not None and server.tls_key is not None:
        certificates = Certificates(server.tls_cert, server.tls_key, server.tls_client_ca)
        credentials = certificates.grpc_credentials()
    tls = channel_credentials(calls.tls_ca, server.tls_cert, server.tls_key)
    return Trust(gate, certificates, credentials, Outgoing(tls, lambda: gate.service_key), server.allow_insecure)


def channel_credentials(ca: str | None, cert: str | None, key: str | None) -> grpc.ChannelCredentials | None:
    """To call servers whose certificates `ca` has signed, showing one's own where there is one; None: plain text."""
    if ca is None:
        return None
    root = read_pem("--tls-ca", ca)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=root.decode("ascii"))
    except (ValueError, ssl.SSLError) as error:
        raise ConfigError(f"--tls-ca {ca}: {error}", field="--tls-ca") from None
    return grpc.ssl_channel_credentials(
        root,
        None if key is None else read_pem("--tls-key", key),
        None if cert is None else read_pem("--tls-cert", cert),
    )


def is_local(address: Address) -> bool:
    """Whether only this machine reaches it."""
    if address.is_unix or address.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        return False
