"""gRPC interceptors: typed errors, request ids, spans and metrics, for aio and for threads, on both sides.

Each of the four functions gives the list that its kind of server or channel takes.
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
