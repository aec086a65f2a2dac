"""How a command reaches a server: its key and certificates, from flags and variables."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from services.rpc import Outgoing
from services.settings import ConfigError
from services.trust import channel_credentials

API_KEY: Final = "TERCET_API_KEY"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--api-key-file", help=f"file that holds the key to show; absent: the variable {API_KEY}")
    for flag, what in (
        ("--tls-ca", "PEM file: whose servers' certificates are trusted; absent: plain text"),
        ("--tls-cert", "PEM file: a certificate to show to the server"),
        ("--tls-key", "PEM file: its private key"),
    ):
        parser.add_argument(flag, help=f"{what} (variable {_variable(flag)})")


def outgoing(chosen: argparse.Namespace, environ: Mapping[str, str]) -> Outgoing:
    """Raises ConfigError."""
    ca, cert, private = (
        _given(chosen, flag) or environ.get(_variable(flag)) or None for flag in ("--tls-ca", "--tls-cert", "--tls-key")
    )
    tls = channel_credentials(ca, cert, private)
    key = _key(chosen.api_key_file, environ)
    return Outgoing(tls, lambda: key)


def _key(path: str | None, environ: Mapping[str, str]) -> str | None:
    if path is None:
        return environ.get(API_KEY) or None
    try:
        lines = Path(path).read_text().split()
    except OSError as error:
        raise ConfigError(f"--api-key-file {path}: {error.strerror}", field="--api-key-file") from None
    if not lines:
        raise ConfigError(f"--api-key-file {path} is empty", field="--api-key-file")
    return lines[0]


def _given(chosen: argparse.Namespace, flag: str) -> str | None:
    value: str | None = getattr(chosen, flag.removeprefix("--").replace("-", "_"))
    return value


def _variable(flag: str) -> str:
    return "TERCET_" + flag.removeprefix("--").upper().replace("-", "_")
