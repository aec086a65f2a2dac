"""Where a server is, and how a channel to it behaves. Pure: strings in, checks and gRPC arguments out."""

import ipaddress
import json
import re
from typing import Final

from tercet.errors import ErrorDetails, InvalidArgumentError

UNIX_PATH_BYTES: Final = 107
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
_HOST_PORT: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:/\[\]\s]+):(\d{1,5})")
_HOSTS: Final = ("dns:///", "dns:", "ipv4:", "ipv6:")


def check_target(target: str) -> None:
    """Refuse, by name, what gRPC would take and never reach.

    Good: `host:port`, `[::1]:port`, `unix:/path`, and gRPC's `dns:///host:port`, `ipv4:`, `ipv6:`.
    """
    if target.startswith("unix:"):
        path = _unix_path(target)
        if not path or len(path.encode()) > UNIX_PATH_BYTES:
            raise _invalid(f"a Unix socket's path has 1 to {UNIX_PATH_BYTES} bytes, this has {len(path.encode())}")
        return
    if target.startswith(("http://", "https://")):
        raise _invalid(f"must be host:port or unix:/path, not the URL {target!r}; for TLS set tls=True")
    addresses = _without_scheme(target).split(",")
    for address in addresses:
        match = _HOST_PORT.fullmatch(address)
        if match is None or not 0 < int(match[2]) < 65536:
            raise _invalid(f"must be host:port or unix:/path, not {target!r}")


def is_local(target: str) -> bool:
    """Whether bytes to `target` stay on this machine: a Unix socket or loopback."""
    if target.startswith("unix:"):
        return True
    return all(_is_loopback(address.rpartition(":")[0]) for address in _without_scheme(target).split(","))


def server_address(target: str) -> tuple[str, int | None]:
    """Host and port, or path and None, as telemetry names them. `target` is checked."""
    if target.startswith("unix:"):
        return _unix_path(target), None
    host, _, port = _without_scheme(target).split(",")[0].rpartition(":")
    return host.strip("[]"), int(port)


def channel_options(target: str) -> list[tuple[str, str | int]]:
    """Arguments of the channel.

    Keepalive finds a dead peer in 30 s, also while a request waits silently in the queue; reconnecting is as quick as
    the retries are; calls are spread over all addresses; a proxy in the environment is never asked for this machine
    itself.
    """
    options: list[tuple[str, str | int]] = [
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.primary_user_agent", "tercet-python"),
        ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),
    ]
    if is_local(target):
        options.append(("grpc.enable_http_proxy", 0))
    return options


def _unix_path(target: str) -> str:
    path = target.removeprefix("unix:")
    return path.removeprefix("//") if path.startswith("///") else path


def _without_scheme(target: str) -> str:
    for scheme in _HOSTS:
        if target.startswith(scheme):
            return target.removeprefix(scheme)
    return target


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _invalid(problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"target {problem}", ErrorDetails(field="target"))
