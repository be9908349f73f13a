"""The gRPC server of a KV transfer agent's process of peers, for those whom the network lets come over gRPC alone."""

from __future__ import annotations

import contextlib
import threading
from concurrent import futures
from typing import TYPE_CHECKING

import grpc

from quire.v1 import worker_pb2_grpc
from quire_common.errors import QuireError
from quire_common.telemetry.interceptors import sync_server_interceptors
from quire_common.telemetry.logs import get_logger
from quire_common.transport import SERVER_OPTIONS, server_credentials
from quire_worker.kv_transfer.peers.peer_port import FRAME_S, MAX_SESSIONS
from quire_worker.kv_transfer.peers.servicer import PeerServicer

if TYPE_CHECKING:
    from quire_worker.kv_transfer.peers.peer_port import PeerPort
    from quire_worker.kv_transfer.setup import AgentSetup

log = get_logger(__name__)
# Calls whose last words are being read beside those whose sessions run.
_MAX_CALLS = 2 * MAX_SESSIONS
_OPTIONS = {
    **dict(SERVER_OPTIONS),
    # The engine keeps the port by a socket of its own, which does not listen.
    "grpc.so_reuseport": 1,
    # A peer's connection is there for its one call.
    "grpc.max_connection_idle_ms": int(FRAME_S * 1000),
}


def serve_peers(setup: AgentSetup, port: PeerPort) -> None:
    """Until the process ends. Where it cannot be, peers have other ways, or compute."""
    try:
        credentials = server_credentials(setup.service_config())
    except QuireError as error:
        log.error("no pages go over gRPC", code=error.code, error=error.message, fix=error.fix)
        return
    pool = futures.ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="peer-grpc")
    server = grpc.server(
        pool,
        options=list(_OPTIONS.items()),
        interceptors=sync_server_interceptors(),
        maximum_concurrent_rpcs=_MAX_CALLS,
    )
    worker_pb2_grpc.add_PeerServicer_to_server(PeerServicer(port), server)
    with contextlib.suppress(RuntimeError):
        if credentials is None:
            bound = server.add_insecure_port(setup.peer_grpc)
        else:
            bound = server.add_secure_port(setup.peer_grpc, credentials)
        if bound:
            server.start()
            # A server that nobody holds ends.
            threading.Thread(target=server.wait_for_termination, name="peer-server", daemon=True).start()
            return
    log.error("no pages go over gRPC: the port is another's", address=setup.peer_grpc)
