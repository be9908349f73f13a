"""gRPC interceptors: typed errors, request ids, spans and metrics, for aio and for threads, on both sides.

A server takes one: `AioServerInterceptor()` or `SyncServerInterceptor()`. A channel takes a list:
`aio_client_interceptors(target)` or `sync_client_interceptors(target)`.
"""

from quire_common.telemetry.interceptors.aio_client import aio_client_interceptors
from quire_common.telemetry.interceptors.aio_server import AioServerInterceptor
from quire_common.telemetry.interceptors.server_call import UNTRACED
from quire_common.telemetry.interceptors.sync_client import sync_client_interceptors
from quire_common.telemetry.interceptors.sync_server import SyncServerInterceptor

__all__ = [
    "UNTRACED",
    "AioServerInterceptor",
    "SyncServerInterceptor",
    "aio_client_interceptors",
    "sync_client_interceptors",
]
