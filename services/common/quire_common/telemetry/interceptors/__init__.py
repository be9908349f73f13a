"""gRPC interceptors for typed errors, request ids, spans and metrics. They exist for asyncio and for threads, and for
clients and servers.

Each of the four functions returns the list of interceptors for its kind of server or channel.
"""

from quire_common.telemetry.interceptors.aio_client import aio_client_interceptors
from quire_common.telemetry.interceptors.aio_server import AioServerInterceptor, aio_server_interceptors
from quire_common.telemetry.interceptors.call_gate import CallGate
from quire_common.telemetry.interceptors.server_call import UNTRACED
from quire_common.telemetry.interceptors.sync_client import sync_client_interceptors
from quire_common.telemetry.interceptors.sync_server import SyncServerInterceptor, sync_server_interceptors

__all__ = [
    "UNTRACED",
    "AioServerInterceptor",
    "CallGate",
    "SyncServerInterceptor",
    "aio_client_interceptors",
    "aio_server_interceptors",
    "sync_client_interceptors",
    "sync_server_interceptors",
]
