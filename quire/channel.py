"""gRPC channels from a client to a Quire: options, TLS and the credential, for threads and for asyncio."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import grpc

from quire.errors import InvalidArgument, NotFound

HEALTH_TIMEOUT_S = 5.0
# How long a client tries to take up a stream that broke.
RECONNECT_S = 30.0
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # A router that hangs is noticed: keepalive alone never does, the ping timeout does.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also how long one attempt may take: less fails where the way is long or the machine is busy.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
# A router sends it back before it begins a call, so that a call which ends without it was not begun.
_BEGUN_KEY = "x-request-id"
# Never through a proxy of the environment for what runs on this host.
_LOCAL = ("127.", "localhost:", "[::1]:", "unix:")


def options(address: str, tls_server_name: str | None = None) -> list[tuple[str, int | str]]:
    """Return the gRPC channel arguments for an address: the common ones, and no HTTP proxy for a loopback address or a
    Unix socket. `tls_server_name`: the name to check in the server's certificate."""
    named = [("grpc.ssl_target_name_override", tls_server_name)] if tls_server_name else []
    direct = [("grpc.enable_http_proxy", 0)] if address.startswith(_LOCAL) else []
    return [*OPTIONS, *named, *direct]


def credentials(tls_ca: str | None) -> grpc.ChannelCredentials | None:
    """Return TLS credentials if a certificate authority's PEM file is named, else None. Raises NotFound for a file that
    cannot be read."""
    if tls_ca is None:
        return None
    try:
        return grpc.ssl_channel_credentials(Path(tls_ca).read_bytes())
    except OSError as error:
        raise NotFound(
            "TLS_FILE", f"Cannot read {tls_ca}: {error.strerror}.", "Give the authority as a PEM file.", param="tls_ca"
        ) from error


def has_begun(initial_metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Whether the router had begun the call before it ended: the router then sent `x-request-id` in the initial
    metadata."""
    return any(key == _BEGUN_KEY for key, _ in initial_metadata or ())


def metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata with the credential of a call. Raises InvalidArgument for a key that gRPC metadata cannot
    hold."""
    return (("authorization", bearer(api_key)),) if api_key else ()


def bearer(api_key: str) -> str:
    """Return the value of the header `authorization` for a key, for gRPC and HTTP. Raises InvalidArgument for a key
    with spaces or a line feed around it, or with characters other than printable ASCII, which gRPC metadata cannot
    hold."""
    if api_key != api_key.strip() or not (api_key.isascii() and api_key.isprintable()):
        raise InvalidArgument(
            "BAD_API_KEY",
            "The API key has spaces or a line feed around it, or characters other than printable ASCII.",
            "Give the key alone. A key that is read from a file often ends with a line feed.",
            param="api_key",
        )
    return f"Bearer {api_key}"
