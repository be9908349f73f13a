"""gRPC options and credentials that servers and channels must agree on. Measured reasons stand beside each."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from quire_common.config import ServiceConfig
from quire_common.identity.callers import CallerCheck, caller_check, server_name
from quire_common.identity.tls_files import TlsContent, TlsFiles, read_tls_files
from quire_common.identity.watched_files import WatchedFiles

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Hung is dead: keepalive alone never notices a stopped process, the ping timeout does.
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    # Otherwise a second server binds the same port silently and takes half of the calls.
    ("grpc.so_reuseport", 0),
    # Clients ping every second; the default strikes them off.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
]

# Otherwise gRPC grows the window of all streams to what the network carries, megabytes, and so takes the whole message
# of a call that is refused unread: 1.9 ms of CPU time and 3 MB each, instead of 0.55 ms and 0.26 MB. The window of a
# call whose message is read still grows to that message.
_UNREAD_BYTES = 256 * 1024
# Of grpc_compression_algorithm: the bit of "identity" alone.
_NO_COMPRESSION = 1


@dataclass(frozen=True, slots=True)
class PortLimits:
    """The limits of a server for clients outside the cluster. `calls` and `connections` limit the number at the same
    time; more are refused, but calls beyond the limit on one connection wait in the client. `receive_timeout_s` limits
    the time until the single message of a call has arrived. Compressed messages are refused, because 60 KB may expand
    to 64 MiB."""

    message_bytes: int
    calls: int
    connections: int
    receive_timeout_s: float

    def options(self) -> list[tuple[str, int]]:
        """Return the gRPC options of a server with these limits: those of all servers, with its own limits of received
        messages, calls and connections. Compressed messages are refused, and little of an unread message is
        buffered."""
        own = {
            "grpc.max_receive_message_length": self.message_bytes,
            "grpc.max_concurrent_streams": self.calls,
            "grpc.max_allowed_incoming_connections": self.connections,
            "grpc.compression_enabled_algorithms_bitset": _NO_COMPRESSION,
            "grpc.http2.bdp_probe": 0,
            "grpc.http2.lookahead_bytes": _UNREAD_BYTES,
        }
        return list((dict(SERVER_OPTIONS) | own).items())


CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    # Channels to the same address do not share a connection: a stream's flow control is its own.
    ("grpc.use_local_subchannel_pool", 1),
    # Between attempts: a peer that refuses is soon tried again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # No pause: one attempt may take so long, to its first frame. Less fails where the way is long or a machine busy.
    ("grpc.min_reconnect_backoff_ms", 2000),
    # A peer that starts later is connected half a second after it listens.
    ("grpc.max_reconnect_backoff_ms", 500),
    # Peers are found by discovery, never through a proxy of the environment.
    ("grpc.enable_http_proxy", 0),
]


def tls_files(config: ServiceConfig) -> TlsFiles:
    """Return the files by which the service shows itself to the other services, as server and as client."""
    return TlsFiles(config.tls_cert, config.tls_key, config.tls_ca)


def server_credentials(files: TlsFiles, what: str = "TLS") -> grpc.ServerCredentials | None:
    """Return TLS credentials if there is a certificate (mutual if there is an authority too), else None. They follow
    the files, which logs and metrics call `what`. Raises ConfigError for files that cannot be loaded at first; later
    the former ones stay."""
    if not files.any_pair:
        return None
    watched = WatchedFiles(what, files.paths, lambda: read_tls_files(files))
    used = 0

    def newest() -> grpc.ServerCertificateConfiguration | None:
        """Return the configuration with the newest content that could be loaded, if there is a newer one than at the
        last call, else None. gRPC calls this before each handshake."""
        nonlocal used
        generation = watched.generation
        if generation == used:
            return None
        used = generation
        return _server_configuration(watched.value)

    return grpc.dynamic_ssl_server_credentials(
        _server_configuration(watched.value),
        newest,  # type: ignore[arg-type]  # the published types do not know that None means no change
        require_client_authentication=bool(files.ca),
    )


def _server_configuration(content: TlsContent) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(content.key or b"", content.cert or b"")], content.ca)


def callers_of(config: ServiceConfig, server: str) -> CallerCheck | None:
    """Return the check of the server's callers, or None where the config does not make them show certificates. `server`
    is a key of CALLERS."""
    mutual = config.tls_cert and config.tls_key and config.tls_ca
    return caller_check(server) if mutual else None


def watched_credentials(config: ServiceConfig) -> WatchedFiles[grpc.ChannelCredentials] | None:
    """Return TLS credentials for peers if the config names an authority, else None. They contain this process's
    certificate, if there is one. Raises ConfigError for files that cannot be loaded."""
    files = tls_files(config)
    if not files.ca:
        return None
    return WatchedFiles("peer TLS", files.paths, lambda: _channel_credentials(files))


def channel_credentials(config: ServiceConfig) -> grpc.ChannelCredentials | None:
    """Return what `watched_credentials` would of the files as they are now, for a channel of one call."""
    files = tls_files(config)
    return _channel_credentials(files) if files.ca else None


def _channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    content = read_tls_files(files)
    return grpc.ssl_channel_credentials(content.ca, content.key, content.cert)


def verified_name(service: str) -> tuple[str, str]:
    """Return the channel option by which gRPC looks for the service's name in the server's certificate, and not for the
    host that is dialled: discovery gives addresses of containers, which no certificate contains."""
    return "grpc.ssl_target_name_override", server_name(service)
