"""Channels and servers: how the processes reach each other.

Owns transport options and binding. Must not know any service. Invariants: both sides agree on
keepalive (a client that pings more often than the server allows is disconnected); message sizes are explicit;
an address is either bound by this process alone or refused with the reason.
"""

import errno
import socket
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from opentelemetry.trace import NoOpTracer, Tracer

from services.address import Address, parse_address
from services.errors import FailedPrecondition
from services.gate import OPEN_GATE, Gate
from services.rpc_client import TracedChannel
from services.rpc_server import CallObserver, ServerInterceptor

CLIENT_PING_S: Final = 20
SERVER_MIN_PING_S: Final = 10
PING_TIMEOUT_S: Final = 10
MESSAGE_LIMIT: Final = 64 << 20

# A peer that comes back is to be found within a second, not within gRPC's default of two minutes.
RECONNECT: Final = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000))

Options = list[tuple[str, int | str]]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """max_message_bytes: both directions. max_connection_age_s: after it clients are asked to connect anew, so
    that new replicas get their share; None keeps connections. max_connection_age_grace_s: how long calls on
    such a connection may go on; None means to their end. max_concurrent_rpcs: beyond it RESOURCE_EXHAUSTED.
    ping_s, ping_timeout_s: a client that was silent for the one and then for the other is gone, and so are its
    calls. These pings go from server to client, so they leave alone what the server allows its clients to send.
    slow_reader_s: how long a client may leave one message of a stream unread before the stream ends; None: for ever.
    any_pings: clients may ping as often as they like. Some measure their bandwidth by pings, and can't be told."""

    max_message_bytes: int = MESSAGE_LIMIT
    max_connection_age_s: float | None = None
    max_connection_age_grace_s: float | None = None
    max_concurrent_rpcs: int | None = None
    ping_s: float = CLIENT_PING_S
    ping_timeout_s: float = PING_TIMEOUT_S
    slow_reader_s: float | None = None
    any_pings: bool = False


@dataclass(frozen=True, slots=True)
class Outgoing:
    """How this process calls others. tls: for host:port; None: plain text. Unix sockets are always plain: who may open
    them is the file system's to say. key: what it shows to them, asked for each call."""

    tls: grpc.ChannelCredentials | None = None
    key: Callable[[], str | None] = lambda: None


PLAIN: Final = Outgoing()


@dataclass(frozen=True, slots=True)
class Door:
    """Two ways to one server. calls: of requests, traced; asking: for what is polled."""

    target: str
    calls: grpc.aio.Channel
    asking: grpc.aio.Channel


def make_server(
    tracer: Tracer,
    *,
    observer: CallObserver | None = None,
    options: ServerOptions = ServerOptions(),
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    gate: Gate = OPEN_GATE,
) -> grpc.aio.Server:
    """A server whose handlers take `services.rpc_server.call_context`; not bound, not started.

    tracer: starts the SERVER spans. observer: told about each finished call. interceptors: run inside ours.
    gate: who may call.
    """
    return grpc.aio.server(
        interceptors=[ServerInterceptor(tracer, observer, options.slow_reader_s, gate), *interceptors],
        options=_server_options(options),
        maximum_concurrent_rpcs=options.max_concurrent_rpcs,
    )


def make_channel(
    target: str,
    tracer: Tracer | None = None,
    *,
    max_message_bytes: int = MESSAGE_LIMIT,
    extra: Sequence[tuple[str, int | str]] = (),
    outgoing: Outgoing = PLAIN,
) -> grpc.aio.Channel:
    """A channel to `target`, traced when there is a tracer; connects on first use.

    target: an address, or a gRPC name such as `dns:///host:port`. extra: further channel options,
    or other values of these. outgoing: certificates and key.
    """
    address = Address(target, None) if target.startswith("dns:") else parse_address(target)
    where = target if target.startswith("dns:") else address.target
    chosen: Options = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", CLIENT_PING_S * 1000),
        *_ping_timeout(PING_TIMEOUT_S),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_http_proxy", 0),
        *RECONNECT,
    ]
    options = list({**dict(chosen), **dict(extra)}.items())
    if outgoing.tls is None or where.startswith("unix:"):
        channel = grpc.aio.insecure_channel(where, options=options)
    else:
        channel = grpc.aio.secure_channel(where, outgoing.tls, options=options)
    return TracedChannel(channel, tracer or NoOpTracer(), address.host, address.port, outgoing.key)


def bind(server: grpc.aio.Server, listen: str, tls: grpc.ServerCredentials | None = None) -> str:
    """Bind `listen` and return the address that clients use (port 0 becomes the port given by the system).

    tls: for host:port; None, and Unix sockets: plain text.

    Raises InvalidArgument for what is no address, FailedPrecondition naming the address and the reason when it
    cannot be had. A socket file left by a dead process is removed, one that answers is not.
    """
    address = parse_address(listen)
    if address.is_unix:
        _claim_socket_path(Path(address.host))
    else:
        _probe_port(address)
    try:
        if tls is None or address.is_unix:
            port = server.add_insecure_port(address.target)
        else:
            port = server.add_secure_port(address.target, tls)
    except RuntimeError as error:
        raise _cannot_bind(address, str(error)) from error
    if port == 0:
        raise _cannot_bind(address, "gRPC gave no reason")
    return address.target if address.is_unix else Address(address.host, port).target


def _ping_timeout(seconds: float) -> Options:
    """gRPC waits for an answered ping as long as the second one says, a minute by default, whatever the first says."""
    return [(key, max(1, round(seconds * 1000))) for key in ("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")]


def _server_options(options: ServerOptions) -> Options:
    chosen: Options = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", options.max_message_bytes),
        ("grpc.keepalive_time_ms", max(1, round(options.ping_s * 1000))),
        *_ping_timeout(options.ping_timeout_s),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", SERVER_MIN_PING_S * 1000),
    ]
    if options.any_pings:
        chosen.append(("grpc.http2.max_ping_strikes", 0))
    if options.max_connection_age_s is not None:
        chosen.append(("grpc.max_connection_age_ms", round(options.max_connection_age_s * 1000)))
    if options.max_connection_age_grace_s is not None:
        chosen.append(("grpc.max_connection_age_grace_ms", round(options.max_connection_age_grace_s * 1000)))
    return chosen


def _cannot_bind(address: Address, why: str) -> FailedPrecondition:
    return FailedPrecondition(f"cannot listen on {address.target}: {why}", reason="CANNOT_LISTEN", field="listen")


def _claim_socket_path(path: Path) -> None:
    """Make way for a Unix socket: gRPC itself would take the path away from a living server."""
    where = Address(str(path), None)
    if not path.parent.is_dir():
        raise _cannot_bind(where, f"the directory {path.parent} does not exist")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise _cannot_bind(where, "a file that is no socket has this name")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return  # left by a dead process: gRPC removes it when it binds
        except OSError as error:
            raise _cannot_bind(where, f"the socket there cannot be probed ({error})") from error
    raise _cannot_bind(where, "another process is listening there")


def _probe_port(address: Address) -> None:
    """Name what the system says about the address; gRPC's own error hides the cause."""
    try:
        found: list[Any] = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise _cannot_bind(address, f"the host {address.host!r} has no address ({error.strerror})") from error
    for family, kind, protocol, _, where in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(where)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL and len(found) > 1:
                    continue  # `localhost` names an IPv6 address on a machine without IPv6
                raise _cannot_bind(address, error.strerror or str(error)) from error
