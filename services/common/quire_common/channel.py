"""Channels to peers: one place for options, TLS and client interceptors. Certificates follow their files."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from quire_common.config import ServiceConfig
from quire_common.identity.watched_channel import WatchedAioChannel, WatchedChannel
from quire_common.telemetry.interceptors import aio_client_interceptors, sync_client_interceptors
from quire_common.transport import CHANNEL_OPTIONS, verified_name, watched_credentials


def aio_channel(
    address: str, config: ServiceConfig, service: str, own: Sequence[tuple[str, int]] = ()
) -> grpc.aio.Channel:
    """Open a channel for asyncio code, over TLS if the config names an authority. `address` is host:port, or
    dns:///name:port, whose addresses get calls in turn (round robin). `service` is the name of the server's service:
    under TLS, the server's certificate must contain the DNS name of this service. `own` has gRPC options in addition to
    those of all channels. Raises ConfigError for bad TLS files."""
    options: list[tuple[str, int | str]] = [*CHANNEL_OPTIONS, ("grpc.lb_policy_name", "round_robin"), *own]
    credentials = watched_credentials(config)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options, interceptors=aio_client_interceptors(address))
    options.append(verified_name(service))

    def secure(credentials: grpc.ChannelCredentials) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, credentials, options, interceptors=aio_client_interceptors(address))

    return WatchedAioChannel(credentials, secure)


def sync_channel(address: str, config: ServiceConfig, service: str) -> grpc.Channel:
    """Open a channel for code on threads, over TLS if the config names an authority, with the client interceptors.
    `service` is the server's, as in `aio_channel`. Raises ConfigError for bad TLS files."""
    credentials = watched_credentials(config)
    if credentials is None:
        channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
    else:
        channel = WatchedChannel(
            credentials,
            lambda newest: grpc.secure_channel(address, newest, [*CHANNEL_OPTIONS, verified_name(service)]),
        )
    return grpc.intercept_channel(channel, *sync_client_interceptors(address))
