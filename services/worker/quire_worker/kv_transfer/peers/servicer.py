"""The gRPC server of an agent process for peers that can reach this worker only over gRPC. Each call carries a data
connection, which a PeerSession serves and authenticates."""

from __future__ import annotations

import contextlib
import threading
from concurrent import futures
from typing import TYPE_CHECKING

import grpc

from quire.v1 import worker_pb2_grpc
from quire_common.errors import QuireError
from quire_common.identity.callers import PEER
from quire_common.kv_data.connection import DataConnection
from quire_common.serving.listen_errors import find_listen_error
from quire_common.telemetry.interceptors import sync_server_interceptors
from quire_common.telemetry.logs import get_logger
from quire_common.transport import SERVER_OPTIONS, callers_of, server_credentials, tls_files
from quire_worker.kv_transfer.peers.peer_access import GRPC
from quire_worker.kv_transfer.peers.peer_port import FRAME_S, MAX_SESSIONS
from quire_worker.kv_transfer.peers.tunnel_stream import read_pieces, shut, tunnel_ends, write_pieces

if TYPE_CHECKING:
    from collections.abc import Iterator

    import grpc

    from quire.v1 import worker_pb2
    from quire_worker.kv_transfer.peers.peer_port import PeerPort
    from quire_worker.kv_transfer.setup import AgentSetup


class PeerServicer(worker_pb2_grpc.PeerServicer):
    """Turns each call into a data connection, and hands it to the PeerPort."""

    def __init__(self, port: PeerPort) -> None:
        self._port = port

    def Connect(
        self, request_iterator: Iterator[worker_pb2.PeerBytes], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.PeerBytes]:
        """Carry a data connection in this call's two streams, and serve it like one that came in by TCP. The call is
        ended if, after its session, the peer does not read the rest in time."""
        ours, theirs = tunnel_ends()
        # When all is said, it may take so long to be read: who does not would keep this thread for ever.
        late = threading.Timer(FRAME_S, context.cancel)
        late.daemon = True
        context.add_callback(late.cancel)
        with theirs:
            context.add_callback(lambda: shut(theirs))
            threading.Thread(target=write_pieces, args=(request_iterator, theirs), name="tunnel", daemon=True).start()
            self._port.begin(DataConnection(ours, FRAME_S, tunnelled=True), GRPC, late.start)
            yield from read_pieces(theirs)


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
    """Start the gRPC server on which peers come in; it runs until the process ends. If its TLS files are bad or the
    port cannot be opened, that is logged, and peers use other transports or compute the pages. Without TLS files, the
    port is not encrypted. Calls beyond twice MAX_SESSIONS at a time are refused."""
    config = setup.service_config()
    try:
        credentials = server_credentials(tls_files(config))
    except QuireError as error:
        log.error("no pages go over gRPC", code=error.code, error=error.message, fix=error.fix)
        return
    pool = futures.ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="peer-grpc")
    server = grpc.server(
        pool,
        options=list(_OPTIONS.items()),
        interceptors=sync_server_interceptors(callers=callers_of(config, PEER)),
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
    cause = find_listen_error(setup.peer_grpc, shared=True)
    log.error("no pages go over gRPC: the port cannot be opened", address=setup.peer_grpc, cause=str(cause))
