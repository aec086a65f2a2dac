"""Settings of keys and certificates: which files, for which side. `services.trust` reads the files."""

from dataclasses import dataclass

from services.errors import InvalidArgument
from services.settings import Settings, setting


def _origin(text: str) -> None:
    if text == "*":
        return
    scheme, separator, host = text.partition("://")
    if scheme not in ("http", "https") or not separator or not host or "/" in host:
        raise InvalidArgument(f"{text!r} is no origin: use scheme://host[:port], without a path, or *")


@dataclass(frozen=True, slots=True)
class ServerTrust(Settings):
    """Who may call this process, and what it shows to those who do."""

    service_key_file: str | None = setting(
        None,
        "file with the keys of the chain's own services, one a line: the first is shown to others, all are taken",
        minimum=1,
        shared=True,
    )
    tls_cert: str | None = setting(
        None,
        "PEM file with the certificate, and its chain, that TCP ports show; shown to called services too",
        minimum=1,
        shared=True,
    )
    tls_key: str | None = setting(None, "PEM file with the private key of tls-cert", minimum=1, shared=True)
    tls_client_ca: str | None = setting(
        None,
        "PEM file: who connects to gRPC or metrics must show a certificate that one of these signed",
        minimum=1,
        shared=True,
    )
    allow_insecure: bool = setting(
        False,
        "whether to listen beyond loopback though neither keys nor client certificates are asked for",
        shared=True,
    )


@dataclass(frozen=True, slots=True)
class CallTrust(Settings):
    """Whom this process calls."""

    tls_ca: str | None = setting(
        None,
        "PEM file: services that are called at host:port must show a certificate that one of these signed; none calls "
        "them in plain text",
        minimum=1,
        shared=True,
    )


@dataclass(frozen=True, slots=True)
class UserKeys(Settings):
    api_keys: str | None = setting(
        None,
        "file of API keys, made by `tercet keys`; read again when it changes, and on SIGHUP",
        minimum=1,
        shared=True,
    )


@dataclass(frozen=True, slots=True)
class HttpTrust(Settings):
    """Who may use the gateway."""

    http_client_ca: str | None = setting(
        None, "PEM file: HTTP clients must show a certificate that one of these signed", minimum=1
    )
    cors_origins: tuple[str, ...] = setting(
        (), "origins whose pages may call the gateway, separated by commas; * is all; none: no page may", check=_origin
    )
